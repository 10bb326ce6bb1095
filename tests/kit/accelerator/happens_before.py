"""The happens-before relation of a modelled accelerator: vector clocks, and a check of each access to memory.

Each stream is a context that counts its own steps, and so is the host: its threads order their work by locks, queues
and other processes, which are not seen here, and count as one. A clock holds, for each context, the steps that have
certainly ended; two accesses of which one writes, and of which neither is in the clock of the other, are a race
(Flanagan and Freund, FastTrack, PLDI 2009).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

Clock = dict[int, int]
"""For each context, its last step that has certainly ended."""

Range = tuple[int, int]
"""Addresses of bytes: the first, and the one after the last."""

MOST_RUNS = 256
"""Contiguous runs of a strided tensor that are told apart; of more, the bytes between them count as accessed."""


def join(clock: Clock, other: Clock) -> None:
    """Add to a clock what another holds."""
    for context, step in other.items():
        if clock.get(context, 0) < step:
            clock[context] = step


@dataclass(frozen=True)
class Access:
    """An access to memory.

    Args:
        context: Number of its stream, or of the host.
        step: Its step there.
        label: Its operator, stream and caller, for messages.
    """

    context: int
    step: int
    label: str


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes without an order.

    Args:
        first: The access that was issued first.
        second: The other one.
        kind: ``write after read``, ``read after write`` or ``write after write``.
        place: First common address.
    """

    first: Access
    second: Access
    kind: str
    place: int

    def __str__(self) -> str:
        return f"race ({self.kind}) at {self.place:#x}: {self.second.label} is not ordered after {self.first.label}"


class _Segment:
    """Bytes with the same last accesses."""

    __slots__ = ("end", "reads", "write")

    def __init__(self, end: int, write: Access | None, reads: dict[int, Access]) -> None:
        self.end = end
        self.write = write
        self.reads = reads  # the last one of each context since the write


class AccessCheck:
    """The last accesses to each byte, compared with each new one."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._segments: dict[int, _Segment] = {}

    def read(self, place: Range, access: Access, clock: Clock) -> list[Race]:
        """Record a read; return the races that it makes.

        Args:
            place: Addresses.
            access: The read.
            clock: The clock of its context.
        """
        races = []
        for start, segment in self._within(place):
            write = segment.write
            if write is not None and clock.get(write.context, 0) < write.step:
                races.append(Race(write, access, "read after write", start))
            segment.reads[access.context] = access
        return races

    def write(self, place: Range, access: Access, clock: Clock) -> list[Race]:
        """Record a write; return the races that it makes. For the arguments see :meth:`read`."""
        races = []
        for start, segment in self._within(place):
            write = segment.write
            if write is not None and clock.get(write.context, 0) < write.step:
                races.append(Race(write, access, "write after write", start))
            for read in segment.reads.values():
                if clock.get(read.context, 0) < read.step:
                    races.append(Race(read, access, "write after read", start))
        self.forget(place)
        self._insert(place[0], _Segment(place[1], access, {}))
        return races

    def forget(self, place: Range) -> None:
        """Forget the accesses to memory that is given back."""
        for start, _ in self._within(place, fill=False):
            del self._segments[start]
            del self._starts[bisect.bisect_left(self._starts, start)]

    def _within(self, place: Range, *, fill: bool = True) -> list[tuple[int, _Segment]]:
        """Return the segments of a range, cut at its ends; missing ones are created if requested."""
        begin, end = place
        self._cut(begin)
        self._cut(end)
        first, last = bisect.bisect_left(self._starts, begin), bisect.bisect_left(self._starts, end)
        found = [(start, self._segments[start]) for start in self._starts[first:last]]
        if fill:
            at = begin
            for start, segment in [*found, (end, _Segment(end, None, {}))]:
                if at < start:
                    missing = _Segment(start, None, {})
                    self._insert(at, missing)
                    found.append((at, missing))
                at = segment.end
        return found

    def _cut(self, at: int) -> None:
        """Divide the segment that an address lies within."""
        index = bisect.bisect_left(self._starts, at) - 1
        if index >= 0:
            segment = self._segments[self._starts[index]]
            if segment.end > at:
                self._insert(at, _Segment(segment.end, segment.write, dict(segment.reads)))
                segment.end = at

    def _insert(self, start: int, segment: _Segment) -> None:
        bisect.insort(self._starts, start)
        self._segments[start] = segment


def byte_ranges(address: int, shape: Iterable[int], strides: Iterable[int], item_bytes: int) -> list[Range]:
    """Return the bytes of a strided tensor as contiguous ranges.

    Args:
        address: Address of its first element.
        shape: Its shape.
        strides: Its strides, in elements.
        item_bytes: Bytes of an element.

    Example:
        >>> byte_ranges(0, (2, 3), (5, 1), 4)
        [(0, 12), (20, 32)]
        >>> byte_ranges(0, (3, 2), (1, 3), 4)
        [(0, 24)]
    """
    sizes = sorted((abs(stride), size) for size, stride in zip(shape, strides, strict=True) if size != 1)
    if any(size == 0 for _, size in sizes):
        return []
    dense = 1
    outer: list[tuple[int, int]] = []
    for stride, size in sizes:
        if stride <= dense and not outer:
            dense = max(dense, stride * (size - 1) + dense)
        elif stride:
            outer.append((stride, size))
    count = 1
    for _, size in outer:
        count *= size
    if count > MOST_RUNS:
        dense, outer = dense + sum(stride * (size - 1) for stride, size in outer), []
    starts = [0]
    for stride, size in outer:
        starts = [start + number * stride for number in range(size) for start in starts]
    return [(address + start * item_bytes, address + (start + dense) * item_bytes) for start in sorted(starts)]


__all__ = ["Access", "AccessCheck", "Clock", "Race", "Range", "byte_ranges", "join"]
