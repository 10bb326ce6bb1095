"""Whatever policies the segments of a model get, it trains as in one process; and their memory is what was predicted.

A segment is kept, recomputed, offloaded, or computed on another worker, which stands for the CPU beside a device; and
the optimizer steps on the device or on the host. Each policy is forced on each segment in turn, and on any spans at
once.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

import onebox
from onebox.engine.workload.batch import as_batch
from onebox.plan import Plan, Stage
from onebox.plan.model.stage import ActivationPolicy
from onebox.report.tables.memory import compare_memory
from tests.kit.models import FATED, OPTIMIZERS
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same, drawing, train
from tests.kit.stages import outcome
from tests.kit.trainer_arguments import grouped
from tests.process.fated import captures

SEED = 5
SIZES = (6, 6, 9)
FEW = SIZES[:2]
"""For the many runs: most of what they take is compiling for another size."""

MICRO_BATCH = 3
DEVICE, CPU = 0, 1

Span = tuple[Sequence[str], int, ActivationPolicy]
"""Segments, where they are computed, and what becomes of their activations."""

SPOTS: dict[str, tuple[int, ActivationPolicy]] = {
    "keep": (DEVICE, "keep"),
    "recompute": (DEVICE, "recompute"),
    "offload": (DEVICE, "offload"),
    "cpu": (CPU, "keep"),
    "cpu-recompute": (CPU, "recompute"),
}

MOVED: Counter[str] = Counter()
"""How many copies to the host the trainers of a model have made."""


def segments(name: str) -> tuple[str, ...]:
    """Return the names of a model's segments."""
    return captures(name).segments(as_batch(*FATED[name].batches([MICRO_BATCH])[0]), MICRO_BATCH)


def plan_of(spans: Sequence[Span], **more: str) -> Plan:
    """Return the plan of spans, of which those without a segment are left out."""
    stages = (
        Stage(segments=tuple(names), replicas=((device,),), shares=(1.0,), policy=policy)
        for names, device, policy in spans
        if names
    )
    return Plan(stages=tuple(stages), micro_batch=MICRO_BATCH, **more)  # type: ignore[arg-type]


@functools.cache
def plain(name: str, sizes: Sequence[int]) -> Outcome:
    """Train in this process, on the same micro-batches."""
    case = FATED[name]
    model = case.model()
    around = drawing(SEED) if case.draws else None

    return train(model, case.loss, OPTIMIZERS["adamw"](model), case.batches(list(sizes)), MICRO_BATCH, around=around)


def fated(pool: onebox.Pool, name: str, plan: Plan, sizes: Sequence[int]) -> Outcome:
    """Train under a plan; require that the memory of the second step was what was predicted, at every instruction."""
    case = FATED[name]
    model = case.model()
    batches = case.batches(list(sizes))
    options = {"plan": plan, "seed": SEED, "check_every": 1, "in_flight": 1}
    with onebox.Trainer(model, case.loss, OPTIMIZERS["adamw"](model), **grouped(pool=pool, **options)) as trainer:
        trainer.share_captures(captures(name))
        losses = [trainer.step(*batch) for batch in batches[:2]]
        curves = trainer.predicted_curves(*batches[1])  # before another size leaves losses there
        losses += [trainer.step(*batch) for batch in batches[2:]]
        trainer.wait()
        events = trainer.events()
        for found in compare_memory(curves, events, 1):
            assert (found.difference_bytes, found.where) == (0, ""), found
        MOVED[name] += sum(event.name.startswith("offload") for event in events)
        return outcome(trainer, losses)


@pytest.mark.parametrize("policy", ["recompute", "offload", "cpu"])
@pytest.mark.parametrize("name", FATED)
def test_each_policy_on_each_segment_in_turn(name: str, policy: str, pools: Pools) -> None:
    names, pool = segments(name), pools(2)
    for place, segment in enumerate(names):
        ahead, behind = names[:place], names[place + 1 :]
        ends = (0, 1, 2) if policy == "offload" else ()  # what is offloaded is away while other spans compute
        parts = [ahead, *(behind[end : end + 1] for end in ends), behind[len(ends) :]]
        spans: list[Span] = [(part, *SPOTS["keep"]) for part in parts]
        spans.insert(1, ([segment], *SPOTS[policy]))
        moved = MOVED[name]
        assert_same(fated(pool, name, plan_of(spans), FEW), plain(name, FEW))
        assert policy != "offload" or len(behind) < 3 or MOVED[name] > moved, segment


def any_plan(name: str, turn: int) -> Plan:
    """Return a plan of spans that are cut at random, each with a policy at random."""
    draw = random.Random(f"{name}/{turn}")
    names = segments(name)
    cuts = sorted(draw.sample(range(1, len(names)), draw.randint(2, min(7, len(names) - 1))))
    spans: list[Span] = []
    for start, end in zip((0, *cuts), (*cuts, len(names)), strict=True):
        spans.append((names[start:end], *SPOTS[draw.choice(list(SPOTS))]))
    schedule = draw.choice(["gpipe", "1f1b", "zb-h1"])
    return plan_of(spans, schedule=schedule, update=("device", "host")[turn % 2])


@pytest.mark.parametrize("turn", range(2))
@pytest.mark.parametrize("name", FATED)
def test_any_fates_at_once(name: str, turn: int, pools: Pools) -> None:
    assert_same(fated(pools(2), name, any_plan(name, turn), SIZES), plain(name, SIZES))


@pytest.mark.parametrize("name", FATED)
def test_the_optimizer_alone_on_the_host(name: str, pools: Pools) -> None:
    alone = Plan.data_parallel([DEVICE], [1.0], micro_batch=MICRO_BATCH)
    assert_same(fated(pools(2), name, replace(alone, update="host"), SIZES), plain(name, SIZES))
