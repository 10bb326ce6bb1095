"""Where the items of a pipeline are: in order, within the bounds, and never stuck, whatever happens first."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.feed.pipeline.stages import StageFailure
from onebox.feed.pipeline.state import PipelineState, WorkItem


class Driver:
    """Does what may be done next, chosen by Hypothesis, and looks at the bounds after each.

    Args:
        items: How many there are.
        limits: Of the stages.
        ahead: Results that may be ready.
        limit_bytes: Of all of them.
        sizes: Bytes of each stage's results.
        fail: The item at which a stage fails, and the stage.
        early: The stages that may begin a second item where their limit is 1.
    """

    def __init__(
        self,
        items: int,
        limits: list[int],
        ahead: int,
        *,
        limit_bytes: int | None = None,
        sizes: list[int] | None = None,
        fail: tuple[int, int] | None = None,
        early: Collection[int] = (),
    ) -> None:
        self.flow = PipelineState(limits, ahead=ahead, limit_bytes=limit_bytes, early=early)
        self.early = early
        self.items = items
        self.limits = limits
        self.ahead = ahead
        self.limit_bytes = limit_bytes
        self.sizes = sizes or [0] * len(limits)
        self.fail = fail
        self.under_way: list[tuple[int, WorkItem]] = []
        self.begun: list[set[int]] = [set() for _ in limits]
        self.got: list[Any] = []

    def choices(self) -> list[tuple[str, int]]:
        """What may happen now."""
        found = [("begin", stage) for stage in range(len(self.limits)) if self.flow.stall_reason(stage) is None]
        found += [("finish", place) for place in range(len(self.under_way))]
        return [*found, ("get", 0)] if self.flow.is_ready else found

    def do(self, what: str, which: int) -> None:
        """Let it happen."""
        if what == "begin":
            task = self.flow.take(which, now_s=0.0)
            if which == 0 and task.number >= self.items:
                self.flow.ended(task)
                return
            if which == 0:
                self.flow.pulled()
            assert task.number not in self.begun[which]
            self.begun[which].add(task.number)
            self.under_way.append((which, task))
        elif what == "finish":
            stage, task = self.under_way.pop(which)
            assert self.flow.place(task.number) == (stage, 0.0)
            value: Any = (
                (task.value or ()) + ((stage, task.number),) if not isinstance(task.value, StageFailure) else None
            )
            if value is None or self.fail == (task.number, stage):
                value = task.value if value is None else StageFailure(ValueError(str(task.number)))
            self.flow.finish(stage, task, value, self.sizes[stage])
        else:
            self.got.append(self.flow.hand_over())
        self.look()

    def most(self) -> int:
        """Return how many items the pipeline may hold."""
        second = sum(limit == 1 and stage in self.early for stage, limit in enumerate(self.limits))
        return sum(limit + 1 for limit in self.limits) + second + self.ahead

    def look(self) -> None:
        """Check the bounds."""
        for stage, limit in enumerate(self.limits):
            assert sum(each == stage for each, _ in self.under_way) <= limit + (limit == 1 and stage in self.early)
        held = len(self.begun[0]) - len(self.got)
        assert held <= self.most()
        if self.limit_bytes is not None:
            assert self.flow.used_bytes <= self.limit_bytes + max(self.sizes)

    def run(self, data: st.DataObject) -> None:
        """Go on to the end."""
        while not self.flow.is_over:
            choices = self.choices()
            assert choices, "nothing can go on"
            self.do(*choices[data.draw(st.integers(0, len(choices) - 1))])


stages = st.lists(st.integers(1, 3), min_size=1, max_size=3)
subsets = st.sets(st.integers(0, 2))


@given(data=st.data(), items=st.integers(0, 12), limits=stages, ahead=st.integers(1, 3), early=subsets)
def test_every_item_passes_every_stage_once_and_comes_in_order(data, items, limits, ahead, early):
    driver = Driver(items, limits, ahead, early=early)
    driver.run(data)
    assert driver.got == [tuple((stage, number) for stage in range(len(limits))) for number in range(items)]
    assert driver.flow.used_bytes == 0


@given(data=st.data(), limits=stages, ahead=st.integers(1, 3), limit_bytes=st.integers(1, 60), early=subsets)
def test_the_limit_of_bytes_holds_and_stops_nothing(data, limits, ahead, limit_bytes, early):
    sizes = data.draw(st.lists(st.integers(0, 20), min_size=len(limits), max_size=len(limits)))
    driver = Driver(10, limits, ahead, limit_bytes=limit_bytes, sizes=sizes, early=early)
    driver.run(data)
    assert len(driver.got) == 10
    assert driver.flow.used_bytes == 0


@given(data=st.data(), limits=stages, number=st.integers(0, 7), early=subsets)
def test_a_failure_comes_in_its_place_and_is_the_end(data, limits, number, early):
    stage = data.draw(st.integers(0, len(limits) - 1))
    driver = Driver(8, limits, 2, fail=(number, stage), early=early)
    driver.run(data)
    assert len(driver.got) == number + 1
    assert isinstance(driver.got[-1], StageFailure)
    assert not any(isinstance(value, StageFailure) for value in driver.got[:-1])


@given(data=st.data(), limits=stages, early=subsets)
def test_a_consumer_that_stalls_stops_all_stages(data, limits, early):
    driver = Driver(100, limits, 2, early=early)
    while choices := [choice for choice in driver.choices() if choice[0] != "get"]:
        driver.do(*choices[data.draw(st.integers(0, len(choices) - 1))])
    assert len(driver.begun[0]) == driver.most()
    assert [driver.flow.stall_reason(stage) for stage in range(len(limits))] == ["blocked"] * len(limits)


def test_what_hinders_a_stage_is_told():
    flow = PipelineState([1, 1], ahead=1, limit_bytes=None)
    assert flow.stall_reason(0) is None
    assert flow.stall_reason(1) == "waiting"
    task = flow.take(0, 1.5)
    assert flow.place(0) == (0, 1.5)
    assert flow.stall_reason(0) == "waiting"  # for the one who is taking an item
    flow.ended(task)
    assert flow.stall_reason(0) == flow.stall_reason(1) == "over"
    assert flow.is_over


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_an_item_is_begun_early_only_for_the_one_worker_which_is_busy(limit):
    flow = PipelineState([1, limit], ahead=1, limit_bytes=None, early=[1])
    begun = 0
    while begun < 8:
        if flow.stall_reason(0) is None:
            read = flow.take(0, 0.0)
            flow.pulled()
            flow.finish(0, read, begun, 0)
        assert flow.may_begin_early(1) == (limit == begun == 1)
        if flow.stall_reason(1) is not None:
            break
        flow.take(1, float(begun))
        begun += 1
    assert begun == max(2, limit)
    assert flow.stall_reason(1) == "blocked"
    assert not flow.may_begin_early(0)


def test_an_item_is_begun_early_before_the_next_stage_has_taken_the_last_one():
    flow = PipelineState([1, 1, 1], ahead=1, limit_bytes=None, early=[1])

    def read() -> None:
        task = flow.take(0, 0.0)
        flow.pulled()
        flow.finish(0, task, "read", 0)

    read()
    first = flow.take(1, 0.0)
    read()
    flow.take(1, 0.0)
    read()
    flow.finish(1, first, "made", 0)  # and the third stage has yet to wake up
    assert flow.may_begin_early(1)


def test_workers_beside_one_with_a_long_item_work_ahead():
    flow = PipelineState([1, 2], ahead=1, limit_bytes=None, early=[1])

    def begin() -> WorkItem:
        read = flow.take(0, 0.0)
        flow.pulled()
        flow.finish(0, read, "read", 0)
        return flow.take(1, 0.0)

    begin()  # the long one
    short = begin()
    read = flow.take(0, 0.0)
    flow.pulled()
    flow.finish(0, read, "read", 0)
    assert not flow.may_begin_early(1), "it would wait for the long one"
    flow.finish(1, short, "made", 0)
    assert flow.stall_reason(1) is None


def test_the_time_of_an_item_that_was_begun_early_counts_from_its_start():
    flow = PipelineState([1], ahead=1, limit_bytes=None, early=[0])
    tasks = []
    for now_s in (1.0, 2.0):
        tasks.append(flow.take(0, now_s))
        flow.pulled()
    flow.finish(0, tasks[0], "made", 0)
    flow.restart(0, tasks[1], 9.0)
    assert flow.place(1) == (0, 9.0)


@pytest.mark.parametrize("limit", [1, 4])
def test_a_limit_that_changes_holds_from_then_on(limit):
    flow = PipelineState([2], ahead=1, limit_bytes=None)
    for _ in range(2):
        flow.take(0, 0.0)
        flow.pulled()
    assert flow.stall_reason(0) == "blocked"
    flow.set_limit(0, limit)
    assert flow.limit(0) == limit
    assert flow.stall_reason(0) == ("blocked" if limit == 1 else None)
