"""Windows: whatever the routes, steps in windows are complete, never block, and reach back one step at most."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.plan import Action, Routes, Schedule, validate
from onebox.plan.model.window import check_window, drain_of, fill_of, repeated_routes, unrolled
from onebox.plan.schedules.async_window import steady_window
from tests.unit.plan.cases import Case, cases, edges_of


def chain(stages: int, count: int) -> Routes:
    """Return routes of a chain with a stage a device."""
    return tuple(((stage,),) * count for stage in range(stages))


def test_a_chain_has_as_many_in_flight_as_there_are_stages_to_the_end() -> None:
    assert steady_window(chain(4, 4)).lines() == (
        "0: 0F0 0B-3 0F1 0B-2 0F2 0B-1 0F3 0B0",
        "1: 1F0 1B-2 1F1 1B-1 1F2 1B0 1F3 1B1",
        "2: 2F0 2B-1 2F1 2B0 2F2 2B1 2F3 2B2",
        "3: 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3",
    )


def test_few_micro_batches_wait_for_the_step_before_and_not_for_one_before_that() -> None:
    assert steady_window(chain(4, 1)).lines() == ("0: 0F0 0B-1", "1: 1F0 1B-1", "2: 2F0 2B0", "3: 3F0 3B0")


def test_the_first_of_several_replicas_downstream_has_as_many_more_in_flight() -> None:
    routes = (((0,),) * 4, ((1,), (2,), (1,), (2,)))
    assert steady_window(routes).lines() == (
        "0: 0F0 0B-2 0F1 0B-1 0F2 0B0 0F3 0B1",
        "1: 1F0 1B0 1F2 1B2",
        "2: 1F1 1B1 1F3 1B3",
    )


def test_stages_of_a_device_that_follow_one_another_are_one() -> None:
    routes = (((0,),) * 2, ((0,),) * 2, ((1,),) * 2)
    assert steady_window(routes).lines() == ("0: 0F0 1F0 1B-1 0B-1 0F1 1F1 1B0 0B0", "1: 2F0 2B0 2F1 2B1")


def test_more_in_flight_on_request_and_never_fewer_than_later_stages_need() -> None:
    assert steady_window(chain(2, 3), in_flight=(3, 0)).lines()[0] == "0: 0F0 0B-2 0F1 0B-1 0F2 0B0"
    fewer = steady_window(chain(3, 3), in_flight=(1, 0, 0))
    validate(unrolled(fewer, 3, 3), repeated_routes(chain(3, 3), 3))
    assert fewer.lines()[0] == "0: 0F0 0B-1 0F1 0B0 0F2 0B1"
    with pytest.raises(UsageError, match="one number for each"):
        steady_window(chain(2, 3), in_flight=(1,))


@settings(deadline=None, max_examples=150)
@given(case=cases(), data=st.data())
def test_windows_of_any_routes(case: Case, data: st.DataObject) -> None:
    routes, edges = case.routes, edges_of(case.work)
    count = len(routes[0])
    in_flight = data.draw(st.just(()) | st.tuples(*(st.integers(0, 4) for _ in routes)))
    window = steady_window(routes, edges, in_flight)
    check_window(window, count)
    assert Schedule.parse(window.lines()) == window
    steps = data.draw(st.integers(1, 4))
    validate(unrolled(window, count, steps), repeated_routes(routes, steps), edges)
    if all(one != other for one, other in itertools.pairwise(routes)):  # otherwise they go back with others
        ends = set(range(len(routes))) - {source for source, _ in edges}
        assert not any(action.stage in ends for row in drain_of(window).rows.values() for action in row)
    fill, drain = fill_of(window), drain_of(window)
    for device, row in window.rows.items():
        assert sorted((*fill.rows[device], *drain.rows[device])) == sorted(row)
        assert all(action.kind == "B" and action.micro_batch < 0 for action in drain.rows[device])
        whole = unrolled(Schedule(rows={device: row}), count, 1).rows[device]
        assert whole == (*fill.rows[device], *(Action(k, s, m + count) for k, s, m in drain.rows[device]))


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("0: 0F-1 0B-1", "forwards of the micro-batches 0 to 1"),
        ("0: 0F0 0B-3 0F1", "-2 to -1"),
        ("0: 0F0 0B0 0F1 0B-2", "0B0 and 0B-2 are both"),
    ],
)
def test_what_is_no_window(row: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        check_window(Schedule.parse([row]), 2)
