"""Progress of a worker, waits that are marked in it, and the times and memory of the instructions of a traced run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Protocol, cast

from onebox.worker.accelerator import Accelerator, Event


class WorkerProgress:
    """Progress of a worker; written by the working thread, read by the watching thread."""

    def __init__(self) -> None:
        self.executed = 0
        self.doing = ""
        self.waiting = False
        self.waited_ns = 0
        """Time that was spent waiting for others."""

    def wait(self) -> MarkedWait:
        """Mark the context as waiting for others, which is not a stall of this worker."""
        return MarkedWait(self)


class MarkedWait:
    """A context that is marked as waiting; entered at each wait of a routine, it costs less than a generator."""

    __slots__ = ("_before", "_progress", "_since_ns")

    def __init__(self, progress: WorkerProgress) -> None:
        self._progress = progress

    def __enter__(self) -> None:
        self._before, self._progress.waiting = self._progress.waiting, True
        self._since_ns = time.monotonic_ns()

    def __exit__(self, *error: object) -> None:
        progress = self._progress
        progress.waiting = self._before
        if not self._before:  # the outermost one
            progress.waited_ns += time.monotonic_ns() - self._since_ns


class PeakMeter(Protocol):
    """Bytes in use, and their peak since it was last set."""

    used_bytes: int
    """Bytes in use now."""

    peak_bytes: int
    """Their peak."""


Moment = int | Event
"""A time on the clock of ``time.monotonic_ns``, or a timed event of the device, which has one when it is complete."""


class Trace:
    """Start, end and memory of each instruction of a run, or of several; see
    :class:`onebox.wire.protocol.requests.Run` for their definitions.

    On an asynchronous device, whose host runs ahead of it, the times are those of events in the device's work.

    Args:
        meter: The memory whose bytes are recorded; ``None`` for a disabled trace.
        accelerator: The device.
        clock: Time on a device that is not asynchronous.
    """

    def __init__(
        self,
        meter: PeakMeter | None = None,
        accelerator: Accelerator | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.used_bytes: list[int] = []
        self._meter = meter
        self._accelerator = accelerator if accelerator is not None and accelerator.asynchronous else None
        self._now: Callable[[], Moment] = clock
        if self._accelerator is not None:
            self._now = functools.partial(reached, self._accelerator)
        self._times: list[Moment | tuple[Moment, ...]] = []  # of several the latest counts
        self._until_ns = 0
        self._running = False
        self._peak_before = 0
        self._closed = False

    @property
    def enabled(self) -> bool:
        """True if it records something."""
        return self._meter is not None

    def begin(self) -> None:
        """Record the start of an instruction."""
        meter = self._meter
        self._closed = False
        if meter is not None:
            self._times.append(self._now())
            self._until_ns = 0
            self._running = True
            self._peak_before, meter.peak_bytes = meter.peak_bytes, meter.used_bytes

    def ready(self) -> None:
        """Record that the inputs of the instruction are present, which is its effective start."""
        if self._running:
            self._times[-1] = self._now()

    def until(self, end_ns: int) -> None:
        """Record the arrival time of the instruction's sends, which may be later than its end."""
        self._until_ns = end_ns

    def end(self) -> None:
        """Record the end of the instruction: the time, its peak, and the bytes in use after it."""
        meter = self._meter
        if meter is not None:
            now, until_ns = self._now(), self._until_ns
            self._times.append(_latest(now, until_ns) if until_ns else now)
            self._running = False
            peak_bytes = meter.peak_bytes
            self.used_bytes += (peak_bytes, meter.used_bytes)
            meter.peak_bytes = max(peak_bytes, self._peak_before)

    def later(self) -> Callable[[Moment], None]:
        """Return a function that records the completion of the instruction's asynchronous work after its end; called
        several times, the latest counts.
        """
        times, place = self._times, len(self._times)
        ends: Moment | tuple[Moment, ...] = 0

        def done(at: Moment) -> None:
            nonlocal ends
            if 0 < place < len(times) and not self._closed:
                if isinstance(at, int) and self._accelerator is not None:
                    at = self._now()  # the host does not wait for the device: it is here when the device's work is
                ends = _latest(ends, at)
                times[place] = _latest(times[place - 1], ends)

        return done

    def close(self) -> None:
        """End the run: what completes before a further one begins is not recorded."""
        self._closed = True

    def times_ns(self) -> tuple[int, ...]:
        """Return start and end of each instruction, when the device's work is complete."""
        if self._accelerator is None:
            return tuple(cast("list[int]", self._times))
        found = [max(map(moment_ns, each)) if isinstance(each, tuple) else moment_ns(each) for each in self._times]
        for place in range(1, len(found), 2):
            found[place] = max(found[place - 1], found[place])
        return tuple(found)


def reached(accelerator: Accelerator) -> Event:
    """Mark the present place in an asynchronous device's work."""
    return accelerator.current().record(timed=True)


def moment_ns(moment: Moment) -> int:
    """Return the time of a moment, of an event that is complete."""
    return moment if isinstance(moment, int) else moment.time_ns()


def _latest(one: Moment | tuple[Moment, ...], other: Moment | tuple[Moment, ...]) -> Moment | tuple[Moment, ...]:
    """Return the later one of two times; both, where one is not known yet."""
    if isinstance(one, int) and isinstance(other, int):
        return max(one, other)
    return (*(one if isinstance(one, tuple) else (one,)), *(other if isinstance(other, tuple) else (other,)))
