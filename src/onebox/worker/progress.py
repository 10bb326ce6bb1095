"""Progress of a worker, waits that are marked in it, and the times and memory of the instructions of a traced run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from onebox.worker.system.clock import sleep_until


class WorkerProgress:
    """Progress of a worker; written by the working thread, read by the watching thread."""

    def __init__(self) -> None:
        self.executed = 0
        self.doing = ""
        self.waiting = False

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Mark the context as waiting for others, which is not a stall of this worker."""
        before, self.waiting = self.waiting, True
        try:
            yield
        finally:
            self.waiting = before


def wait_until(end_ns: int, progress: WorkerProgress) -> None:
    """Sleep until a time on the clock of ``time.monotonic_ns``, never less.

    Args:
        end_ns: The time; returns at once if it has passed.
        progress: Notified of the wait, so that the worker does not appear to hang.
    """
    if end_ns > time.monotonic_ns():
        with progress.wait():
            sleep_until(end_ns)


class PeakMeter(Protocol):
    """Bytes in use, and their peak between two calls."""

    @property
    def used_bytes(self) -> int:
        """Bytes in use now."""

    def begin_peak(self) -> int:
        """Measure the peak from here on; return the peak before, for :meth:`end_peak`."""

    def end_peak(self, before: int) -> int:
        """Return the peak since :meth:`begin_peak`, and measure the peak of all times again."""


class Trace:
    """Start, end and memory of each instruction of a run; see :class:`onebox.wire.protocol.requests.Run` for their
    definitions.

    Args:
        meter: The memory whose bytes are recorded; ``None`` for a disabled trace.
    """

    def __init__(self, meter: PeakMeter | None = None) -> None:
        self.times_ns: list[int] = []
        self.used_bytes: list[int] = []
        self._meter = meter
        self._until_ns = 0
        self._running = False
        self._peak_before = 0

    def begin(self) -> None:
        """Record the start of an instruction."""
        meter = self._meter
        if meter is not None:
            self.times_ns.append(time.monotonic_ns())
            self._until_ns = 0
            self._running = True
            self._peak_before = meter.begin_peak()

    def ready(self) -> None:
        """Record that the inputs of the instruction are present, which is its effective start."""
        if self._running:
            self.times_ns[-1] = time.monotonic_ns()

    def until(self, end_ns: int) -> None:
        """Record the arrival time of the instruction's sends, which may be later than its end."""
        self._until_ns = end_ns

    def end(self) -> None:
        """Record the end of the instruction: the time, its peak, and the bytes in use after it."""
        meter = self._meter
        if meter is not None:
            self.times_ns.append(max(time.monotonic_ns(), self._until_ns))
            self._running = False
            self.used_bytes += (meter.end_peak(self._peak_before), meter.used_bytes)

    def later(self) -> Callable[[int], None]:
        """Return a function that records the completion of the instruction's asynchronous work after its end."""
        times, place = self.times_ns, len(self.times_ns)

        def done(at_ns: int) -> None:
            if 0 < place < len(times):
                times[place] = max(times[place - 1], at_ns)

        return done
