"""Exchanges: all members of a group begin its sums in one order, whoever is ready with what first."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.compile.routine import RoutineBuilder
from onebox.engine.compile.update.reductions import GroupReduction, ReductionQueue
from onebox.engine.partition.sharding_spec import Members
from onebox.wire.protocol.instructions import Reduce

GROUPS: dict[Members, int] = {(0, 1): 7, (0, 1, 2): 8}


def begun(builder: RoutineBuilder) -> list[tuple[int, tuple[int, ...]]]:
    """Return the sums that were begun: group and buffers."""
    return [(step.group, step.buffers) for step in builder.steps if isinstance(step, Reduce)]


def queue(expected: list[Members]) -> tuple[RoutineBuilder, ReductionQueue, list[GroupReduction]]:
    """Return exchanges of buffers 1, 2, … that are expected of groups in turn."""
    builder = RoutineBuilder(itertools.count(100).__next__)
    exchanges = ReductionQueue(builder, 0, GROUPS)
    found = [exchanges.expect(members, lambda n=n: [(n,)]) for n, members in enumerate(expected, start=1)]  # type: ignore[misc]
    return builder, exchanges, found


@given(st.lists(st.sampled_from(sorted(GROUPS)), max_size=8), st.data())
def test_the_order_of_a_group_is_that_in_which_exchanges_are_expected(
    expected: list[Members], data: st.DataObject
) -> None:
    """However early or late each is ready; one that never is, is begun in the end."""
    builder, exchanges, found = queue(expected)
    for exchange in data.draw(st.lists(st.sampled_from(found), unique_by=id) if found else st.just([])):
        exchange.ready = True
        exchanges.flush()
    exchanges.finish()
    for members, group in GROUPS.items():
        due = [(number,) for number, each in enumerate(expected, start=1) if each == members]
        assert [buffers for number, buffers in begun(builder) if number == group] == due
    assert len(builder.labels) == len(builder.steps)


@given(st.lists(st.sampled_from(sorted(GROUPS)), max_size=8), st.data())
def test_what_is_ready_begins_as_soon_as_those_before_it_have(expected: list[Members], data: st.DataObject) -> None:
    builder, exchanges, found = queue(expected)
    done: set[int] = set()
    for exchange in data.draw(st.lists(st.sampled_from(found), unique_by=id) if found else st.just([])):
        exchange.ready = True
        done.add(found.index(exchange))
        exchanges.flush()
        for members, group in GROUPS.items():
            own = [place for place, each in enumerate(expected) if each == members]
            ready = list(itertools.takewhile(done.__contains__, own))
            assert [buffers for number, buffers in begun(builder) if number == group] == [(p + 1,) for p in ready]


def test_what_is_prepared_comes_just_before_the_sum_and_once() -> None:
    builder = RoutineBuilder(itertools.count(100).__next__)
    exchanges = ReductionQueue(builder, 0, GROUPS)
    calls: list[int] = []

    def prepare() -> list[tuple[int, ...]]:
        calls.append(len(builder.steps))
        return [(1, 2), (3,)]

    exchanges.expect((0, 1), prepare).ready = True
    exchanges.flush()
    exchanges.flush()
    exchanges.finish()
    assert calls == [0]
    assert begun(builder) == [(7, (1, 2)), (7, (3,))], "a message for each element type"
