"""Several optimizers beside each other, each over its own parameters: Muon for matrices, AdamW for the rest."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import onebox
from onebox.errors import CheckpointError, UsageError
from onebox.plan import ASYNC, Plan
from onebox.pool import raise_first
from onebox.wire.protocol.instructions import Ask
from tests.kit.models import CASES
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same, call, sizes_of, state_of, train
from tests.kit.stages import SEED, outcome, staged
from tests.kit.trainer_arguments import grouped

SIZES = (8, 8, 5, 8, 8)
HALF = 2


def both(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return what most people use with Muon; AdamW has a group of its own for what is not to decay."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": rest[:1], "weight_decay": 0.1}, {"params": rest[1:]}]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)]


def schedulers(optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    return [torch.optim.lr_scheduler.ExponentialLR(each, 0.5 + 0.2 * place) for place, each in enumerate(optimizers)]


class Together:
    """Both optimizers, as a loop of one process steps them."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._each = optimizers

    def zero_grad(self) -> None:
        for each in self._each:
            each.zero_grad()

    def step(self) -> None:
        for each in self._each:
            each.step()


def reference(name: str, plan: Plan, max_norm: float | None) -> Outcome:
    """Train in this process, with a scheduler for each optimizer."""
    case = CASES[name]
    model = case.model()
    optimizers = both(model)
    each = schedulers(optimizers)

    return train(
        model,
        case.loss,
        Together(optimizers),  # type: ignore[arg-type]
        case.batches(list(SIZES)),
        plan,
        max_norm=max_norm,
        after_step=lambda: [scheduler.step() for scheduler in each],
    )


def steps(trainer: onebox.Trainer, name: str, each: list[Any], first: int = 0, last: int = len(SIZES)) -> Outcome:
    losses = []
    for batch in CASES[name].batches(list(SIZES))[first:last]:
        losses.append(trainer.step(*batch))
        for scheduler in each:
            scheduler.step()
    return outcome(trainer, losses)


def trainer_on(pool: onebox.Pool, name: str, plan: Plan | None, **options: Any) -> onebox.Trainer:
    case = CASES[name]
    model = case.model()
    return onebox.Trainer(
        model, case.loss, both(model), **grouped(pool=pool, plan=plan, seed=SEED, check_every=1, **options)
    )


def replicas(name: str) -> Plan:
    return Plan.data_parallel(range(2), [1.0, 1.0], micro_batch=3)


def pipeline(name: str) -> Plan:
    return staged(name, [0, 1])


PLANS: dict[str, tuple[str, Callable[[str], Plan], dict[str, Any]]] = {
    "a pipeline": ("mlp", pipeline, {"clip_grad_norm": 0.3}),
    "replicas": ("mlp", replicas, {}),
    "replicas that share out the state": ("mlp", lambda name: replace(replicas(name), optimizer="sharded"), {}),
    "steps on the host": ("cnn", lambda name: replace(pipeline(name), update="host"), {"clip_grad_norm": 0.3}),
    "steps that overlap": ("mlp", replicas, {"overlap": True}),
}


@pytest.mark.feature("Optimizers: Use several optimizers at once")
@pytest.mark.parametrize("name", PLANS)
def test_the_result_is_that_of_one_process(name: str, pools: Pools) -> None:
    case, make, options = PLANS[name]
    plan = make(case)
    with trainer_on(pools(2), case, plan, **options) as trainer:
        assert isinstance(trainer.optimizer, list), "what the user gave"
        found = steps(trainer, case, schedulers(list(trainer.optimizer)))
    assert_same(found, reference(case, plan, options.get("clip_grad_norm")))


