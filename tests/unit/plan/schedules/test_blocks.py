"""Blocks: stages that follow one another on the same devices are scheduled as one, and every schedule can be run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.plan import (
    NAMED,
    Routes,
    Schedule,
    auto_schedule,
    block_schedule,
    named_schedule,
    simulate,
    validate,
)
from onebox.plan.schedules.blocks import find_blocks
from tests.unit.plan.cases import Case, cases, edges_of, even, work_for


def routes_of(places: Sequence[int], micro_batches: int = 3) -> Routes:
    """Return routes of stages that are on one device each."""
    return tuple(((device,),) * micro_batches for device in places)


def widened(case: Case, times: Sequence[int]) -> tuple[Routes, list[tuple[int, int]]]:
    """Return routes and edges of a case with each stage so many times, one after the other on the same devices."""
    firsts = [sum(times[:stage]) for stage in range(len(times))]
    routes = tuple(row for row, often in zip(case.routes, times, strict=True) for _ in range(often))
    edges = [(firsts[a] + times[a] - 1, firsts[b]) for a, b in edges_of(case.work)]
    edges += [(first + n, first + n + 1) for first, often in zip(firsts, times, strict=True) for n in range(often - 1)]
    return routes, edges


def apart(routes: Routes) -> bool:
    """Tell whether no two consecutive stages have the same route."""
    return all(one != other for one, other in itertools.pairwise(routes))


@pytest.mark.parametrize("name", NAMED)
@settings(deadline=None, max_examples=40)
@given(case=cases(), data=st.data())
def test_every_schedule_of_blocks_can_be_run(name: str, case: Case, data: st.DataObject) -> None:
    times = [data.draw(st.integers(1, 3)) for _ in case.routes]
    routes, edges = widened(case, times)
    validate(block_schedule(name, routes, edges=edges), routes, edges)


@pytest.mark.parametrize("name", NAMED)
@settings(deadline=None, max_examples=30)
@given(case=cases())
def test_stages_that_are_apart_have_the_schedule_of_the_name(name: str, case: Case) -> None:
    if apart(case.routes):
        edges = edges_of(case.work)
        assert block_schedule(name, case.routes, edges=edges) == named_schedule(name, case.routes, edges=edges)


@settings(deadline=None, max_examples=30)
@given(case=cases(), data=st.data())
def test_a_schedule_for_measured_times_is_as_good_as_any_of_blocks(case: Case, data: st.DataObject) -> None:
    """It lacks no more memory, and where no memory is missing it takes no longer."""
    times = [data.draw(st.integers(1, 3)) for _ in case.routes]
    routes, edges = widened(case, times)
    capacity = data.draw(st.none() | st.integers(5, 60))
    devices = {device for row in routes for replica in row for device in replica}
    limits = None if capacity is None else dict.fromkeys(devices, capacity)
    work = work_for(routes, edges, capacity=limits, saved_bytes=3, backward_work_bytes=2)
    found = auto_schedule(routes, work, case.sizes, budget_s=0.02)
    validate(found, routes, edges)
    best = simulate(found, routes, work, case.sizes)
    for name in NAMED:
        other = simulate(block_schedule(name, routes, edges=edges), routes, work, case.sizes)
        short, shorter = sum(other.over_bytes.values()), sum(best.over_bytes.values())
        assert (shorter, best.step_s if not shorter else 0.0) <= (short, other.step_s * (1 + 1e-9))


@pytest.mark.parametrize(
    ("places", "blocks", "twice"),
    [
        ([0], [[0]], [[0]]),
        ([0, 0, 0], [[0, 1, 2]], [[0], [1, 2]]),
        ([0, 1, 1, 0], [[0], [1, 2], [3]], [[0], [1], [2], [3]]),
        ([0, 0, 1, 1, 1, 1, 0, 0], [[0, 1], [2, 3, 4, 5], [6, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([0, 1, 0, 1], [[0], [1], [2], [3]], [[0], [1], [2], [3]]),
    ],
)
def test_blocks(places: list[int], blocks: list[list[int]], twice: list[list[int]]) -> None:
    assert [list(block) for block in find_blocks(routes_of(places))] == blocks
    assert [list(block) for block in find_blocks(routes_of(places), twice=True)] == twice


def test_replicas_that_share_otherwise_are_no_block() -> None:
    rows = ((0,), (1,), (0,)), ((0,), (1,), (0,)), ((1,), (0,), (1,))
    assert [list(block) for block in find_blocks(rows)] == [[0, 1], [2]]


def test_one_device_goes_there_and_back_with_each_micro_batch() -> None:
    """Only ``gpipe`` does all forwards first; in halves, the weight gradients of a block follow its input gradients."""
    routes = routes_of([4, 4, 4], 2)
    there, back = "0F0 1F0 2F0 2B0 1B0 0B0", "0F1 1F1 2F1 2B1 1B1 0B1"
    for name in ("1f1b", "interleaved"):
        assert block_schedule(name, routes).lines() == (f"4: {there} {back}",)
    assert block_schedule("gpipe", routes).lines() == ("4: 0F0 1F0 2F0 0F1 1F1 2F1 2B0 1B0 0B0 2B1 1B1 0B1",)
    halves = "0F0 1F0 2F0 2I0 1I0 0I0 2W0 1W0 0W0"
    assert block_schedule("zb-h1", routes).lines()[0].startswith(f"4: {halves}")
    tight = work_for(routes, saved_bytes=1, capacity={4: 3})
    assert auto_schedule(routes, tight).lines() == (f"4: {there} {back}",)


def test_a_pipeline_has_no_more_micro_batches_in_flight_for_its_spans() -> None:
    """The schedule of two devices with three spans each is that of two stages."""
    routes = routes_of([0, 0, 0, 1, 1, 1], 4)
    schedule = block_schedule("1f1b", routes)
    pipeline = Schedule(rows={
        device: tuple(action for action in row if action.stage in (0, 3)) for device, row in schedule.rows.items()
    })  # fmt: skip
    expected = named_schedule("1f1b", even(2, 4))
    assert [[(a.kind, a.stage // 3, a.micro_batch) for a in pipeline.rows[d]] for d in (0, 1)] == [
        [(a.kind, a.stage, a.micro_batch) for a in expected.rows[d]] for d in (0, 1)
    ]


def test_what_is_no_name_is_refused_of_blocks_too() -> None:
    with pytest.raises(UsageError, match="no schedule 'auto' is made of routes alone"):
        block_schedule("auto", routes_of([0, 0]))
