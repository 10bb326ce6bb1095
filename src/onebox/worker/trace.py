"""When the instructions of a traced run began and ended, and what memory they took."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class PeakMeter(Protocol):
    """Bytes in use, and the most of them between two calls."""

    @property
    def used_bytes(self) -> int:
        """Bytes in use now."""

    def begin_peak(self) -> int:
        """Measure the peak from here on; return the peak before, for :meth:`end_peak`."""

    def end_peak(self, before: int) -> int:
        """Return the peak since :meth:`begin_peak`, and measure the peak of all times again."""


class Trace:
    """Start, end and memory of each instruction of a run; see :class:`onebox.wire.protocol.requests.Run` for what they
    mean.

    Args:
        meter: The memory whose bytes are noted; ``None`` for a trace that notes nothing.
    """

    def __init__(self, meter: PeakMeter | None = None) -> None:
        self.times_ns: list[int] = []
        self.used_bytes: list[int] = []
        self._meter = meter
        self._until_ns = 0
        self._running = False
        self._peak_before = 0

    def begin(self) -> None:
        """Note that an instruction begins."""
        meter = self._meter
        if meter is not None:
            self.times_ns.append(time.monotonic_ns())
            self._until_ns = 0
            self._running = True
            self._peak_before = meter.begin_peak()

    def ready(self) -> None:
        """Note that what the instruction reads is there, so that it begins only now."""
        if self._running:
            self.times_ns[-1] = time.monotonic_ns()

    def until(self, end_ns: int) -> None:
        """Note when what the instruction has sent is there, which may be later than its end."""
        self._until_ns = end_ns

    def end(self) -> None:
        """Note that the instruction has ended: when, its peak, and what is in use after it."""
        meter = self._meter
        if meter is not None:
            self.times_ns.append(max(time.monotonic_ns(), self._until_ns))
            self._running = False
            self.used_bytes += (meter.end_peak(self._peak_before), meter.used_bytes)

    def later(self) -> Callable[[int], None]:
        """Return what notes when that which the instruction has started was there, after it has ended."""
        times, place = self.times_ns, len(self.times_ns)

        def done(at_ns: int) -> None:
            if 0 < place < len(times):
                times[place] = max(times[place - 1], at_ns)

        return done
