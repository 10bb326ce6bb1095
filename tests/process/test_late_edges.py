"""Late steps of models of which some parts are not trained, and where they begin; what is asked for too late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import onebox
from onebox.errors import ReplicasParted, UsageError
from onebox.plan import ASYNC, Plan, Stage
from tests.kit.late import train_late
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same
from tests.kit.stages import outcome
from tests.kit.trainer_arguments import grouped

WIDTH, SAMPLES, MICRO_BATCH, STEPS, WARM_UP = 6, 4, 2, 6, 2


class Scaled(nn.Module):
    """A layer that reads a parameter through which no gradient goes, as that of a teacher's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.linear(x_BD) * self.scale.detach()


def plain() -> nn.Module:
    """Return a model of three layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).double()


def frozen() -> nn.Module:
    """Return one whose first stage is not trained."""
    model = plain()
    model[0].requires_grad_(False)
    return model


def detached() -> nn.Module:
    """Return one with a parameter that is read and gets no gradient."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(), nn.Linear(WIDTH, WIDTH)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=generator)) for _ in range(steps)]  # type: ignore[misc]


def pipeline(middle: str = "model.1") -> Plan:
    """Return a plan of two stages, the first of one layer, the second of one of that name and another one."""
    names = ["model.0", middle, "model.2"]
    stages = tuple(
        Stage(segments=tuple(own), replicas=((device,),), shares=(1.0,))
        for device, own in enumerate((names[:1], names[1:]))
    )
    return Plan(stages=stages, micro_batch=MICRO_BATCH, schedule=ASYNC)