@pytest.mark.parametrize("after", [1, 2])
def test_a_checkpoint_goes_on_with_both(after: int, pools: Pools, tmp_path: Path) -> None:
    with trainer_on(pools(2), "mlp", replicas("mlp")) as trainer:
        steps(trainer, "mlp", [], 0, HALF)
        saved = trainer.save(tmp_path)
        straight = steps(trainer, "mlp", [], HALF)
    case = CASES["mlp"]
    model = case.model()
    with pytest.raises(
        CheckpointError, match=r"written with Muon and AdamW, but the optimizer is AdamW; give the same"
    ):
        onebox.Trainer.resume(saved, model, case.loss, torch.optim.AdamW(model.parameters()), pool=pools(after))
    optimizers = both(model)
    rest = torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2])
    with pytest.raises(CheckpointError, match="other parameter groups"):
        onebox.Trainer.resume(saved, model, case.loss, [optimizers[0], rest], pool=pools(after))
    with onebox.Trainer.resume(saved, model, case.loss, optimizers, pool=pools(after)) as trainer:
        assert_same(steps(trainer, "mlp", [], HALF), straight, **({"tolerance": 0} if after == 2 else {}))


def test_a_parameter_in_none_stays_as_it_is(pools: Pools) -> None:
    case = CASES["mlp"]
    model = case.model()
    muon = both(model)[0]
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    with onebox.Trainer(model, case.loss, [muon], pool=pools(1)) as trainer:
        found = steps(trainer, "mlp", [], 0, 1).tensors
    changed = {name for name, tensor in before.items() if not torch.equal(found[name], tensor)}
    assert changed == {name for name, tensor in before.items() if tensor.dim() == 2}
    with pytest.raises(UsageError, match=r"is in two optimizers, Muon and SGD"):
        onebox.Trainer(model, case.loss, [muon, torch.optim.SGD(model.parameters())], pool=pools(1))


# ---- gradients that are a step late


def two_kinds(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return optimizers of which one has momentum, and the other has not."""
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) == first] for first in (True, False))
    return [torch.optim.AdamW(matrices, lr=0.01), torch.optim.Adagrad(rest, lr=0.05)]


def expected_next(optimizer: torch.optim.Optimizer, weight: Tensor) -> Tensor:
    """Return a weight with the update that AdamW expects next, by XPipe's formula."""
    group, state, value = optimizer.param_groups[0], optimizer.state[weight], weight.detach()
    first, second = (
        state[key] / (1 - beta ** float(state["step"]))
        for key, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True)
    )
    return value - group["lr"] * (first / (second.sqrt() + group["eps"]) + group["weight_decay"] * value)


def become(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)


def train_late(name: str, plan: Plan, warm_up: int) -> Outcome:
    """Train in this process with gradients that are a step late: ``both`` for AdamW, ``feedback`` for Adagrad."""
    case = CASES[name]
    model = case.model()
    weights = list(model.parameters())
    adamw, _ = optimizers = two_kinds(model)
    matrix = [weight.dim() == 2 for weight in weights]

    def ahead_of(values: Sequence[Tensor]) -> list[Tensor]:
        return [
            expected_next(adamw, w) if own else value for w, own, value in zip(weights, matrix, values, strict=True)
        ]

    losses: list[float] = []
    read = ahead = newest = [weight.detach().clone() for weight in weights]
    last: list[Tensor] = []
    for step, batch in enumerate(case.batches(list(SIZES))):
        late, total, start = step >= warm_up, 0.0, 0
        ahead = ahead_of(newest) if step == warm_up else ahead
        become(weights, read)
        Together(optimizers).zero_grad()
        for part in plan.micro_batches(sizes_of(batch)):
            inputs, targets = (each[start : start + part.size] for each in batch)
            value = case.loss(call(model, inputs), targets) * (part.size / sizes_of(batch))
            value.backward()
            total, start = total + float(value.detach()), start + part.size
        become(weights, newest)
        Together(optimizers).step()
        before, newest = newest, [weight.detach().clone() for weight in weights]
        if late:
            updates = [new - old for new, old in zip(newest, before, strict=True)]
            for place, (update, old) in enumerate(zip(updates, last, strict=False)):
                newest[place] = newest[place] + (0.9 if matrix[place] else 1.0) * (update - old)
            last = updates
            become(weights, newest)
        read, ahead = (ahead, ahead_of(newest)) if late else (newest, ahead)
        losses.append(total)
    return Outcome(losses=losses, norms=[], tensors=state_of(model))


