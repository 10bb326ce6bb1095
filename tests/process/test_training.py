"""What a trainer offers besides steps: clipping, schedulers, precision, evaluation, taking over and giving back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

import onebox
from onebox.errors import ReplicasParted, UsageError
from onebox.wire import spec_of, to_frame
from onebox.wire.protocol.requests import Put
from onebox.worker import OPTIMIZERS as NATIVE
from tests.kit.models import CASES, OPTIMIZERS, adam_in_groups, adamw, sgd
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same, train
from tests.kit.stages import outcome
from tests.kit.trainer_arguments import grouped

MICRO_BATCH = 3
SIZES = [8, 8, 8, 5, 8, 8, 8, 5]


# ---- clipping


@pytest.mark.feature("Trainer: Clip gradients by their norm")
@pytest.mark.parametrize(("name", "limit"), [("mlp", 2.3), ("cnn", 1.3)])
@pytest.mark.parametrize("workers", [1, 3])
def test_gradients_are_clipped_as_pytorch_does(name: str, limit: float, workers: int, pools: Pools) -> None:
    case = CASES[name]
    batches = case.batches(SIZES)
    model = case.model()
    expected = train(model, case.loss, sgd(model), batches, MICRO_BATCH, max_norm=limit)
    assert min(expected.norms) < limit < max(expected.norms)
    model = case.model()
    options = {"micro_batch": MICRO_BATCH, "clip_grad_norm": limit}
    with onebox.Trainer(model, case.loss, sgd(model), **grouped(pool=pools(workers), **options)) as trainer:
        found = outcome(trainer, [trainer.step(*batch) for batch in batches])
    assert_same(found, expected)
    assert found.norms == pytest.approx(expected.norms, abs=1e-10)


def test_without_clipping_there_is_no_norm(pools: Pools) -> None:
    case = CASES["mlp"]
    model = case.model()
    with onebox.Trainer(model, case.loss, sgd(model), pool=pools(1)) as trainer:
        assert trainer.step(*case.batches([4])[0]).gradient_norm is None


# ---- schedulers, and options that the user changes

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=len(SIZES)),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "a chain": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(optimizer, 5)],
        milestones=[3],
    ),
}


@pytest.mark.feature("Trainer: Schedule learning rates")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_step_on_the_client_and_take_effect(scheduler: str, optimizer: str, pools: Pools) -> None:
    case = CASES["mlp"]
    batches = case.batches(SIZES)
    model = case.model()
    plain = OPTIMIZERS[optimizer](model)
    expected = train(model, case.loss, plain, batches, MICRO_BATCH, after_step=SCHEDULERS[scheduler](plain).step)
    model = case.model()
    ours = OPTIMIZERS[optimizer](model)
    schedule = SCHEDULERS[scheduler](ours)
    with onebox.Trainer(
        model, case.loss, ours, pool=pools(2), plan=onebox.DataParallel(micro_batch=MICRO_BATCH)
    ) as trainer:
        losses = []
        for batch in batches:
            losses.append(trainer.step(*batch))
            schedule.step()
        assert_same(outcome(trainer, losses), expected)
    assert schedule.get_last_lr() == [group["lr"] for group in plain.param_groups]


def test_an_option_that_the_user_sets_between_steps_takes_effect(pools: Pools) -> None:
    case = CASES["mlp"]
    batches = case.batches(SIZES[:4])

    def change(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def halve() -> None:
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.param_groups[1]["weight_decay"] += 0.1

        return halve

    model = case.model()
    plain = adam_in_groups(model)
    expected = train(model, case.loss, plain, batches, MICRO_BATCH, after_step=change(plain))
    model = case.model()
    ours = adam_in_groups(model)
    with onebox.Trainer(
        model, case.loss, ours, pool=pools(2), plan=onebox.DataParallel(micro_batch=MICRO_BATCH)
    ) as trainer:
        losses = []
        for batch in batches:
            losses.append(trainer.step(*batch))
            change(ours)()
        assert_same(outcome(trainer, losses), expected)


# ---- optimizers


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


@pytest.mark.feature("Optimizers: Use the optimizers of torch.optim")
@pytest.mark.parametrize("name", NATIVE)
def test_every_optimizer_that_workers_run_does_what_pytorch_does(name: str, pools: Pools) -> None:
    case = CASES["mlp"]
    batches = case.batches([8, 8, 8, 5, 8])
    kind = getattr(torch.optim, name)
    model = case.model()
    expected = train(model, case.loss, kind(matrices(model)), batches, MICRO_BATCH)
    model = case.model()
    with onebox.Trainer(
        model, case.loss, kind(matrices(model)), pool=pools(2), plan=onebox.DataParallel(micro_batch=MICRO_BATCH)
    ) as trainer:
        found = outcome(trainer, [trainer.step(*batch) for batch in batches])
    assert_same(found, expected, 1e-3 if name == "Muon" else 1e-10)  # Muon computes in bfloat16 inside


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"amsgrad": True}, {"maximize": True}])
def test_options_of_optimizers_are_taken_over(options: dict[str, bool], pools: Pools) -> None:
    case = CASES["mlp"]
    batches = case.batches(SIZES[:4])
    model = case.model()
    expected = train(model, case.loss, torch.optim.AdamW(model.parameters(), **options), batches, MICRO_BATCH)
    model = case.model()
    ours = torch.optim.AdamW(model.parameters(), **options)
    with onebox.Trainer(
        model, case.loss, ours, pool=pools(2), plan=onebox.DataParallel(micro_batch=MICRO_BATCH)
    ) as trainer:
        assert_same(outcome(trainer, [trainer.step(*batch) for batch in batches]), expected)


@pytest.mark.feature("Optimizers: Read, load and go on with the optimizer's state")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_that_has_stepped_before_is_taken_over(optimizer: str, pools: Pools) -> None:
    case = CASES["cnn"]
    batches = case.batches(SIZES)
    model = case.model()
    expected = train(model, case.loss, OPTIMIZERS[optimizer](model), batches, MICRO_BATCH)
    model = case.model()
    ours = OPTIMIZERS[optimizer](model)
    before = train(model, case.loss, ours, batches[:3], MICRO_BATCH)
    ours.zero_grad()
    with onebox.Trainer(
        model, case.loss, ours, pool=pools(2), plan=onebox.DataParallel(micro_batch=MICRO_BATCH)
    ) as trainer:
        after = outcome(trainer, [trainer.step(*batch) for batch in batches[3:]])
    assert_same(Outcome(losses=before.losses + after.losses, norms=[], tensors=after.tensors), expected)


# ---- precision


@pytest.mark.feature("Precision: Train in bf16, or in stages that gain by it")
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt2", "attention"])
def test_bfloat16_is_as_near_to_float32_as_pytorchs_autocast(name: str, pools: Pools) -> None:
    case = CASES[name]
    batches = case.batches(SIZES, torch.float32)

    def autocast(outputs: Any, targets: Any) -> Tensor:
        return case.loss(outputs, targets)

    class Cast(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(*args, **kwargs)

    model = case.model(torch.float32)
    expected = train(Cast(model), autocast, sgd(model), batches, MICRO_BATCH)
    exact = case.model(torch.float32)
    wide = train(exact, case.loss, sgd(exact), batches, MICRO_BATCH)
    model = case.model(torch.float32)
    options = {"precision": "bf16", "micro_batch": MICRO_BATCH}
    with onebox.Trainer(model, case.loss, sgd(model), **grouped(pool=pools(2), **options)) as trainer:
        found = outcome(trainer, [trainer.step(*batch) for batch in batches])
    assert found.losses == pytest.approx(expected.losses, rel=1e-2)
    assert found.losses != pytest.approx(wide.losses, rel=1e-6)
    assert {tensor.dtype for tensor in found.tensors.values()} <= {torch.float32, torch.int64, torch.bool}


# ---- evaluation


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).double().mean()


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """A metric of whole numbers: any correct at all."""
    return (outputs.argmax(1) == targets).any().long()


@pytest.mark.feature("Trainer: Evaluate on the devices")
@pytest.mark.parametrize("workers", [1, 3])
def test_evaluation_is_what_pytorch_says_in_eval_mode(workers: int, pools: Pools) -> None:
    case = CASES["cnn"]
    batches = case.batches([9, 9, 4, 2])
    model = case.model()
    metrics = {"accuracy": accuracy, "loss again": case.loss}
    with onebox.Trainer(model, case.loss, adamw(model), pool=pools(workers), metrics=metrics) as trainer:
        for batch in case.batches(SIZES[:4]):
            trainer.step(*batch)
        before = trainer.tensors()
        found = trainer.evaluate(batches)
        after = trainer.tensors()
        trainer.pull()
    assert all(torch.equal(before[name], after[name]) for name in before)
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(x) for x, _ in batches])
    targets = torch.cat([y for _, y in batches])
    assert found.samples == 24
    assert found.loss == pytest.approx(float(case.loss(outputs, targets)), abs=1e-10)
    assert found.metrics["accuracy"] == pytest.approx(float(accuracy(outputs, targets)), abs=1e-10)
    assert found.metrics["loss again"] == found.loss


def test_evaluation_may_come_first_and_leaves_the_models_mode(pools: Pools) -> None:
    case = CASES["cnn"]
    model = case.model().train()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    with onebox.Trainer(model, case.loss, sgd(model), pool=pools(2), metrics={"any": correct}) as trainer:
        assert trainer.evaluate(case.batches([6])).metrics["any"] in (0.0, 0.5, 1.0)
    assert [module.training for module in model.modules()] == modes


def test_evaluation_wants_a_batch(pools: Pools) -> None:
    case = CASES["mlp"]
    model = case.model()
    trainer = onebox.Trainer(model, case.loss, sgd(model), pool=pools(1))
    with trainer, pytest.raises(UsageError, match="no batch"):
        trainer.evaluate([])


# ---- giving back


@pytest.mark.feature("Trainer: Pull weights and buffers into the model")
def test_pull_restores_weights_and_buffers_into_the_users_model(pools: Pools) -> None:
    case = CASES["cnn"]
    batches = case.batches(SIZES[:4])
    expected = case.model()
    train(expected, case.loss, adamw(expected), batches, MICRO_BATCH)
    model = case.model()
    parameters = dict(model.named_parameters())
    with onebox.Trainer(
        model, case.loss, adamw(model), pool=pools(2), plan=onebox.DataParallel(micro_batch=MICRO_BATCH)
    ) as trainer:
        for batch in batches:
            trainer.step(*batch)
        untouched = case.model().state_dict()
        present = {**parameters, **dict(model.named_buffers())}
        assert all(torch.equal(tensor, untouched[name]) for name, tensor in present.items())
        trainer.pull()
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-10)


class Tempered(nn.Module):
    """A loss with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return functional.cross_entropy(outputs * self.temperature, targets)


