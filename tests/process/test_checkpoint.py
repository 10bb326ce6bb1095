"""Checkpoints: a run that is resumed ends as one that was not interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import onebox
from onebox.worker import OPTIMIZERS as NATIVE
from tests.kit.models import CASES, OPTIMIZERS, Case, adam_in_groups, adamw, sgd
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same, train
from tests.kit.stages import staged, tensors_of
from tests.kit.trainer_arguments import grouped

MICRO_BATCH = 3
SIZES = [8, 8, 5, 8, 8, 5]
HALF = 3


def steps(trainer: onebox.Trainer, batches: list[Any]) -> Outcome:
    losses = [trainer.step(*batch) for batch in batches]
    return Outcome(losses=[float(loss) for loss in losses], norms=[], tensors=trainer.tensors())


def other_weights(case: Case) -> nn.Module:
    """Return the model with weights that must all be overwritten."""
    model = case.model()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return model


Make = Callable[[nn.Module], torch.optim.Optimizer]


def interrupted(
    case: Case, make: Make, pools: tuple[onebox.Pool, onebox.Pool], folder: Path, **options: Any
) -> tuple[Outcome, Outcome]:
    """Train straight through, and again with a checkpoint and a new trainer half-way; return how both ended."""
    batches = case.batches(SIZES)
    model = case.model()
    with onebox.Trainer(model, case.loss, make(model), **grouped(pool=pools[0], **options)) as trainer:
        steps(trainer, batches[:HALF])
        trainer.save(folder)
        straight = steps(trainer, batches[HALF:])
    model = other_weights(case)
    with onebox.Trainer.resume(folder, model, case.loss, make(model), pool=pools[1]) as trainer:
        assert trainer.steps_done == HALF
        resumed = steps(trainer, batches[HALF:])
    return straight, resumed


# ---- resuming


@pytest.mark.feature("Checkpoints: Resume with the same bits")
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("cnn", "adamw"), ("cnn", "sgd"), ("tied", "adam-in-groups"), ("dropping", "sgd"), ("dropping", "adamw")],
)
def test_a_resumed_run_ends_with_the_same_bits(name: str, optimizer: str, pools: Pools, tmp_path: Path) -> None:
    options = {"micro_batch": MICRO_BATCH, "shares": [2, 1], "seed": 3}
    straight, resumed = interrupted(CASES[name], OPTIMIZERS[optimizer], (pools(2), pools(2)), tmp_path, **options)
    assert_same(resumed, straight, tolerance=0)


@pytest.mark.parametrize("optimizer", NATIVE)
def test_the_state_of_every_optimizer_is_kept(optimizer: str, pools: Pools, tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, optimizer)([p for p in model.parameters() if p.dim() == 2])

    straight, resumed = interrupted(CASES["mlp"], make, (pools(1), pools(1)), tmp_path)
    assert_same(resumed, straight, tolerance=0)


@pytest.mark.parametrize("options", [{"sync": "client"}, {"clip_grad_norm": 0.5}, {"micro_batch": None}])
def test_the_settings_of_the_trainer_are_kept(options: dict[str, Any], pools: Pools, tmp_path: Path) -> None:
    straight, resumed = interrupted(CASES["cnn"], adamw, (pools(2), pools(2)), tmp_path, **options)
    assert_same(resumed, straight, tolerance=0)


@pytest.mark.feature("Checkpoints: Resume on other devices or with another plan")
@pytest.mark.parametrize(
    ("name", "before", "after"), [("cnn", 1, 3), ("cnn", 3, 2), ("dropping", 2, 1), ("dropping", 1, 2)]
)
def test_another_number_of_workers_goes_on_with_the_same_run(
    name: str, before: int, after: int, pools: Pools, tmp_path: Path
) -> None:
    options = {"micro_batch": MICRO_BATCH, "seed": 3}
    both = pools(before), pools(after)
    straight, resumed = interrupted(CASES[name], adam_in_groups, both, tmp_path, **options)
    assert_same(resumed, straight)


def test_a_checkpoint_of_a_fresh_or_just_resumed_trainer_is_whole(pools: Pools, tmp_path: Path) -> None:
    case = CASES["mlp"]
    batches = case.batches(SIZES)
    model = case.model()
    expected = train(model, case.loss, adamw(model), batches, MICRO_BATCH)
    model = case.model()
    with onebox.Trainer(
        model, case.loss, adamw(model), pool=pools(2), plan=onebox.DataParallel(micro_batch=MICRO_BATCH)
    ) as trainer:
        trainer.save(tmp_path)
    losses: list[float] = []
    for part in (batches[:2], [], batches[2:]):
        model = other_weights(case)
        with onebox.Trainer.resume(tmp_path, model, case.loss, adamw(model), pool=pools(2)) as trainer:
            losses += [float(trainer.step(*batch)) for batch in part]
            trainer.save(tmp_path)
            trainer.pull()
    found = Outcome(losses=losses, norms=[], tensors={**dict(model.named_parameters()), **dict(model.named_buffers())})
    assert_same(found, expected)


def test_a_save_before_the_first_step_keeps_what_is_to_be_done(pools: Pools, tmp_path: Path) -> None:
    """Of a trainer that has just begun, and of one that has just been resumed, as before a job is preempted."""
    case = CASES["mlp"]
    plan = staged("mlp", (1, 0), micro_batch=MICRO_BATCH)

    def made(**options: Any) -> onebox.Trainer:
        model = case.model()
        return onebox.Trainer(model, case.loss, adamw(model), **grouped(pool=pools(2), **options))

    def resumed(folder: str) -> onebox.Trainer:
        model = case.model()
        return onebox.Trainer.resume(tmp_path / folder, model, case.loss, adamw(model), pool=pools(2))

    with made(plan=plan, overlap=True) as trainer:
        trainer.save(tmp_path / "staged")
    with made(micro_batch=MICRO_BATCH, shard_optimizer=True) as trainer:
        trainer.save(tmp_path / "parallel")
    for folder in ("staged", "parallel"):
        for _ in range(2):
            with resumed(folder) as trainer:
                trainer.save(tmp_path / folder)
    with resumed("staged") as trainer:
        trainer.step(*case.batches([SIZES[0]])[0])
        assert (trainer.plan, trainer.engine.overlap) == (plan, True)
    with resumed("parallel") as trainer:
        trainer.step(*case.batches([SIZES[0]])[0])
        assert trainer.plan is not None
        assert (trainer.plan.micro_batch, trainer.plan.optimizer) == (MICRO_BATCH, "sharded")
        assert not trainer.engine.overlap


def test_learning_rates_and_what_the_user_adds_come_back(pools: Pools, tmp_path: Path) -> None:
    case = CASES["mlp"]
    batches = case.batches(SIZES)

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = case.model()
        optimizer = sgd(model)
        return model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5)

    model, optimizer, schedule = begin()
    expected = train(model, case.loss, optimizer, batches, MICRO_BATCH, after_step=schedule.step)
    model, optimizer, schedule = begin()
    with onebox.Trainer(
        model, case.loss, optimizer, pool=pools(2), plan=onebox.DataParallel(micro_batch=MICRO_BATCH)
    ) as trainer:
        for batch in batches[:HALF]:
            trainer.step(*batch)
            schedule.step()
        trainer.save(tmp_path, extra={"schedule": schedule.state_dict(), "position": [1, 2]})
        rate = optimizer.param_groups[0]["lr"]
    model, optimizer, schedule = begin()
    with onebox.Trainer.resume(tmp_path, model, case.loss, optimizer, pool=pools(2)) as trainer:
        assert trainer.extra["position"] == [1, 2]
        assert optimizer.param_groups[0]["lr"] == rate
        schedule.load_state_dict(trainer.extra["schedule"])
        for batch in batches[HALF:]:
            trainer.step(*batch)
            schedule.step()
        tensors = tensors_of(trainer)
    assert_same(Outcome(losses=expected.losses, norms=[], tensors=tensors), expected)


class Tempered(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs * self.temperature, targets)


def test_parameters_of_the_loss_are_kept(pools: Pools, tmp_path: Path) -> None:
    case = CASES["mlp"]
    batches = case.batches(SIZES)
    model, loss = case.model(), Tempered()
    with onebox.Trainer(model, loss, adamw(nn.ModuleList([model, loss])), pool=pools(1)) as trainer:
        steps(trainer, batches[:HALF])
        trainer.save(tmp_path)
        straight = steps(trainer, batches[HALF:])
    model, loss = case.model(), Tempered()
    optimizer = adamw(nn.ModuleList([model, loss]))
    with onebox.Trainer.resume(tmp_path, model, loss, optimizer, pool=pools(1)) as trainer:
        assert_same(steps(trainer, batches[HALF:]), straight, tolerance=0)


def test_what_schedulers_keep_in_groups_comes_back(pools: Pools, tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        return model, torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}], lr=0.05)

    batch = torch.ones(4, 4), torch.zeros(4, 2)
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    optimizer.param_groups[0]["layer"], optimizer.param_groups[0]["limits"] = "first", [0.1, 2]
    with onebox.Trainer(model, nn.functional.mse_loss, optimizer, pool=pools(1)) as trainer:
        for _ in range(3):
            trainer.step(*batch)
            scheduler.step()
        trainer.save(tmp_path)
    before = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    model, optimizer = made()
    with onebox.Trainer.resume(tmp_path, model, nn.functional.mse_loss, optimizer, pool=pools(1)):
        after = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        assert after[0].pop("limits") == (0.1, 2)
        assert before[0].pop("limits") == [0.1, 2]
        assert after == before
        again = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12, last_epoch=2)  # makes the third step again
        assert again.get_last_lr() == pytest.approx(scheduler.get_last_lr())
