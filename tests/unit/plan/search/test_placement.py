"""Where stages go on emulated clusters: as well as the best of all placements, and never worse than with eyes shut."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.plan import ASYNC, DeviceSpec, Links, Problem, SegmentValue, predict, search
from onebox.plan.evaluate.evaluator import Evaluator
from onebox.plan.model.layout import LayoutStage, StageLayout, single
from onebox.plan.search.placement import placed
from tests.unit.clusters import CLUSTERS, Cluster, bad_ring, laptop_and_desktops, slow_uplink, two_hosts
from tests.unit.plan.problems import segment

HOUR_S, ENOUGH = 3600.0, 1_700_000
EFFORT = 200_000


def problem_on(
    cluster: Cluster, segments: int, *, crossing: int, parameters: int = 400_000, seed: int = 0, **changes: object
) -> Problem:
    """Return a chain of segments to be placed on a cluster.

    Args:
        cluster: The cluster. Nothing but its links tells of hosts.
        segments: How many segments.
        crossing: About so many bytes go from one to the next for each sample.
        parameters: About so many bytes of parameters each has.
        seed: Of how uneven they are.
        changes: Of the problem.
    """
    draw = Random(seed)
    made = tuple(
        segment(f"s{index}", draw.uniform(0.5, 2) * 1e-3, fixed=2e-4, state=int(4 * parameters * draw.uniform(0.5, 2)))
        for index in range(segments)
    )
    values = tuple(
        SegmentValue(source=index, consumers=(index + 1,), forward_bytes=size, backward_bytes=size)
        for index in range(segments - 1)
        for size in [int(crossing * draw.choice([0.1, 0.3, 1, 3]))]
    )
    latency_s, bandwidth_bps = cluster.matrix()
    given = Problem(
        segments=made,
        devices=tuple(DeviceSpec(number=number, type=kind) for number, kind in enumerate(cluster.kinds)),
        links=Links(latency_s=latency_s, bandwidth_bps=bandwidth_bps),
        batch=16,
        micro_batches=(2,),
        values=values,
        call_s=1e-5,
        schedules=("1f1b",),
        replicable=False,
    )
    return replace(given, **changes)


def blind(problem: Problem) -> Problem:
    """Return a problem that knows how fast links are in the middle, but not which."""
    numbers = [device.number for device in problem.devices]

    def flat(table: dict[int, dict[int, float]]) -> dict[int, dict[int, float]]:
        middle = statistics.median(table[a][b] for a, b in permutations(numbers, 2))
        return {a: dict.fromkeys((b for b in numbers if b != a), middle) for a in numbers}

    links = problem.links
    return replace(problem, links=Links(latency_s=flat(links.latency_s), bandwidth_bps=flat(links.bandwidth_bps)))


SMALL = {
    "2 hosts x 3": two_hosts(3),
    "3 hosts x 2, one slow uplink": slow_uplink(3, 2),
    "ring of 6, one bad link": bad_ring(6),
    "laptop beside two desktops": laptop_and_desktops(),
}


def evaluator_of(problem: Problem) -> Evaluator:
    return Evaluator(problem, effort=10**9, expired=lambda: False)


def best_of_all(problem: Problem, schedule: str) -> float:
    """Return the least time of a step over all cuts on all sequences of devices."""
    evaluator, count, best = evaluator_of(problem), len(problem.segments), math.inf
    for stages in range(len(problem.devices), 0, -1):
        for devices in permutations(sorted(problem.device), stages):
            for cuts in combinations(range(1, count), stages - 1):
                ranges = zip((0, *cuts), (*cuts, count), devices, strict=True)
                layout = StageLayout(tuple(single(tuple(range(a, b)), device) for a, b, device in ranges), 2, schedule)
                if evaluator.bound(layout) < best:
                    best = min(best, evaluator.evaluate(layout).simulation.step_s)
    return best


@pytest.mark.parametrize("schedule", ["1f1b", ASYNC])
@pytest.mark.parametrize("name", SMALL)
def test_small_chains_are_placed_as_well_as_by_exhaustive_search(name: str, schedule: str) -> None:
    problem = problem_on(SMALL[name], 5, crossing=400_000, schedules=(schedule,), staleness=int(schedule == ASYNC))
    best = best_of_all(problem, schedule)
    found = search(problem, budget_s=HOUR_S, effort=ENOUGH).plan.predicted
    assert found is not None
    assert found.step_s <= 1.03 * best


@pytest.mark.parametrize("replicable", [False, True])
@pytest.mark.parametrize("name", CLUSTERS)
def test_no_worse_than_with_eyes_shut(name: str, replicable: bool) -> None:
    """With equal effort; for what is predicted of both with eyes open."""
    problem = problem_on(CLUSTERS[name], 16, crossing=1_000_000, replicable=replicable)
    found = search(problem, budget_s=HOUR_S, effort=EFFORT).plan.predicted
    other, _ = predict(problem, search(blind(problem), budget_s=HOUR_S, effort=EFFORT).plan)
    assert found is not None
    assert found.step_s <= (1.1 if replicable else 1.05) * other.step_s  # neither sees everything with so little effort


def even(problem: Problem, order: tuple[int, ...]) -> StageLayout:
    each = len(problem.segments) // len(order)
    return StageLayout(
        tuple(single(tuple(range(turn * each, (turn + 1) * each)), device) for turn, device in enumerate(order)),
        2,
        "1f1b",
    )


@settings(max_examples=5)
@pytest.mark.parametrize("name", ["2 hosts x 3", "3 hosts x 2, one slow uplink", "ring of 6, one bad link"])
@given(seed=st.integers(0, 10**6))
def test_seats_of_a_cut_are_as_good_as_the_best_of_many(name: str, seed: int) -> None:
    """Under the simulator, which the search of seats knows by a surrogate only."""
    draw = Random(seed)
    problem = problem_on(SMALL[name], 12, crossing=draw.choice([10_000, 100_000, 1_000_000]), seed=seed)
    evaluator = evaluator_of(problem)
    start, *others = draw.sample(list(permutations(range(6))), 100)
    best = min(evaluator.evaluate(even(problem, order)).simulation.step_s for order in others)
    found = evaluator.evaluate(placed(evaluator, even(problem, start)))
    assert found.simulation.step_s <= 1.1 * best


def test_devices_of_another_kind_keep_their_places() -> None:
    problem = problem_on(laptop_and_desktops(), 10, crossing=300_000)
    layout = even(problem, (0, 1, 2, 3, 4))
    kinds = [problem.device[part.devices[0]].type for part in layout.parts]
    found = placed(evaluator_of(problem), layout)
    assert [problem.device[part.devices[0]].type for part in found.parts] == kinds
    assert [part.segments for part in found.parts] == [part.segments for part in layout.parts]


def test_unused_devices_that_sit_closer_are_taken() -> None:
    problem = problem_on(two_hosts(2), 4, crossing=1_000_000)
    found = placed(evaluator_of(problem), even(problem, (0, 1)))  # of two hosts
    assert len({device % 2 for part in found.parts for device in part.devices}) == 1


@pytest.mark.parametrize(("crossing", "parameters", "inside"), [(1_000, 40_000_000, True), (3_000_000, 1_000, False)])
def test_replicas_are_in_a_host_where_gradients_are_heavy_and_in_several_where_values_are(
    crossing: int, parameters: int, inside: bool
) -> None:
    problem = problem_on(two_hosts(2), 4, crossing=crossing, parameters=parameters, replicable=True)
    parts = (LayoutStage((0, 1), (0, 1), (0.5, 0.5)), LayoutStage((2, 3), (2, 3), (0.5, 0.5)))
    across = StageLayout(parts, 2, "1f1b")
    within = StageLayout(
        tuple(part._replace(devices=pair) for part, pair in zip(parts, ((0, 2), (1, 3)), strict=True)), 2, "1f1b"
    )
    evaluator = evaluator_of(problem)
    for start in (across, within):
        found = placed(evaluator, start)
        assert all((part.devices[0] % 2 == part.devices[1] % 2) == inside for part in found.parts)
        if not inside:  # each micro-batch stays in its host
            one, other = found.parts
            assert [device % 2 for device in one.devices] == [device % 2 for device in other.devices]
        assert (
            evaluator.evaluate(found).simulation.step_s
            <= min(evaluator.evaluate(one).simulation.step_s for one in (across, within)) * 1.001
        )


def test_equal_links_leave_a_layout_as_it_is() -> None:
    problem = blind(problem_on(two_hosts(3), 6, crossing=100_000))
    layout = even(problem, (3, 1, 5, 0, 2, 4))
    assert placed(evaluator_of(problem), layout) == layout


def test_sixteen_devices_within_the_time_of_a_search() -> None:
    problem = problem_on(slow_uplink(), 32, crossing=1_000_000)
    evaluator = evaluator_of(problem)
    order = tuple(range(16))
    found = placed(evaluator, even(problem, order))
    assert evaluator.effort - evaluator.left < 200_000
    hosts = [part.devices[0] % 4 for part in found.parts]
    assert sum(3 in pair for pair in pairwise(hosts) if pair[0] != pair[1]) == 1  # values cross the slow uplink once
    assert (
        evaluator.evaluate(found).simulation.step_s < 0.9 * evaluator.evaluate(even(problem, order)).simulation.step_s
    )
