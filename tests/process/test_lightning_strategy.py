"""Runs with ``OneboxStrategy``: what they log, save and resume from is what Lightning on the CPU does."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import onebox
from onebox.engine.workload.batch import as_batch
from onebox.errors import UsageError
from onebox.plan import Plan, Stage
from onebox.pool import Fault, open_pool
from tests.kit.pools import Pools

lightning = pytest.importorskip("lightning")

from lightning.pytorch import callbacks  # noqa: E402 it may be absent

from onebox.integrations.lightning import OneboxStrategy  # noqa: E402 it imports lightning

GUARDED = True

EXACT, HALF = 1e-10, 5e-2
"""Tolerances: in float64; in bfloat16."""

# Lightning reads a checkpoint into a module before precision="64-true" makes it one of float64: modules of resumed runs
# have that type from the start.


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Leave out what Lightning and PyTorch warn of about themselves, and the seed that Lightning keeps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    os.environ.pop("PL_GLOBAL_SEED", None)


class Digits(lightning.LightningModule):
    """A classifier that logs its loss twice."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        samples, labels = batch
        loss = nn.functional.cross_entropy(self.net(samples), labels)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(samples))
        self.log_dict({"again": loss.detach()}, on_step=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        samples, labels = batch
        outputs = self.net(samples)
        self.log("accuracy", (outputs.argmax(1) == labels).double().mean())
        self.log("val_loss", nn.functional.cross_entropy(outputs, labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


class Notes(callbacks.Callback):
    """What was logged, and weights that callbacks see at the end of each epoch."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        found = trainer.callback_metrics
        self.found += [found[name].item() for name in ("loss_step", "again")]
        self.found.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.found += [parameter.sum().item() for parameter in pl_module.parameters()]

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.found += [trainer.callback_metrics[name].item() for name in ("val_loss", "accuracy")]

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.found.append(trainer.callback_metrics["loss_epoch"].item())
        self.found += [parameter.sum().item() for parameter in pl_module.parameters()]


class Run:
    """A run of two epochs with clipping and a checkpoint after each.

    Args:
        folder: For checkpoints.
        strategy: Of Lightning.
        module: The module.
        resume: A checkpoint to go on from.
        more: Arguments of the trainer.
    """

    def __init__(
        self, folder: Path, strategy: Any = "auto", *, module: Any = None, resume: Path | None = None, **more: Any
    ) -> None:
        lightning.seed_everything(0)
        data = TensorDataset(torch.randn(45, 8), torch.randint(0, 4, (45,)))  # the last batch is a smaller one
        self.notes, self.module = Notes(), module or Digits()
        saver = callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
        given = {"precision": "64-true", "gradient_clip_val": 0.1, "max_epochs": 2, **more}
        given["callbacks"] = [self.notes, saver, *given.get("callbacks", [])]
        self.trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy,
            logger=False,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
            **given,
        )
        loaders = [DataLoader(data, batch_size=8, num_workers=0) for _ in range(2)]
        self.trainer.fit(self.module, *loaders, ckpt_path=resume)


def require_same(ours: Run, plain: Run, tolerance: float, *, last: bool = False) -> None:
    """Require that two runs noted the same, and end with the same weights; with ``last`` in the last epoch."""
    found, wanted = ours.notes.found, plain.notes.found
    assert len(wanted) > 30
    if last:
        count = min(len(found), len(wanted))
        found, wanted = found[-count:], wanted[-count:]
    assert len(found) == len(wanted)
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) <= tolerance
    pairs = zip(ours.module.parameters(), plain.module.parameters(), strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) <= tolerance


@pytest.mark.feature("Launchers: Hand the steps of Lightning to a plan")
def test_a_run_logs_what_that_on_the_cpu_logs(tmp_path: Path, pools: Pools) -> None:
    """Losses, rates, validations, and the weights that callbacks see at the end of each epoch."""
    strategy = OneboxStrategy(pools(2), plan=onebox.DataParallel(micro_batch=2))
    require_same(Run(tmp_path / "ours", strategy), Run(tmp_path / "plain"), EXACT)
    assert strategy.planned is None


@pytest.mark.parametrize(
    ("workers", "plan", "tolerance", "more"),
    [
        (1, None, EXACT, {}),
        (2, "auto", EXACT, {}),
        (2, onebox.DataParallel(shares=[3, 1]), EXACT, {"gradient_clip_val": None}),
        (2, None, 1e-5, {"precision": "32-true"}),
        (2, None, HALF, {"precision": "bf16-mixed"}),
        (2, None, EXACT, {"max_epochs": -1, "max_steps": 9}),
    ],
)
def test_other_runs_log_what_those_on_the_cpu_log(
    workers: int, plan: Any, tolerance: float, more: dict[str, Any], tmp_path: Path, pools: Pools
) -> None:
    strategy = OneboxStrategy(pools(workers), plan=plan)
    require_same(Run(tmp_path / "ours", strategy, **more), Run(tmp_path / "plain", **more), tolerance)


class Segments(callbacks.Callback):
    """The segments of a captured module."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        batch = as_batch(([torch.zeros(2, 8, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)],), None)
        strategy = trainer.strategy
        with strategy.precision_plugin.train_step_context(), strategy._calls.recorded():
            self.names = strategy.planned.captures.segments(batch, 2)


@pytest.mark.feature("Launchers: Hand the steps of Lightning to a plan")
def test_a_pipeline_logs_what_the_cpu_logs(tmp_path: Path, pools: Pools) -> None:
    seen = Segments()
    Run(tmp_path / "seen", OneboxStrategy(pools(2)), max_epochs=-1, max_steps=1, callbacks=[seen])
    halves = seen.names[: len(seen.names) // 2], seen.names[len(seen.names) // 2 :]
    stages = [Stage(segments=part, replicas=((place,),), shares=(1.0,)) for place, part in enumerate(halves)]
    plan = Plan(stages=tuple(stages), micro_batch=2, schedule="1f1b")
    require_same(Run(tmp_path / "ours", OneboxStrategy(pools(2), plan=plan)), Run(tmp_path / "plain"), EXACT)


@pytest.mark.feature("Launchers: Resume checkpoints with or without a plan")
@pytest.mark.parametrize("first", ["planned", "plain"])
def test_a_checkpoint_of_one_is_resumed_by_the_other(first: str, tmp_path: Path, pools: Pools) -> None:
    kinds = {
        "planned": lambda: OneboxStrategy(pools(2), plan=onebox.DataParallel(micro_batch=2)),
        "plain": lambda: "auto",
    }
    one, (other,) = kinds.pop(first), kinds.values()
    whole = Run(tmp_path / "whole", one(), module=Digits().double())
    start = tmp_path / "whole" / "epoch=0.ckpt"
    resumed = Run(tmp_path / "rest", other(), module=Digits().double(), resume=start)
    require_same(resumed, whole, EXACT, last=True)
    ours, plain = (torch.load(tmp_path / each / "epoch=1.ckpt", weights_only=False) for each in ("whole", "rest"))
    assert ours.keys() == plain.keys()
    for name in ("state_dict", "optimizer_states", "lr_schedulers"):
        left, right = (torch.utils._pytree.tree_flatten(each[name]) for each in (ours, plain))
        assert left[1] == right[1]
        assert [type(each) for each in left[0]] == [type(each) for each in right[0]]


def test_a_resumed_run_draws_the_random_numbers_of_the_whole_one(tmp_path: Path, pools: Pools) -> None:
    whole = Run(tmp_path / "whole", OneboxStrategy(pools(2)), module=Digits(0.3).double())
    start = tmp_path / "whole" / "epoch=0.ckpt"
    rest = Run(tmp_path / "rest", OneboxStrategy(pools(2)), module=Digits(0.3).double(), resume=start)
    require_same(rest, whole, EXACT, last=True)


@pytest.mark.feature("Launchers: Recover beneath transformers and Lightning")
def test_the_loss_of_a_worker_is_not_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_pool("cpu*2", threads=1, faults={1: (Fault("kill", "reduce", 5),)}) as pool:
        caplog.set_level(logging.WARNING, logger="onebox")
        ours = Run(tmp_path / "ours", OneboxStrategy(pool, recovery=onebox.Recovery(snapshot_every=2)))
        assert any("recovered" in line for line in caplog.messages), caplog.messages
    require_same(ours, Run(tmp_path / "plain"), EXACT)


class Failing(callbacks.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 4:
            raise ZeroDivisionError


def test_a_run_that_fails_leaves_the_present_weights(tmp_path: Path) -> None:
    found = []
    for strategy in (OneboxStrategy("cpu*2"), "auto"):
        module = Digits().double()
        torch.manual_seed(0)
        for parameter in module.parameters():
            nn.init.uniform_(parameter)
        with pytest.raises(ZeroDivisionError):
            Run(tmp_path, strategy, module=module, callbacks=[Failing()])
        found.append(list(module.parameters()))
    assert max((a - b).abs().max().item() for a, b in zip(*found, strict=True)) <= EXACT


def test_a_strategy_serves_further_runs(tmp_path: Path, pools: Pools) -> None:
    strategy = OneboxStrategy(pools(2))
    ours, plain = Run(tmp_path / "ours", strategy), Run(tmp_path / "plain")
    loader = DataLoader(TensorDataset(torch.ones(8, 8), torch.zeros(8, dtype=torch.int64)), batch_size=8)
    for each in (ours, plain):
        each.trainer.fit_loop.max_epochs = 3
        each.trainer.fit(each.module, loader, loader)
        (again,) = each.trainer.validate(each.module, loader, verbose=False)
        each.notes.found += again.values()
    require_same(ours, plain, EXACT)


class Manual(Digits):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Clipping(Digits):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        pass


class Looking(Digits):
    def on_after_backward(self) -> None:
        pass


class LookingOn(callbacks.Callback):
    def on_before_optimizer_step(self, *_: Any) -> None:
        pass


class Several(Digits):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("more", loss * 2)
        return loss


class Counting(Digits):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.log("rate", 0.5)
        return super().training_step(batch, batch_idx)


class Weighing(Digits):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("more", loss, batch_size=3)
        return loss


class Indexed(Digits):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (batch_idx + 1)


class Aged(Digits):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (self.current_epoch + 1)


class Talking(Digits):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "outputs": batch[0]}


class Halving(Digits):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()


class Nested(Digits):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.inner(batch[0])


class Inner(lightning.LightningModule):
    def forward(self, inputs: Tensor) -> Any:
        return self.global_step + 1


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "manual": (Manual, {"gradient_clip_val": None}, "automatic_optimization=False: a plan makes whole steps"),
    "own clipping": (Clipping, {}, "configure_gradient_clipping of a module: .* set gradient_clip_val"),
    "clipping by value": (Digits, {"gradient_clip_algorithm": "value"}, "clip by the norm of all gradients"),
    "accumulation": (
        Digits,
        {"accumulate_grad_batches": 2},
        "accumulate_grad_batches=2: .* batch_size 2 times as large",
    ),
    "hooks": (Looking, {}, "on_after_backward of Looking: gradients are on the workers"),
    "callbacks": (Digits, {"callbacks": [LookingOn()]}, "on_before_optimizer_step of LookingOn: gradients are on"),
    "averages": (
        Digits,
        {"callbacks": [callbacks.StochasticWeightAveraging(0.1)]},
        "it reads the weights in each step",
    ),
    "other values": (Several, {}, "logs 'more', which is not the loss"),
    "numbers": (Counting, {}, "logs 'rate', which is not the loss"),
    "sizes": (Weighing, {}, "logs 'more' with batch_size=3 for 4 samples"),
    "index": (Indexed, {}, "uses batch_idx, but is captured once"),
    "epoch": (Aged, {}, "reads trainer.current_epoch, but is captured once"),
    "closure alone": (Halving, {}, "calls its closure without the optimizer's step"),
    "epoch of a child": (Nested, {}, "reads trainer.global_step, but is captured once"),
    "outputs": (Talking, {}, "returns a dict of loss, outputs; .* return a tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_plan_does_not_do_is_refused_before_a_step(case: str, tmp_path: Path, pools: Pools) -> None:
    module, more, said = REFUSED[case]
    made = module()
    before = [parameter.clone() for parameter in made.double().parameters()]
    with pytest.raises(UsageError, match=said) as caught:
        Run(tmp_path, OneboxStrategy(pools(2)), module=made, **more)
    assert "\n" not in str(caught.value), "one sentence, not one inside another"
    assert all(torch.equal(a, b) for a, b in zip(before, made.parameters(), strict=True))


def test_an_option_that_there_is_not_is_refused() -> None:
    with pytest.raises(
        onebox.OneboxError, match=r"OneboxStrategy\(outer=...\): allowed are plan, adaptive, .*recovery"
    ):
        OneboxStrategy("cpu*2", outer=onebox.Outer())  # type: ignore[call-arg]
