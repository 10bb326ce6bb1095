"""Every model trains on replicas as in one process: in float64 to 1e-10 after 20 steps.

Optimizers, numbers of workers, syncs, shares and micro-batches take turns. That they go with each other and with plans
of stages is in ``test_covering_array``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

import onebox
from onebox.plan import Plan
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same, drawing, train
from tests.kit.stages import outcome
from tests.kit.trainer_arguments import grouped

SEED = 5
STEPS = 20
BATCH, SMALLER, TINY = 8, 5, 2
"""Samples of a batch; of the last one of an epoch; and of one that leaves a replica idle."""

MICRO_BATCH = 3
"""It divides none of the batches."""

UNEVEN = {1: (1.0,), 2: (2.0, 1.0), 3: (3.0, 1.0, 2.0)}


class Setting(NamedTuple):
    """One run."""

    model: str
    optimizer: str
    workers: int
    sync: str
    shares: str
    cut: str


def settings() -> list[Setting]:
    """Return a run for each model, the other settings in rotation."""
    return [
        Setting(
            model=model,
            optimizer=tuple(OPTIMIZERS)[number % 3],
            workers=3 - number // 3 % 3,
            sync=("workers", "client")[number // 2 % 2],
            shares=("equal", "uneven")[number % 2],
            cut=("whole", "micro-batches")[number // 4 % 2],
        )
        for number, model in enumerate(CASES)
    ]


def batch_sizes(run: Setting) -> list[int]:
    """Return the samples of each step's batch: an epoch ends with a smaller one, and some are tiny."""
    tiny = SMALLER if run.model == "resnet" else TINY  # batch norm of one value a channel has no variance
    return [*[BATCH] * 7, SMALLER, *[BATCH] * 4, tiny, *[BATCH] * 6, SMALLER][:STEPS]


def plan_of(run: Setting) -> dict[str, Any]:
    """Return the arguments of a trainer."""
    return {
        "sync": run.sync,
        "shares": UNEVEN[run.workers] if run.shares == "uneven" else "equal",
        "micro_batch": MICRO_BATCH if run.cut == "micro-batches" else None,
    }


def train_on(pool: onebox.Pool, run: Setting, sizes: list[int], **options: Any) -> Outcome:
    """Train on a pool."""
    case = CASES[run.model]
    model = case.model()
    optimizer = OPTIMIZERS[run.optimizer](model)
    arguments = {**plan_of(run), "seed": SEED, "check_every": 1, **options}
    with onebox.Trainer(model, case.loss, optimizer, **grouped(pool=pool, **arguments)) as trainer:
        return outcome(trainer, [trainer.step(*batch) for batch in case.batches(sizes)])


def train_here(run: Setting, sizes: list[int]) -> Outcome:
    """Train in this process, on the same micro-batches."""
    case = CASES[run.model]
    model = case.model()
    weights = UNEVEN[run.workers] if run.shares == "uneven" else (1.0,) * run.workers
    plan = Plan.data_parallel(range(run.workers), weights, micro_batch=plan_of(run)["micro_batch"])

    around = drawing(SEED) if case.draws else None
    return train(model, case.loss, OPTIMIZERS[run.optimizer](model), case.batches(sizes), plan, around=around)


@pytest.mark.feature("Trainer: Train any model as one process does")
@pytest.mark.parametrize("run", settings(), ids=lambda run: "-".join(map(str, run)))
def test_every_model_trains_on_replicas(run: Setting, pools: Pools) -> None:
    sizes = batch_sizes(run)
    assert_same(train_on(pools(run.workers), run, sizes), train_here(run, sizes))
