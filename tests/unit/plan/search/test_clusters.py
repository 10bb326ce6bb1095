"""Plans on emulated clusters, where steps wait for each other and where not: how near to what no plan can beat."""

from __future__ import annotations

from dataclasses import replace
from itertools import count as counter
from itertools import pairwise

import pytest

from onebox.plan import ASYNC, DeviceSpec, Links, Problem, SearchResult, SegmentValue, search
from tests.unit.clusters import BAD, CLUSTERS, Cluster, bad_ring
from tests.unit.plan.problems import segment

SPEED = {"quick": 1.0, "half": 0.5, "slow": 0.25}
BATCH, EACH_S, CALL_S = 32, 1e-3, 1e-5
HOUR_S, EFFORT = 3600.0, 400_000


def fine(cluster: Cluster, *, staleness: int, crossing: int = 300_000) -> Problem:
    """Return a chain of equal segments, fine enough to be cut for any devices, whose messages a good link hides."""
    latency_s, bandwidth_bps = cluster.matrix()
    count = 52 if len(set(cluster.kinds)) > 1 else 48  # what can be shared out by speed without a rest
    return Problem(
        segments=tuple(segment(f"s{index}", EACH_S, state=4_000) for index in range(count)),
        devices=tuple(DeviceSpec(number=n, type="quick", speed=SPEED[kind]) for n, kind in enumerate(cluster.kinds)),
        links=Links(latency_s=latency_s, bandwidth_bps=bandwidth_bps),
        batch=BATCH,
        micro_batches=(1,),
        values=tuple(
            SegmentValue(source=index, consumers=(index + 1,), forward_bytes=crossing, backward_bytes=crossing)
            for index in range(count - 1)
        ),
        call_s=CALL_S,
        schedules=(ASYNC,) if staleness else ("1f1b",),
        staleness=staleness,
        replicable=False,
    )


def least_s(problem: Problem) -> float:
    """Return what no step can beat: all work over all speeds."""
    whole_s = len(problem.segments) * 3 * EACH_S
    return BATCH * (whole_s / sum(device.speed for device in problem.devices) + 2 * CALL_S)


def found(problem: Problem) -> SearchResult:
    return search(problem, budget_s=HOUR_S, effort=EFFORT)


def hops(result: SearchResult) -> list[tuple[int, int]]:
    """Return between which devices values go."""
    return list(pairwise(stage.replicas[0][0] for stage in result.plan.stages))


@pytest.mark.parametrize("name", CLUSTERS)
def test_all_devices_are_busy_where_steps_do_not_wait(name: str) -> None:
    problem = fine(CLUSTERS[name], staleness=1)
    assert found(problem).simulation.step_s <= 1.06 * least_s(problem)


@pytest.mark.parametrize("name", CLUSTERS)
def test_links_cost_little_where_steps_wait(name: str) -> None:
    """What filling and draining a pipeline takes cannot be spared; what slow links add to that can, nearly."""
    problem = fine(CLUSTERS[name], staleness=0, crossing=100_000)
    numbers = range(len(problem.devices))
    links = Links(
        latency_s={a: dict.fromkeys(numbers, 0.0) for a in numbers},
        bandwidth_bps={a: dict.fromkeys(numbers, float("inf")) for a in numbers},
    )
    assert found(problem).simulation.step_s <= 1.1 * found(replace(problem, links=links)).simulation.step_s


def one_bad(size: int, ends: tuple[int, int]) -> Cluster:
    """Return devices that are all as near to each other, but for two of them."""
    quick = (200e-6, 125e6)
    return Cluster((0,) * size, ("quick",) * size, lambda a, b: BAD if {a, b} == set(ends) else quick)


@pytest.mark.parametrize("ends", [(3, 4), (0, 1), (6, 7), (0, 7)])
def test_no_neighbours_talk_over_a_bad_link(ends: tuple[int, int]) -> None:
    """Whichever it is: a plan takes as long as if there were none, and does not leave devices out."""
    problem = fine(one_bad(8, ends), staleness=1, crossing=1_000_000)
    result = found(problem)
    assert len(result.plan.stages) == 8
    assert all(set(pair) != set(ends) for pair in hops(result))
    assert result.simulation.step_s <= 1.01 * least_s(problem)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_clock_changes_nothing(staleness: int) -> None:
    """A search is counted in what it simulates, so that a machine on which it takes longer plans alike."""
    problem = replace(fine(bad_ring(4), staleness=staleness), micro_batches=(1, 2, 4))
    slow = counter()
    once, again = (
        search(problem, budget_s=0.2, clock=clock) for clock in (lambda: 0.0, lambda: 0.1 * (next(slow) > 0))
    )
    assert once.plan == again.plan
    assert once.simulated == again.simulated
