"""Training on modelled accelerators, in real worker processes: without a race, and as one process does it, in float64.

A worker raises an error at the first wait of the host after a race; kernels run as late as they may, in memory that is
poisoned until it is written.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

import onebox
from onebox.plan import ASYNC, Plan
from tests.kit.modelled import open_modelled
from tests.kit.models import CASES, FATED, OPTIMIZERS
from tests.kit.pools import untouched
from tests.kit.reference import Outcome, assert_same
from tests.kit.stages import reference, run, staged, tensors_of
from tests.kit.trainer_arguments import grouped
from tests.process.test_islands import Reference as IslandsReference
from tests.process.test_islands import islands
from tests.process.test_migration import moved, trained
from tests.process.test_offload import plan_for, trainer_on
from tests.process.test_staleness import late
from tests.process.test_staleness import run as run_late

SIZES = (6, 6, 5)
ISLAND_SIZES = (9, 9, 8, 9, 9)

SEEDS = [pytest.param(seed, id=f"seed{seed}") for seed in range(4)]


@pytest.fixture(scope="module", params=SEEDS)
def pool(request: pytest.FixtureRequest) -> Iterator[onebox.Pool]:
    """Three modelled accelerators, of other schedules for each seed."""
    with open_modelled(3, seed=3 * request.param) as opened:
        yield opened


PLANS: dict[str, tuple[str, Callable[[], Plan]]] = {
    "pipeline": ("unet", lambda: staged("unet", (0, 1, 2), schedule="zb-h1")),
    "replicas": ("dropping", lambda: staged("dropping", ((0, 1), 2))),
    "host update": ("tied", lambda: replace(staged("tied", (0, 1)), update="host")),
}


@pytest.mark.parametrize("kind", PLANS)
def test_a_plan(pool: onebox.Pool, kind: str) -> None:
    name, plan = PLANS[kind]
    assert_same(run(pool, name, plan(), SIZES), reference(name, plan(), SIZES))
    assert untouched(pool)


def test_stale_gradients(pool: onebox.Pool) -> None:
    plan = staged("tied", (0, 1, 2), micro_batch=2, schedule=ASYNC)
    found, delays = run_late(pool, "tied", plan, "adamw")
    assert_same(found, late("tied", plan, "adamw"))
    assert delays[1] > 0


@pytest.mark.parametrize(
    ("overlap", "more"), [(0, {}), (1, {}), (0, {"state": "host"}), (1, {"compression": "int8", "state": "host"})]
)
def test_islands(pool: onebox.Pool, overlap: int, more: dict[str, Any]) -> None:
    outer = onebox.Outer(every=2, fragments=2, overlap=overlap, shares=[2, 1], **more)
    reference_run = IslandsReference("cnn", "adamw", [2, 1], outer)
    held_out = CASES["cnn"].batches([5])
    found = islands(pool, "cnn", [[0, 1], [2]], ISLAND_SIZES, outer=outer, evaluating=held_out)
    assert_same(found, reference_run.run(ISLAND_SIZES))
    assert untouched(pool)


def test_migration(pool: onebox.Pool) -> None:
    plan = staged("unet", (0, 1, 2))
    there = moved(plan, 0, 1)
    found = trained(pool, "unet", plan, {1: there, 2: moved(there, 1, -1), 4: staged("unet", (2, 0, 1))})
    expected = reference("unet", plan, (8,) * len(found.losses))
    tensors = {name.removeprefix("model."): tensor for name, tensor in found.tensors.items()}
    assert_same(Outcome(losses=found.losses, norms=[], tensors=tensors), expected)


@pytest.mark.parametrize("policy", ["offload", "swap"])
def test_offload(pool: onebox.Pool, policy: str) -> None:
    found = {}
    for each in ("keep", policy):
        with trainer_on(pool, "vgg", plan_for("vgg", (0, 1, 0, 1, 0, 1), each)) as trainer:  # type: ignore[arg-type]
            losses = [float(trainer.step(*batch)) for batch in FATED["vgg"].batches([12] * 2)]
            found[each] = Outcome(losses=losses, norms=[], tensors=trainer.tensors())
    assert_same(found[policy], found["keep"])


def test_recovery(pool: onebox.Pool) -> None:
    case, plan = CASES["dropping"], staged("dropping", (0, 1))
    model = case.model()
    settings = grouped(pool=pool, plan=plan, seed=5, recover=True, snapshot_every=2)
    with onebox.Trainer(model, case.loss, OPTIMIZERS["adamw"](model), **settings) as trainer:
        losses = []
        for number, batch in enumerate(case.batches([6] * 7)):
            if number == 4:
                os.kill(pool.process_ids[1], signal.SIGKILL)
            losses.append(trainer.step(*batch))
        found = tensors_of(trainer)
        assert trainer.recoveries
    outcome = Outcome(losses=[float(loss) for loss in losses], norms=[], tensors=found)
    assert_same(outcome, reference("dropping", plan, [6] * 7))
