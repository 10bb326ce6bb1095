"""The state of a pipeline: the place of each item, and the permitted next steps; no thread, no clock, no lock.

Items go from stage to stage in order, though several of a stage may be in progress at once and finish in any order: a
finished one waits in its stage until all before it have gone on. So the next item is never delayed by a later one,
whatever the bounds are.

Bounds: a stage has at most one item more than workers, including finished ones, and at most ``ahead`` results are ready
after the last stage. In a stage that begins items early, and has a single worker, a further one may wait for it; where
there are several, it would wait for one while another is idle. With ``limit_bytes``, work begins only if its result is
expected to fit beside everything present and in progress; the expected growth is the largest so far in that stage, and
until the first result a stage works on one item at a time. The consumer's next item is always admitted, since nothing
would move otherwise: its result may exceed the limit, and nothing else as long as results have one size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from onebox.feed.pipeline.stages import StageFailure

StallReason = Literal["waiting", "blocked", "over"]


@dataclass(frozen=True, eq=False)
class WorkItem:
    """An item in progress in a stage.

    Args:
        number: Number of the item, from 0.
        value: The result of the stage before; ``None`` in the first stage, which takes it from the items.
        size_bytes: Bytes of the value.
        promised_bytes: Expected growth from the value to its result.
    """

    number: int
    value: Any
    size_bytes: int
    promised_bytes: int


@dataclass(eq=False)
class _Stage:
    """The items of a stage.

    Args:
        limit: Limit of the items in progress.
        early: Whether one item more may be begun while there is one worker.
        under_way: Items in progress: start time by number.
        done: Finished items with their bytes, by number.
        next_out: Number of the next item to pass on.
        growth_bytes: Largest growth from an item to its result; ``None`` before the first.
        promised_bytes: Expected growth of all items in progress.
    """

    limit: int
    early: bool = False
    under_way: dict[int, float] = field(default_factory=dict)
    done: dict[int, tuple[Any, int]] = field(default_factory=dict)
    next_out: int = 0
    growth_bytes: int | None = None
    promised_bytes: int = 0


class PipelineState:
    """The state of all items of a pipeline.

    Args:
        limits: Initial limit of items in progress in each stage.
        ahead: The most results that are ready at a time.
        limit_bytes: Limit of the bytes ready and in progress together; ``None`` for none.
        early: Indices of the stages whose worker may begin a second item, where the limit is 1.
    """

    def __init__(self, limits: list[int], *, ahead: int, limit_bytes: int | None, early: Collection[int] = ()) -> None:
        self._stages = [_Stage(limit, index in early) for index, limit in enumerate(limits)]
        self._ahead = ahead
        self._limit_bytes = limit_bytes
        self._ready: deque[tuple[Any, int]] = deque()
        self._taken = 0  # items that the first stage has begun
        self._pulling = False
        self._total: int | None = None
        self.handed = 0
        """Number of results that the consumer has got: the number of the next one."""
        self.used_bytes = 0
        """Bytes of everything ready or in a stage, without the growth of work in progress."""

    @property
    def is_ready(self) -> bool:
        """True if a result is ready for the consumer."""
        return bool(self._ready)

    @property
    def is_over(self) -> bool:
        """True if the consumer has got all results."""
        return self._total is not None and self.handed >= self._total

    def limit(self, stage: int) -> int:
        """Return the limit of items in progress in a stage."""
        return self._stages[stage].limit

    def set_limit(self, stage: int, limit: int) -> None:
        """Change the limit of items in progress in a stage; it may be exceeded for a while."""
        self._stages[stage].limit = limit

    def place(self, number: int) -> tuple[int, float] | None:
        """Return the stage that works on an item, and its start time; ``None`` if there is none."""
        for index, stage in enumerate(self._stages):
            if number in stage.under_way:
                return index, stage.under_way[number]
        return None

    def stall_reason(self, index: int) -> StallReason | None:
        """Return the reason for which a stage cannot begin an item now.

        Args:
            index: Index of the stage.

        Returns:
            ``waiting`` for an item, ``blocked`` without room for the result, ``over`` if no item is left; ``None`` if
                it can begin.
        """
        stage = self._stages[index]
        number = self._stages[index - 1].next_out if index else self._taken
        if self._total is not None and number >= self._total:
            return "over"
        if self._pulling if index == 0 else number not in self._stages[index - 1].done:
            return "waiting"
        begun = len(stage.under_way)
        most = stage.limit + (stage.early and stage.limit == 1)
        has_room = begun + len(stage.done) <= most and begun < most
        return None if has_room and self._fits(stage, number) else "blocked"

    def may_begin_early(self, index: int) -> bool:
        """Return whether a stage can begin an item that its only worker, which is busy, is to work on afterwards."""
        stage = self._stages[index]
        return stage.early and len(stage.under_way) >= stage.limit and self.stall_reason(index) is None

    def take(self, index: int, now_s: float) -> WorkItem:
        """Begin the next item in a stage that can; in the first, :meth:`pulled` has to follow."""
        stage = self._stages[index]
        if index:
            before = self._stages[index - 1]
            number = before.next_out
            value, size_bytes = before.done.pop(number)
            before.next_out += 1
        else:
            number, value, size_bytes = self._taken, None, 0
            self._taken += 1
            self._pulling = True
        stage.under_way[number] = now_s
        promised_bytes = stage.growth_bytes or 0
        stage.promised_bytes += promised_bytes
        return WorkItem(number, value, size_bytes, promised_bytes)

    def restart(self, index: int, task: WorkItem, now_s: float) -> None:
        """Note that the work on an item that was begun early starts now."""
        self._stages[index].under_way[task.number] = now_s

    def pulled(self) -> None:
        """Note that the first stage has got its item: it may begin another."""
        self._pulling = False

    def finish(self, index: int, task: WorkItem, value: Any, size_bytes: int) -> None:
        """Record a stage's result for an item; after a failure nothing follows."""
        stage = self._stages[index]
        stage.under_way.pop(task.number)
        stage.promised_bytes -= task.promised_bytes
        stage.done[task.number] = (value, size_bytes)
        self.used_bytes += size_bytes - task.size_bytes
        if isinstance(value, StageFailure):
            self._end(task.number + 1)
        else:
            stage.growth_bytes = max(stage.growth_bytes or 0, size_bytes - task.size_bytes)
        self._fill()

    def ended(self, task: WorkItem) -> None:
        """Record that the items are exhausted: there was none for the first stage's task."""
        self._stages[0].under_way.pop(task.number)
        self._stages[0].promised_bytes -= task.promised_bytes
        self._end(task.number)

    def hand_over(self) -> Any:
        """Pass the next result to the consumer."""
        value, size_bytes = self._ready.popleft()
        self.handed += 1
        self.used_bytes -= size_bytes
        self._fill()
        return value

    def clear(self) -> None:
        """Drop all items; nothing may be begun afterwards."""
        self._ready.clear()
        for stage in self._stages:
            stage.done.clear()

    def _end(self, total: int) -> None:
        self._total = total if self._total is None else min(total, self._total)

    def _fill(self) -> None:
        """Move finished items of the last stage to the ready results, as long as there is room."""
        last = self._stages[-1]
        while len(self._ready) < self._ahead and last.next_out in last.done:
            self._ready.append(last.done.pop(last.next_out))
            last.next_out += 1

    def _fits(self, stage: _Stage, number: int) -> bool:
        """Return whether there is memory for the work on an item."""
        if self._limit_bytes is None or number == self.handed:
            return True
        if stage.growth_bytes is None:
            return False
        promised_bytes = sum(each.promised_bytes for each in self._stages)
        return self.used_bytes + promised_bytes + stage.growth_bytes <= self._limit_bytes
