"""What the stages of a feed are doing: time at work, time in wait for input, time blocked by output, and bytes.

The counters of a stage are sums over its workers, so that with three of them three seconds pass in one. What each
worker does at the moment counts, too: a stage that has been blocked for a minute says so before it goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

WorkerKind = Literal["threads", "processes"]
Doing = Literal["busy", "waiting", "blocked"]

CONSUMER = "compute"
"""The name of the last, pseudo stage: whoever takes the results."""


@dataclass(frozen=True, kw_only=True)
class StageCounters:
    """What a stage has done so far.

    Args:
        name: Of the stage; ``compute`` is the consumer, whose work is the time between asking for results.
        by: What its workers are.
        concurrency: How many there are.
        items: Items that are done.
        busy_s: Time inside of its work.
        waiting_s: Time in wait for input.
        blocked_s: Time in which it could have had input, but had no room for what it makes.
        bytes: What it has made: tensors, arrays and bytes in its results.
        cpu_s: Time of processors in its work; without that of other threads that the work itself has.
    """

    name: str
    by: WorkerKind
    concurrency: int
    items: int
    busy_s: float
    waiting_s: float
    blocked_s: float
    bytes: int
    cpu_s: float = 0.0


def between(before: Sequence[StageCounters], after: Sequence[StageCounters]) -> tuple[StageCounters, ...]:
    """Return what stages did between two looks at the same pipeline; the concurrency is the later one."""
    return tuple(
        dataclasses.replace(
            late,
            items=late.items - early.items,
            busy_s=late.busy_s - early.busy_s,
            waiting_s=late.waiting_s - early.waiting_s,
            blocked_s=late.blocked_s - early.blocked_s,
            bytes=late.bytes - early.bytes,
            cpu_s=late.cpu_s - early.cpu_s,
        )
        for early, late in zip(before, after, strict=True)
    )


@dataclass
class StageTally:
    """Counts for one stage; whoever uses it holds the lock of the pipeline.

    Args:
        name: Of the stage.
        by: What its workers are.
    """

    name: str
    by: WorkerKind = "threads"
    items: int = 0
    bytes: int = 0
    cpu_s: float = 0.0
    _spent_s: dict[Doing, float] = field(default_factory=lambda: {"busy": 0.0, "waiting": 0.0, "blocked": 0.0})
    _now: dict[Hashable, tuple[Doing, float]] = field(default_factory=dict)

    def switch(self, worker: Hashable, doing: Doing | None, now_s: float) -> None:
        """Take note of what a worker does from now on; ``None`` if it is gone."""
        if worker in self._now:
            did, since_s = self._now.pop(worker)
            self._spent_s[did] += now_s - since_s
        if doing is not None:
            self._now[worker] = (doing, now_s)

    def finished(self, size_bytes: int, cpu_s: float = 0.0) -> None:
        """Count an item that is done, and what it took of a processor."""
        self.items += 1
        self.bytes += size_bytes
        self.cpu_s += cpu_s

    def counters(self, concurrency: int, now_s: float) -> StageCounters:
        """Return the sums, with what is going on at the moment."""
        spent_s = dict(self._spent_s)
        for doing, since_s in self._now.values():
            spent_s[doing] += now_s - since_s
        return StageCounters(
            name=self.name,
            by=self.by,
            concurrency=concurrency,
            items=self.items,
            busy_s=spent_s["busy"],
            waiting_s=spent_s["waiting"],
            blocked_s=spent_s["blocked"],
            bytes=self.bytes,
            cpu_s=self.cpu_s,
        )


def size_of(value: Any) -> int:
    """Return the bytes of the tensors, arrays and bytes in a value, however they are nested.

    What says its own size by an attribute ``nbytes``, as tensors and arrays do, is asked; dataclasses are looked into.
    Numbers and text count nothing.

    Example:
        >>> size_of({"raw": [b"abc", b"de"], "label": 3})
        5
    """
    if isinstance(value, bytes | bytearray):
        return len(value)
    if isinstance(value, list | tuple | set | frozenset):
        return sum(map(size_of, value))
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    own = getattr(value, "nbytes", 0)
    if isinstance(own, int) and own:
        return own
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return sum(size_of(getattr(value, each.name)) for each in dataclasses.fields(value))
    return 0
