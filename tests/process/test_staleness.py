"""Steps with a staleness of one give the result of one process that applies each gradient one step late, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import onebox
from onebox.plan import ASYNC, Plan
from tests.late import train_late
from tests.models import CASES, OPTIMIZERS
from tests.process.shelf import Shelf
from tests.process.stages import SEED, staged
from tests.reference import Outcome, assert_same, drawing

SIZES = (8, 8, 8, 5, 8, 8, 8, 8)
"""Samples of each batch; the odd one is of another shape, and of fewer micro-batches."""


@pytest.fixture(scope="module")
def pool(pools: Shelf) -> onebox.Pool:
    return pools(4)


def late(name: str, plan: Plan, optimizer: str, sizes: Sequence[int] = SIZES, **options: Any) -> Outcome:
    """Train a case in this process, each gradient applied one step late."""
    case = CASES[name]
    model = case.model()
    around = drawing(SEED) if case.draws else None

    def cut(size: int) -> list[int]:
        return [part.size for part in plan.micro_batches(size)]

    batches = case.batches(list(sizes))
    return train_late(model, case.loss, OPTIMIZERS[optimizer](model), batches, cut, around=around, **options)


def run(
    pool: onebox.Pool,
    name: str,
    plan: Plan,
    optimizer: str,
    sizes: Sequence[int] = SIZES,
    between: Callable[[onebox.Trainer, int], object] = lambda trainer, step: None,
    **options: Any,
) -> tuple[Outcome, dict[int, int]]:
    """Train a case on a pool; return how it went, and the delays that the workers measured."""
    case = CASES[name]
    model = case.model()
    arguments = {"seed": SEED, "check_every": 1, "plan": plan, "staleness": 1, "delay": "none", **options}
    with onebox.Trainer(model, case.loss, OPTIMIZERS[optimizer](model), pool=pool, **arguments) as trainer:
        losses = []
        for step, batch in enumerate(case.batches(list(sizes))):
            losses.append(trainer.step(*batch))
            between(trainer, step)
        found = {name.removeprefix("model."): tensor for name, tensor in trainer.tensors().items()}
        norms = [loss.gradient_norm or 0.0 for loss in losses]
        delays = dict(trainer.delays)
    return Outcome(losses=[float(loss) for loss in losses], norms=norms, tensors=found), delays


@pytest.mark.parametrize(
    ("name", "devices", "optimizer"),
    [
        ("cnn", (0, 1), "sgd"),
        ("cnn", (2, 0, 1), "adamw"),
        ("gpt2", (0, 1), "adamw"),
        ("gpt2", (3, 1, 0, 2), "sgd"),
        ("resnet", ((0, 1), (2, 3)), "sgd"),
        ("unet", (0, 1, 2), "adam-in-groups"),
        ("dropping", (0, (1, 2), 3), "adamw"),
        ("vit", (0, 1, 0, 1), "sgd"),
        ("tied", (0, 1, 2), "sgd"),
    ],
)
def test_every_gradient_is_applied_one_step_late(
    name: str, devices: Sequence[int | Sequence[int]], optimizer: str, pool: onebox.Pool
) -> None:
    """Batch norm, dropout, tied weights, skips, replicas, a device with two stages; a batch of another shape."""
    plan = staged(name, devices, micro_batch=2, schedule=ASYNC)
    found, delays = run(pool, name, plan, optimizer)
    assert_same(found, late(name, plan, optimizer))
    assert delays == {0: 1, 1: len(SIZES) - 1}
