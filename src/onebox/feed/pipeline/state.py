"""Where each item of a pipeline is, and what may happen next; no thread, no clock, no lock.

Items go from stage to stage in their order, though several of a stage may be under way at once and end in any: one that
is finished waits in its stage until all before it have gone on. So the item that comes next is never held up by a later
one, whatever the bounds are.

What bounds it: a stage has at most one item more than workers, finished ones included, and at most ``ahead`` results
are ready behind the last. With ``limit_bytes``, work begins only where its result is expected to fit beside all that is
there and under way; the expectation is the most by which results of that stage were larger than their items so far, and
until there is one, a stage works on one item at a time. The item that the consumer gets next is always let through, as
nothing would move otherwise: by what becomes of it the limit may be exceeded, and by no more as long as results are of
a size.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from onebox.feed.pipeline.stages import StageFailure

StallReason = Literal["waiting", "blocked", "over"]


@dataclass(frozen=True, eq=False)
class WorkItem:
    """An item that is under way in a stage.

    Args:
        number: Of the item, from 0.
        value: What the stage before has made of it; ``None`` in the first stage, which takes it from the items.
        size_bytes: Bytes of the value.
        promised_bytes: By how much its result is expected to be larger.
    """

    number: int
    value: Any
    size_bytes: int
    promised_bytes: int


@dataclass(eq=False)
class _Stage:
    """The items of a stage.

    Args:
        limit: How many may be under way.
        under_way: By their numbers, and when their work began.
        done: Finished ones, with their bytes, by their numbers.
        next_out: The number of the one that is handed on next.
        growth_bytes: The most by which a result was larger than what it was made of; ``None`` before the first.
        promised_bytes: By how much the results of what is under way are expected to be larger.
    """

    limit: int
    under_way: dict[int, float] = field(default_factory=dict)
    done: dict[int, tuple[Any, int]] = field(default_factory=dict)
    next_out: int = 0
    growth_bytes: int | None = None
    promised_bytes: int = 0


class PipelineState:
    """The items of a pipeline.

    Args:
        limits: How many items may be under way in each stage, at first.
        ahead: Most results that are ready at a time.
        limit_bytes: Most bytes of what is ready and under way together; ``None`` for no such limit.
    """

    def __init__(self, limits: list[int], *, ahead: int, limit_bytes: int | None) -> None:
        self._stages = [_Stage(limit) for limit in limits]
        self._ahead = ahead
        self._limit_bytes = limit_bytes
        self._ready: deque[tuple[Any, int]] = deque()
        self._taken = 0  # items that the first stage has begun with
        self._pulling = False
        self._total: int | None = None
        self.handed = 0
        """Results that the consumer has got: the number of the next."""
        self.used_bytes = 0
        """Bytes of everything that is ready or in a stage, without what work makes at the moment."""

    @property
    def is_ready(self) -> bool:
        """Whether the consumer can have a result."""
        return bool(self._ready)

    @property
    def is_over(self) -> bool:
        """Whether the consumer has had all results."""
        return self._total is not None and self.handed >= self._total

    def limit(self, stage: int) -> int:
        """How many items may be under way in a stage."""
        return self._stages[stage].limit

    def set_limit(self, stage: int, limit: int) -> None:
        """Change how many items may be under way in a stage; more than that may be for a while."""
        self._stages[stage].limit = limit

    def place(self, number: int) -> tuple[int, float] | None:
        """Return the stage that is at work on an item, and since when; ``None`` if none is."""
        for index, stage in enumerate(self._stages):
            if number in stage.under_way:
                return index, stage.under_way[number]
        return None

    def stall_reason(self, index: int) -> StallReason | None:
        """Return why a stage cannot begin with an item now.

        Args:
            index: Of the stage.

        Returns:
            ``waiting`` for an item, ``blocked`` as there is no room for what would become of it, ``over`` if none will
            come any more; ``None`` if it can.
        """
        stage = self._stages[index]
        number = self._stages[index - 1].next_out if index else self._taken
        if self._total is not None and number >= self._total:
            return "over"
        if self._pulling if index == 0 else number not in self._stages[index - 1].done:
            return "waiting"
        has_room = len(stage.under_way) + len(stage.done) <= stage.limit and len(stage.under_way) < stage.limit
        return None if has_room and self._fits(stage, number) else "blocked"

    def take(self, index: int, now_s: float) -> WorkItem:
        """Begin with the next item in a stage that nothing hinders; in the first, :meth:`pulled` has to follow."""
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

    def pulled(self) -> None:
        """The first stage has the item that it began with: it may begin with another."""
        self._pulling = False

    def finish(self, index: int, task: WorkItem, value: Any, size_bytes: int) -> None:
        """Put down what a stage has made of an item; with a failure nothing comes after it."""
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
        """There was no item for the first stage to begin with: that before was the last."""
        self._stages[0].under_way.pop(task.number)
        self._stages[0].promised_bytes -= task.promised_bytes
        self._end(task.number)

    def hand_over(self) -> Any:
        """Give the consumer the next result."""
        value, size_bytes = self._ready.popleft()
        self.handed += 1
        self.used_bytes -= size_bytes
        self._fill()
        return value

    def clear(self) -> None:
        """Drop what is there; nothing is to be begun afterwards."""
        self._ready.clear()
        for stage in self._stages:
            stage.done.clear()

    def _end(self, total: int) -> None:
        self._total = total if self._total is None else min(total, self._total)

    def _fill(self) -> None:
        """Let finished items of the last stage become ready, as long as there is room."""
        last = self._stages[-1]
        while len(self._ready) < self._ahead and last.next_out in last.done:
            self._ready.append(last.done.pop(last.next_out))
            last.next_out += 1

    def _fits(self, stage: _Stage, number: int) -> bool:
        """Whether there is memory for the work on an item."""
        if self._limit_bytes is None or number == self.handed:
            return True
        if stage.growth_bytes is None:
            return False
        promised_bytes = sum(each.promised_bytes for each in self._stages)
        return self.used_bytes + promised_bytes + stage.growth_bytes <= self._limit_bytes