def cut(samples: int) -> list[int]:
    return [MICRO_BATCH] * (samples // MICRO_BATCH)


def trainer_on(pool: onebox.Pool, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> onebox.Trainer:
    arguments = {"plan": pipeline(), "staleness": 1, "delay": "none", "warm_up": WARM_UP, "check_every": 1, **options}
    return onebox.Trainer(model, nn.functional.mse_loss, optimizer, **grouped(pool=pool, **arguments))


@pytest.mark.parametrize("delay", ["none", "predict"])
@pytest.mark.parametrize("made", [frozen, detached])
def test_what_is_not_trained_has_no_versions(
    made: Callable[[], nn.Module], delay: str, pools: Pools, tmp_path: Path
) -> None:
    """In a stage alone, or beside what is trained; also where the run is saved, and goes on from there."""
    pool, model = pools(2), made()
    expected = train_late(model, nn.functional.mse_loss, sgd(model), batches(), cut, delay=delay, warm_up=WARM_UP)
    model = made()
    plan = pipeline("model.1" if made is frozen else "model.1.linear")
    options: dict[str, Any] = {"plan": plan, "delay": delay, "recover": True, "snapshot_every": 1}
    with trainer_on(pool, model, sgd(model), **options) as trainer:
        losses = [trainer.step(*batches()[0]).item()]
        trainer.save(tmp_path / "exact")
        losses += [trainer.step(*batch).item() for batch in batches()[1:4]]
        trainer.save(tmp_path / "late")
        losses += [trainer.step(*batch).item() for batch in batches()[4:]]
        found = outcome(trainer, losses)
        assert trainer.delays == {0: 1, 1: STEPS - WARM_UP - 1}
    assert_same(found, Outcome(losses=expected.losses, norms=[], tensors=expected.tensors))
    for name, begin in (("exact", 1), ("late", 4)):
        model = made()
        given = model, nn.functional.mse_loss, sgd(model)
        with onebox.Trainer.resume(tmp_path / name, *given, pool=pool) as trainer:
            again = outcome(trainer, losses[:begin] + [trainer.step(*batch) for batch in batches()[begin:]])
        assert again.losses == found.losses
        assert all(torch.equal(tensor, found.tensors[name]) for name, tensor in again.tensors.items())


@pytest.mark.parametrize("delay", ["predict", "extrapolate"])
def test_rates_that_change_where_late_steps_begin(delay: str, pools: Pools, tmp_path: Path) -> None:
    """What weights are expected to become is by the rate of the first late step, also where the run begins with it."""
    rates = [0.1, 0.02, 0.2, 0.05, 0.15, 0.01, 0.1]

    def change(optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.param_groups[0]["lr"] = rates[step]

    model = plain()
    optimizer, steps = sgd(model), iter(range(1, STEPS + 1))
    job = model, nn.functional.mse_loss, optimizer, batches(), cut
    expected = train_late(*job, delay=delay, warm_up=WARM_UP, after_step=lambda: change(optimizer, next(steps)))
    pool, model = pools(2), plain()
    optimizer, losses = sgd(model), []
    with trainer_on(pool, model, optimizer, delay=delay) as trainer:
        for step, batch in enumerate(batches()):
            losses.append(trainer.step(*batch))
            change(optimizer, step + 1)  # as a scheduler does
            if step == WARM_UP - 1:
                trainer.save(tmp_path)
        found = outcome(trainer, losses)
    assert_same(found, Outcome(losses=expected.losses, norms=[], tensors=expected.tensors))
    model = plain()
    optimizer = sgd(model)
    with onebox.Trainer.resume(tmp_path, model, nn.functional.mse_loss, optimizer, pool=pool) as trainer:
        losses = found.losses[:WARM_UP]
        for step, batch in enumerate(batches()[WARM_UP:], WARM_UP):
            change(optimizer, step)
            losses.append(trainer.step(*batch))
        again = outcome(trainer, losses)
    assert again.losses == found.losses
    assert all(torch.equal(tensor, found.tensors[name]) for name, tensor in again.tensors.items())


def data_parallel() -> Plan:
    return Plan.data_parallel((0, 1), (1.0, 1.0), micro_batch=MICRO_BATCH)


@pytest.mark.parametrize("options", [{"overlap": True, "staleness": 0}, {"warm_up": 0}], ids=str)
def test_a_norm_that_never_came_is_told_after_the_end_and_others_go_on(options: dict[str, Any], pools: Pools) -> None:
    pool, model, other = pools(2), plain(), plain()
    with trainer_on(pool, other, sgd(other), plan=data_parallel(), staleness=0) as lasting:
        lasting.step(*batches()[0]).item()
        with trainer_on(pool, model, sgd(model), plan=data_parallel(), clip_grad_norm=0.5, **options) as trainer:
            loss = trainer.step(*batches()[0])
            loss.item()
        with pytest.raises(UsageError, match="the trainer is closed"):
            _ = loss.gradient_norm
        assert lasting.step(*batches()[1]).item() > 0


def test_an_evaluation_that_only_some_were_told_of_is_the_end(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step of a pipeline would get what is left of it."""
    pool, model = pools(2), plain()
    posted: list[int] = []
    with trainer_on(pool, model, sgd(model), staleness=0, plan=replace(pipeline(), schedule="1f1b")) as trainer:
        trainer.step(*batches()[0]).item()
        post = pool.post

        def interrupted(worker: int, *given: Any, **more: Any) -> Any:
            posted.append(worker)
            if len(posted) == 2:
                raise KeyboardInterrupt
            return post(worker, *given, **more)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            trainer.evaluate(batches(1))
            patch.setattr(pool, "post", interrupted)
            trainer.evaluate(batches(1))
        assert posted == [0, 1]
        for call in (lambda: trainer.step(*batches()[1]), lambda: trainer.evaluate(batches(1)), trainer.tensors):
            with pytest.raises(ReplicasParted, match="an evaluation was interrupted"):
                call()


@pytest.mark.parametrize("change", ["a group more", "a parameter thawed", "a parameter frozen"])
def test_what_is_trained_stays_what_it_was(change: str, pools: Pools) -> None:
    """It would have to be brought to the workers anew; nothing is done, and what has been trained can be had."""
    pool, model = pools(2), frozen()
    optimizer = torch.optim.SGD([*model[1:].parameters(), model[0].weight], lr=0.1)
    with trainer_on(pool, model, optimizer) as trainer:
        trainer.step(*batches()[0])
        if change == "a group more":
            optimizer.add_param_group({"params": [model[0].bias]})
        elif change == "a parameter thawed":
            model[0].weight.requires_grad_(True)
        else:
            model[1].weight.requires_grad_(False)
        with pytest.raises(UsageError, match="since this trainer was made"):
            trainer.step(*batches()[1])
        assert trainer.steps_done == 1
        trainer.pull()
