"""Any plan gives the result of one process: every model, optimizer, number of workers and sync, in float64.

The full product would take minutes; the runs below are a covering set. Every model meets every optimizer, every
number of workers and both syncs, and every two settings of different kinds meet in some run.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest

import onebox
from onebox.plan import Plan
from tests.models import CASES, OPTIMIZERS
from tests.process.shelf import Shelf
from tests.reference import Outcome, assert_same, drawing, train

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
    """Return the covering set: for each model three runs, the other settings in rotation."""
    found = []
    for number, model in enumerate(CASES):
        for turn, optimizer in enumerate(OPTIMIZERS):
            workers = (number + turn) % 3 + 1
            first = workers == 2
            found.append(
                Setting(
                    model=model,
                    optimizer=optimizer,
                    workers=workers,
                    sync=("workers", "client")[(number // 3 + first) % 2],
                    shares=("equal", "uneven")[(number + first) % 2],
                    cut=("whole", "micro-batches")[(number // 2 + turn) % 2],
                )
            )
    return found


def test_every_two_settings_meet() -> None:
    runs = settings()
    replicated = [run for run in runs if run.workers > 1]
    for one, other in itertools.combinations(Setting._fields, 2):
        alone = {one, other} <= {"model", "optimizer", "workers", "cut"}
        wanted = set(itertools.product({getattr(r, one) for r in runs}, {getattr(r, other) for r in runs}))
        met = {(getattr(r, one), getattr(r, other)) for r in (runs if alone else replicated)}
        wanted -= {pair for pair in wanted if 1 in pair and not alone}
        assert not wanted - met, f"{one} and {other} never meet as {sorted(wanted - met)}"


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
    with onebox.Trainer(model, case.loss, optimizer, pool=pool, **arguments) as trainer:
        losses = [trainer.step(*batch) for batch in case.batches(sizes)]
        found = {name.removeprefix("model."): tensor for name, tensor in trainer.tensors().items()}
    return Outcome(losses=[float(loss) for loss in losses], norms=[], tensors=found)


def train_here(run: Setting, sizes: list[int]) -> Outcome:
    """Train in this process, on the same micro-batches."""
    case = CASES[run.model]
    model = case.model()
    weights = UNEVEN[run.workers] if run.shares == "uneven" else (1.0,) * run.workers
    plan = Plan.data_parallel(range(run.workers), weights, micro_batch=plan_of(run)["micro_batch"])

    def cut(size: int) -> list[int]:
        return [part.size for part in plan.micro_batches(size)]

    around = drawing(SEED) if case.draws else None
    return train(model, case.loss, OPTIMIZERS[run.optimizer](model), case.batches(sizes), cut, around=around)


@pytest.mark.parametrize("run", settings(), ids=lambda run: "-".join(map(str, run)))
def test_any_plan_gives_the_result_of_one_process(run: Setting, pools: Shelf) -> None:
    sizes = batch_sizes(run)
    assert_same(train_on(pools(run.workers), run, sizes), train_here(run, sizes))
