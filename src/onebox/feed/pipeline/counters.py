"""Counters of a feed's stages: time busy, waiting for input, blocked by output, and bytes.

The counters of a stage are sums over its workers, so that with three of them three seconds pass in one. The present
state of each worker is included: a stage that has been blocked for a minute shows it before it goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

WorkerKind = Literal["threads", "processes"]
Doing = Literal["busy", "waiting", "blocked"]

CONSUMER = "compute"
"""Name of the last, pseudo stage: the consumer of the results."""


@dataclass(frozen=True, kw_only=True)
class StageCounters:
    """The counters of a stage.

    Args:
        name: Name of the stage; ``compute`` is the consumer, busy between its requests for results.
        by: Kind of its workers.
        concurrency: Number of its workers.
        items: Finished items.
        busy_s: Time of its work.
        waiting_s: Time of waiting for input.
        blocked_s: Time in which input was available, but there was no room for its output.
        bytes: Bytes of the tensors, arrays and byte strings in its results.
        cpu_s: Processor time of its work, without that of threads that the work itself starts.
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
    """Return the differences between two snapshots of a pipeline's counters; the concurrency is the later one."""
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
    """Counts for one stage; the caller holds the lock of the pipeline.

    Args:
        name: Name of the stage.
        by: Kind of its workers.
    """

    name: str
    by: WorkerKind = "threads"
    items: int = 0
    bytes: int = 0
    cpu_s: float = 0.0
    _spent_s: dict[Doing, float] = field(default_factory=lambda: {"busy": 0.0, "waiting": 0.0, "blocked": 0.0})
    _now: dict[Hashable, tuple[Doing, float]] = field(default_factory=dict)

    def switch(self, worker: Hashable, doing: Doing | None, now_s: float) -> None:
        """Set the state of a worker from now on; ``None`` if it has ended."""
        if worker in self._now:
            did, since_s = self._now.pop(worker)
            self._spent_s[did] += now_s - since_s
        if doing is not None:
            self._now[worker] = (doing, now_s)

    def finished(self, size_bytes: int, cpu_s: float = 0.0) -> None:
        """Count a finished item, and its processor time."""
        self.items += 1
        self.bytes += size_bytes
        self.cpu_s += cpu_s

    def counters(self, concurrency: int, now_s: float) -> StageCounters:
        """Return the sums, including the present states."""
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

    The attribute ``nbytes``, as of tensors and arrays, is used where it exists; dataclasses are searched. Numbers and
    text count as 0.

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
