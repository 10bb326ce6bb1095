"""Depths: as many micro-batches in flight as it takes for messages to be hidden, and no more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.plan.model.schedule import Routes
from onebox.plan.model.work import Edge, Links, PlanWork, StageWork
from onebox.plan.schedules.async_window import depths, steady_window
from onebox.plan.simulate.steady_state import simulate_steady_state


def chain(stages: int, count: int) -> Routes:
    """Return the routes of a chain of stages, each on a device of its own."""
    return tuple(((stage,),) * count for stage in range(stages))


def work_with(routes: Routes, seconds: float, shares: Sequence[float] = ()) -> PlanWork:
    """Return work with messages that take so long each way.

    Args:
        routes: Who computes what.
        seconds: Of a message.
        shares: For each stage the part of 3 s that a micro-batch takes there; 1 for each where empty.
    """
    devices = sorted({device for row in routes for replica in row for device in replica})
    stages = []
    for row, share in zip(routes, shares or [1.0] * len(routes), strict=True):
        own = {device for replica in row for device in replica}
        each, nothing = dict.fromkeys(own, share), dict.fromkeys(own, 0.0)
        stages.append(StageWork(forward_s=each, input_s=each, weight_s=each, update_s=nothing))
    apart = {a: {b: 0.0 if a == b else seconds for b in devices} for a in devices}
    wide = {a: dict.fromkeys(devices, float("inf")) for a in devices}
    edges = tuple(Edge(source=s, target=s + 1, forward_bytes=1, backward_bytes=1) for s in range(len(routes) - 1))
    return PlanWork(
        stages=tuple(stages), edges=edges, links=Links(latency_s=apart, bandwidth_bps=wide), capacity_bytes={}
    )


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, ()), (0.02, ()), (0.04, (5, 3, 1)), (0.1, (5, 3, 1)), (1.5, (5, 3, 1)), (1.6, (7, 4, 1))],
)
def test_each_hop_needs_a_turn_more_for_each_turn_of_its_messages(seconds: float, expected: tuple[int, ...]) -> None:
    routes = chain(3, 6)
    assert depths(routes, work_with(routes, seconds)) == expected


def test_stages_on_one_device_send_each_other_nothing_and_replicas_share_what_is_in_flight() -> None:
    routes: Routes = (((0,),) * 4, ((0,),) * 4, ((1,), (2,)) * 2)
    assert depths(routes, work_with(routes, 0.5)) == (3, 3, 1)
    routes = (((1,), (2,)) * 2, ((0,),) * 4)
    assert depths(routes, work_with(routes, 0.5)) == (2, 1)


@given(st.integers(2, 6), st.floats(0.1, 1.4), st.lists(st.floats(0.4, 1.0), min_size=5, max_size=5))
@settings(max_examples=40, deadline=None)
def test_with_them_the_busiest_device_never_waits(stages: int, seconds: float, shares: list[float]) -> None:
    """If a step has twice as many micro-batches as there are stages, so that two steps' are enough for it."""
    count = 2 * stages
    routes = chain(stages, count)
    work = work_with(routes, seconds, [1.0, *shares[: stages - 1]])
    found = simulate_steady_state(steady_window(routes, in_flight=depths(routes, work)), routes, work, detail=False)
    assert found.step_s == pytest.approx(3.0 * count, rel=1e-6)