def test_a_loss_with_parameters_is_trained_too(pools: Pools) -> None:
    case = CASES["mlp"]
    batches = case.batches(SIZES[:4])
    plain, loss = case.model(), Tempered()
    both = nn.ModuleList([plain, loss])
    expected = train(plain, loss, sgd(both), batches, MICRO_BATCH)
    ours, ours_loss = case.model(), Tempered()
    with onebox.Trainer(
        ours,
        ours_loss,
        sgd(nn.ModuleList([ours, ours_loss])),
        pool=pools(2),
        plan=onebox.DataParallel(micro_batch=MICRO_BATCH),
    ) as trainer:
        losses = [float(trainer.step(*batch)) for batch in batches]
        trainer.evaluate(batches)
        trainer.pull()
    assert losses == pytest.approx(expected.losses, abs=1e-10)
    assert ours_loss.temperature.item() == pytest.approx(loss.temperature.item(), abs=1e-10)
    assert int(ours_loss.seen) == int(loss.seen)


# ---- inputs


def test_batches_of_other_shapes_are_captured_once_more(pools: Pools) -> None:
    case = CASES["gpt2"]
    batches = case.batches([6, 5, 6])
    inputs, targets = batches[1]
    batches[1] = {"input_ids": inputs["input_ids"][:, :3]}, targets[:, :3]
    model = case.model()
    expected = train(model, case.loss, adamw(model), batches, MICRO_BATCH)
    model = case.model()
    with onebox.Trainer(
        model, case.loss, adamw(model), pool=pools(2), plan=onebox.DataParallel(micro_batch=MICRO_BATCH)
    ) as trainer:
        assert_same(outcome(trainer, [trainer.step(*batch) for batch in batches]), expected)