def test_late_gradients_are_treated_as_suits_each_class(pools: Pools, caplog: pytest.LogCaptureFixture) -> None:
    case, warm_up = CASES["mlp"], 1
    plan = staged("mlp", [0, 1], micro_batch=2, schedule=ASYNC)
    model = case.model()
    with (
        caplog.at_level(logging.INFO, "onebox"),
        onebox.Trainer(
            model,
            case.loss,
            two_kinds(model),
            pool=pools(2),
            plan=plan,
            stale=onebox.StaleGradients(warm_up=warm_up),
            seed=SEED,
        ) as trainer,
    ):
        found = steps(trainer, "mlp", [])
    assert_same(found, train_late("mlp", plan, warm_up))
    assert "correction='both': the momentum of AdamW says" in caplog.text
    assert "correction='feedback': Adagrad has no momentum" in caplog.text


# ---- what goes on elsewhere


def test_a_run_that_lost_a_worker_has_the_bits_of_one_that_lost_none() -> None:
    outcomes = []
    for killed in (False, True):
        with (
            onebox.open("cpu*2", threads=1) as pool,
            trainer_on(pool, "mlp", pipeline("mlp"), recover=True, snapshot_every=1) as trainer,
        ):
            steps(trainer, "mlp", [], 0, 3)
            if killed:
                os.kill(pool.process_ids[1], signal.SIGKILL)
            outcomes.append(steps(trainer, "mlp", [], 3))
            assert len(trainer.recoveries) == killed
    assert_same(*outcomes, tolerance=0)


def test_layers_move_with_what_either_remembers(pools: Pools) -> None:
    pool, plan = pools(2), pipeline("mlp")
    other = staged("mlp", [1, 0])
    outcomes = []
    for changed in (False, True):
        with trainer_on(pool, "mlp", plan) as trainer:
            steps(trainer, "mlp", [], 0, HALF)
            if changed:
                trainer._run.adopt(other)
            outcomes.append(steps(trainer, "mlp", [], HALF))
            assert trainer.plan == (other if changed else plan)
    assert_same(*outcomes, tolerance=0)


@pytest.mark.parametrize("staleness", [0, 1])
def test_memory_is_predicted_to_the_byte(staleness: int, pools: Pools) -> None:
    """Muon remembers one tensor of a matrix, AdamW two of a bias, and a counter."""
    pool = pools(2)
    plan = staged("mlp", [0, 1], micro_batch=2, schedule=ASYNC if staleness else "1f1b")
    late: dict[str, Any] = {"staleness": 1, "warm_up": 0} if staleness else {}
    (batch,) = CASES["mlp"].batches([8])
    with trainer_on(pool, "mlp", plan, **late) as trainer:
        for _ in range(3):
            trainer.step(*batch)
        trainer.wait()
        raise_first([pool.post(worker, [Ask("peak")], answer=True) for worker in range(2)])
        for _ in range(2):
            trainer.step(*batch)
        predicted = trainer.predicted_memory(*batch)
        trainer.wait()
        assert {worker: memory.peak_bytes for worker, memory in enumerate(trainer.memory())} == predicted
    if not staleness:
        model = CASES["mlp"].model()
        foreseen = onebox.estimate_memory(model, CASES["mlp"].loss, both(model), *batch, pool="cpu*2", plan=plan)
        assert {device: peak.size_bytes for device, peak in foreseen.peaks.items()} == predicted


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_scalars_of_optimizers_have_the_default_type_of_the_client(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """NAdam and ASGD keep scalars of the default type, in which their updates are computed."""
    x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.ones(8, 2)
    ours, plain = nn.Linear(4, 2), nn.Linear(4, 2)
    plain.load_state_dict(ours.state_dict())
    optimizer = kind(plain.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        optimizer.step()
    with (
        onebox.open("cpu*2", threads=1, virtual_devices=False) as pool,
        onebox.Trainer(ours, nn.functional.mse_loss, kind(ours.parameters(), lr=0.05), pool=pool) as trainer,
    ):
        for _ in range(4):
            trainer.step(x, y)
        trainer.pull()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)
