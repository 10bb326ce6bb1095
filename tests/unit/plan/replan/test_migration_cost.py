"""What a change of plan moves is little: as little as an exhaustive search finds, and counted in four cases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.plan import ASYNC, DeviceSpec, Plan, Problem, SegmentValue, Stage
from onebox.plan.replan.migration_cost import assigned
from tests.unit.plan.problems import links, segment
from tests.unit.plan.replan.simulated_cluster import State, follow, step_s, truth


def chain(segments: int, devices: int, *, crossing: int = 1000) -> Problem:
    """Return equal segments in a row, and equal devices."""
    return Problem(
        segments=tuple(segment(f"s{i}", 1e-3, state=1_000_000) for i in range(segments)),
        devices=tuple(DeviceSpec(number=n, type="quick") for n in range(devices)),
        links=links(devices, latency_s=1e-5, bandwidth_bps=1e9),
        batch=2 * devices,
        micro_batches=(1,),
        values=tuple(
            SegmentValue(source=i, consumers=(i + 1,), forward_bytes=crossing, backward_bytes=crossing)
            for i in range(segments - 1)
        ),
        schedules=("1f1b",),
        replicable=False,
        max_stages=devices,
    )


def cut(problem: Problem, ends: tuple[int, ...], order: tuple[int, ...], schedule: str) -> Plan:
    """Return a plan of stages that end there, on devices in this order."""
    names = [one.name for one in problem.segments]
    stages = tuple(
        Stage(replicas=((device,),), shares=(1.0,), segments=tuple(names[a:b]))
        for (a, b), device in zip(pairwise((0, *ends, len(names))), order, strict=True)
    )
    return Plan(stages=stages, micro_batch=1, schedule=schedule)


def moved(before: Plan, after: Plan) -> int:
    """Return how many segments have another device afterwards."""
    owners = [{name: stage.replicas for stage in plan.stages for name in stage.segments} for plan in (before, after)]
    return sum(owners[1][name] != place for name, place in owners[0].items())


def every(problem: Problem, schedule: str) -> Iterator[Plan]:
    """Yield all plans with a stage on each of some devices."""
    count, numbers = len(problem.segments), sorted(problem.device)
    for stages in range(1, len(numbers) + 1):
        for ends in combinations(range(1, count), stages - 1):
            for order in permutations(numbers, stages):
                yield cut(problem, ends, order, schedule)


@pytest.mark.parametrize(("victim", "link"), [(0, None), (1, None), (2, None), (None, (0, 1)), (None, (1, 2))])
def test_as_little_moves_as_in_the_least_of_all_plans_that_are_as_quick(
    victim: int | None, link: tuple[int, int] | None
) -> None:
    problem = chain(9, 3, crossing=300_000)
    first = cut(problem, (3, 6), (0, 1, 2), "1f1b")
    state = State(slow={} if victim is None else {victim: 3.0}, links={} if link is None else {link: 30.0})
    run = follow(problem, first, 30, lambda step: State() if step < 10 else state)
    true = truth(problem, state)
    took = {plan: step_s(true, plan) for plan in every(problem, "1f1b")}
    best_s, own_s = min(took.values()), step_s(true, run.follower.plan)
    assert own_s <= 1.05 * best_s
    least = min(moved(first, plan) for plan, seconds in took.items() if seconds <= own_s * (1 + 1e-9))
    assert moved(first, run.follower.plan) <= least
    assert sum(decision.moved_bytes for decision in run.decisions) == 1_000_000 * moved(first, run.follower.plan)


LEAST = {
    (4, "slow"): 12,  # 10 of 16 leave the slow device, 4 for the device before; of 6 for the one behind it gives on 2
    (8, "slow"): 9,
    (4, "link"): 32,  # two devices change places
    (8, "link"): 16,
}
"""Of 64 equal segments; see ``benchmarks/adaptive.py``, of which these are the cases."""


@pytest.mark.parametrize(("devices", "case"), LEAST)
def test_what_moves_where_a_device_slows_down_or_a_link_drops(devices: int, case: str) -> None:
    chained = chain(64, devices, crossing=500_000)
    problem = replace(
        chained, schedules=(ASYNC,), staleness=1, links=links(devices, latency_s=2e-4, bandwidth_bps=125e6)
    )
    middle, order = devices // 2, tuple(reversed(range(devices)))
    first = cut(problem, tuple(range(64 // devices, 64, 64 // devices)), order, ASYNC)
    state = State(slow={middle: 3.0}) if case == "slow" else State(links={(middle - 1, middle): 10.0})
    usual = State()
    run = follow(problem, first, 13, lambda step: usual if step < 10 else state)
    assert [decision.step for decision in run.decisions] == [11]
    after = run.decisions[0].plan
    assert moved(first, after) <= LEAST[devices, case]
    work_s = 64 * 3e-3 * 2 * devices
    assert step_s(truth(problem, state), after) < 1.1 * work_s / (devices - (2 / 3 if case == "slow" else 0))


def least_cost(costs: list[list[int]]) -> int:
    """Return the least cost of all ways to give each row a column of its own."""
    best = {frozenset[int](): 0}  # columns that the rows so far have
    for row in costs:
        further: dict[frozenset[int], int] = {}
        for taken, cost in best.items():
            for column in set(range(len(row))) - taken:
                more = taken | {column}
                further[more] = min(cost + row[column], further.get(more, cost + row[column]))
        best = further
    (least,) = best.values()
    return least


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 9))
def test_rows_get_the_columns_that_cost_least(seed: int, size: int) -> None:
    random = Random(seed)
    costs = [[random.randrange(10) for _ in range(size)] for _ in range(size)]
    found = assigned(costs)
    assert sorted(found) == list(range(size))
    assert sum(row[found[n]] for n, row in enumerate(costs)) == least_cost(costs)