def test_inputs_may_be_views_and_the_targets_too(pools: Pools) -> None:
    line = nn.Linear(10, 10).double()
    x_BD = torch.randn(10, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).t()
    expected = functional.mse_loss(line(x_BD), x_BD).item()
    with onebox.Trainer(line, functional.mse_loss, sgd(line), pool=pools(2)) as trainer:
        assert float(trainer.step(x_BD, x_BD)) == pytest.approx(expected, abs=1e-10)


def test_inputs_may_be_overwritten_after_the_step_was_started(pools: Pools) -> None:
    case = CASES["mlp"]
    ((x_BD, y_B),) = case.batches([8])
    model = case.model()
    with onebox.Trainer(model, case.loss, torch.optim.SGD(model.parameters(), lr=0.0), pool=pools(2)) as trainer:
        first = trainer.step(x_BD, y_B)
        expected = case.loss(model(x_BD), y_B).item()
        x_BD.zero_()
        assert float(first) == pytest.approx(expected, abs=1e-10)


# ---- replicas


def put_elsewhere(trainer: onebox.Trainer, pool: onebox.Pool) -> None:
    """Put another value of the first parameter on worker 1."""
    name, tensor = next(iter(trainer.tensors().items()))
    other = tensor + torch.finfo(tensor.dtype).eps * tensor.abs().max()
    pool.post(1, [Put((trainer._remote.named.numbers[name],), (spec_of(other),))], [to_frame(other)])


@pytest.mark.feature("Trainer: Compare replicas every so many steps")
def test_replicas_that_part_are_found_out() -> None:
    case = CASES["mlp"]
    model = case.model()
    batches = case.batches([8] * 4)
    with (
        onebox.open("cpu*2", threads=1) as pool,
        onebox.Trainer(model, case.loss, sgd(model), pool=pool, engine=onebox.Engine(check_every=2)) as trainer,
    ):
        for batch in batches[:2]:
            trainer.step(*batch)
        trainer.wait()
        put_elsewhere(trainer, pool)
        trainer.step(*batches[2]).item()
        with pytest.raises(ReplicasParted, match="after step 3 the replicas are no longer bit-identical"):
            trainer.step(*batches[3]).item()


def test_replicas_are_not_compared_where_nobody_asked() -> None:
    case = CASES["mlp"]
    model = case.model()
    with (
        onebox.open("cpu*2", threads=1) as pool,
        onebox.Trainer(model, case.loss, sgd(model), pool=pool, engine=onebox.Engine(check_every=0)) as trainer,
    ):
        put_elsewhere(trainer, pool)
        trainer.step(*case.batches([8])[0]).item()
