"""Streams and events of a modelled accelerator, and the scheduler of their kernels.

A kernel runs when the host waits for it, not before; the order of kernels that nothing orders is drawn from a seed.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.kit.accelerator.happens_before import Access, AccessCheck, Clock, Race, Range, join

MOST_QUEUED = 20_000
"""Kernels that may be queued; a driver makes the host wait at about a thousand."""

KERNEL_NS = 2_000
"""Modelled duration of a kernel without data."""

BYTES_PER_NS = 1_000.0
"""Modelled bandwidth of kernels."""

LINK_BYTES_PER_NS = 20.0
"""Modelled bandwidth of copies to and from the host."""

_HERE = str(Path(__file__).parent)
_OUTSIDE = ("/torch/", "<frozen", "/contextlib.py")


class ModelledFailure(RuntimeError):
    """A race or a failed kernel, raised where the host waits for the device."""


@dataclass(eq=False)
class Kernel:
    """A queued kernel.

    Args:
        name: Its operator.
        reads: Bytes that it reads.
        writes: Bytes that it writes.
        run: Makes it.
        link: Whether it is a copy to or from the host.
        keeps: Objects that live until it has run, such as pinned memory.
    """

    name: str
    reads: Sequence[Range]
    writes: Sequence[Range]
    run: Callable[[], object]
    link: bool = False
    keeps: Sequence[object] = ()

    @property
    def duration_ns(self) -> int:
        """Modelled duration."""
        moved = sum(end - start for start, end in (*self.reads, *self.writes))
        return KERNEL_NS + round(moved / (LINK_BYTES_PER_NS if self.link else BYTES_PER_NS))


@dataclass(eq=False)
class _Context:
    """A stream or the host, with its number, its step and its clock."""

    number: int
    clock: Clock = field(default_factory=dict)

    def step(self) -> int:
        """Begin the next step, and return its number."""
        number = self.clock.get(self.number, 0) + 1
        self.clock[self.number] = number
        return number


class ModelEvent:
    """A place in the order of a stream; see :class:`onebox.worker.accelerator.interface.Event`."""

    def __init__(self, scheduler: Scheduler, stream: ModelStream, clock: Clock, at_ns: int) -> None:
        self.stream = stream
        self.position = stream.launched
        self.clock = clock
        self._scheduler = scheduler
        self._at_ns = at_ns

    @property
    def complete(self) -> bool:
        """True if the kernels before it have run, and the events that its stream waited for before are complete."""
        return self.stream.done >= self.position

    def query(self) -> bool:
        """Return whether it is complete; a random kernel may run before."""
        return self._scheduler.query(self)

    def synchronize(self) -> None:
        """Wait until it is complete.

        Raises:
            ModelledFailure: There was a race, or a kernel failed.
        """
        self._scheduler.wait_for(self)

    def time_ns(self) -> int:
        """Return its modelled time, on the clock of ``time.monotonic_ns``."""
        return self._at_ns


class ModelStream:
    """A queue of kernels; see :class:`onebox.worker.accelerator.interface.DeviceStream`."""

    def __init__(self, scheduler: Scheduler, number: int) -> None:
        self.number = number
        self.context = _Context(number)
        self.queue: deque[Kernel | ModelEvent] = deque()
        self.launched = 0
        self.done = 0
        self.free_ns = 0
        self._scheduler = scheduler

    def record(self, *, timed: bool = False, yields: bool = False) -> ModelEvent:
        """Return an event after the work so far."""
        return self._scheduler.record(self)

    def wait(self, event: Any) -> None:
        """Order later work after an event."""
        self._scheduler.order(self, event)

    def wait_stream(self, other: Any) -> None:
        """Order later work after the present work of another stream."""
        self.wait(other.record())

    def synchronize(self) -> None:
        """Wait on the host for the work so far."""
        self.record().synchronize()


class Scheduler:
    """The streams of a device, their kernels, and the check of their accesses.

    Args:
        seed: Decides the order of kernels that nothing orders, and how many run before they must.
    """

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self.check = AccessCheck()
        self.races: list[Race] = []
        self.launches = 0
        self.synchronisations = 0
        self._random = random.Random(seed)
        self._eagerness = (0.0, 0.2, 0.5, 0.8)[seed % 4]
        self._streams: list[ModelStream] = []
        self._numbers = 0
        self._host = _Context(self._next())  # of all threads: how they hand work to each other is not seen
        self._failure = ""
        self._told: set[tuple[str, str]] = set()
        self._local = threading.local()
        self.capturing: list[Kernel] | None = None
        """Kernels that a thread captures instead of queueing them; other threads go on."""
        self._capturing_thread = 0
        self.default = self.stream()

    # ---- streams

    def stream(self) -> ModelStream:
        """Return a new stream."""
        with self.lock:
            made = ModelStream(self, self._next())
            self._streams.append(made)
        return made

    def current(self) -> ModelStream:
        """Return the stream of this thread."""
        return getattr(self._local, "stream", self.default)

    @contextmanager
    def on(self, stream: ModelStream) -> Iterator[None]:
        """Direct the work of this thread to a stream."""
        before = self.current()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def record(self, stream: ModelStream) -> ModelEvent:
        """Return an event after the work of a stream so far."""
        with self.lock:
            host, clock = self._host, dict(stream.context.clock)
            join(clock, host.clock)
            host.step()
            return ModelEvent(self, stream, clock, max(stream.free_ns, time.monotonic_ns()))

    def order(self, stream: ModelStream, event: ModelEvent) -> None:
        """Order later work of a stream after an event."""
        with self.lock:
            join(stream.context.clock, event.clock)
            stream.free_ns = max(stream.free_ns, event.time_ns())
            stream.queue.append(event)
            stream.launched += 1
            self._pass_waits()

    @contextmanager
    def capture(self, stream: ModelStream) -> Iterator[list[Kernel]]:
        """Capture the kernels of this thread instead of queueing them.

        Args:
            stream: The stream of the context, which nothing else uses.
        """
        if self.capturing is not None:
            raise RuntimeError("another capture is under way")
        with self.on(stream):
            kernels: list[Kernel] = []
            self.capturing, self._capturing_thread = kernels, threading.get_ident()
            try:
                yield kernels
            finally:
                self.capturing = None

    def captures(self) -> bool:
        """Return whether this thread captures kernels."""
        return self.capturing is not None and self._capturing_thread == threading.get_ident()

    def _require_no_capture(self) -> None:
        if self.captures():
            raise RuntimeError("the host cannot wait for the device while it captures work")

    # ---- kernels

    def launch(self, kernel: Kernel, *, counted: bool = True) -> ModelEvent:
        """Queue a kernel on this thread's stream, or capture it; return the event after it."""
        with self.lock:
            stream, host = self.current(), self._host
            if self.captures():
                assert self.capturing is not None
                self.capturing.append(kernel)
                return ModelEvent(self, stream, dict(stream.context.clock), stream.free_ns)
            join(stream.context.clock, host.clock)
            access = Access(
                stream.number, stream.context.step(), f"{kernel.name} (stream {stream.number}, {_caller()})"
            )
            host.step()
            self._accessed(kernel.reads, kernel.writes, access, stream.context.clock)
            stream.free_ns = max(stream.free_ns, time.monotonic_ns()) + kernel.duration_ns
            stream.queue.append(kernel)
            stream.launched += 1
            self.launches += counted
            if sum(each.launched - each.done for each in self._streams) > MOST_QUEUED:
                self._run_until(lambda: False, [each for each in self._streams if each.queue])
            return ModelEvent(self, stream, dict(stream.context.clock), stream.free_ns)

    def touch(self, reads: Sequence[Range], writes: Sequence[Range], name: str) -> None:
        """Record an access by the host."""
        with self.lock:
            host = self._host
            self._accessed(reads, writes, Access(host.number, host.step(), f"{name} (host, {_caller()})"), host.clock)

    def release(self, place: Range) -> None:
        """Note that memory of the host is given back, or is no longer page-locked."""
        with self.lock:
            for stream in self._streams:
                for kernel in stream.queue:
                    if isinstance(kernel, Kernel) and any(
                        start < place[1] and place[0] < end for start, end in (*kernel.reads, *kernel.writes)
                    ):
                        host = self._host
                        first = Access(stream.number, 0, f"{kernel.name} (stream {stream.number})")
                        self._note(
                            Race(first, Access(host.number, 0, f"release (host, {_caller()})"), "release", place[0])
                        )
            self.check.forget(place)

    # ---- waits of the host

    def query(self, event: ModelEvent) -> bool:
        """Return whether an event is complete; what it needs may advance by a kernel."""
        with self.lock:
            if not event.complete and self._random.random() < 0.5:
                self._advance([event.stream])
            if event.complete:
                join(self._host.clock, event.clock)
            return event.complete

    def wait_for(self, event: ModelEvent) -> None:
        """Run what an event needs.

        Raises:
            ModelledFailure: There was a race, or a kernel failed.
        """
        self._require_no_capture()
        with self.lock:
            self.synchronisations += 1
            self._run_until(lambda: event.complete, [event.stream])
            join(self._host.clock, event.clock)
        self.raise_failure()

    def synchronize(self) -> None:
        """Run all kernels.

        Raises:
            ModelledFailure: There was a race, or a kernel failed.
        """
        self._require_no_capture()
        with self.lock:
            self.synchronisations += 1
            streams = list(self._streams)
            events = [self.record(stream) for stream in streams]
            self._run_until(lambda: all(event.complete for event in events), streams)
            for stream in streams:
                join(self._host.clock, stream.context.clock)
        self.raise_failure()

    def acquire(self, clock: Clock) -> None:
        """Order the host after what it has seen complete."""
        with self.lock:
            join(self._host.clock, clock)

    def raise_failure(self) -> None:
        """Raise a failure that the host has not seen.

        Raises:
            ModelledFailure: There was a race, or a kernel failed.
        """
        if self._failure:
            raise ModelledFailure(self._failure)

    # ---- internals

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    def _accessed(self, reads: Sequence[Range], writes: Sequence[Range], access: Access, clock: Clock) -> None:
        for place in reads:
            for race in self.check.read(place, access, clock):
                self._note(race)
        for place in writes:
            for race in self.check.write(place, access, clock):
                self._note(race)

    def _note(self, race: Race) -> None:
        key = race.first.label, race.second.label
        if key not in self._told:
            self._told.add(key)
            self.races.append(race)
            self._failure = self._failure or str(race)

    def _run_until(self, done: Callable[[], bool], needed: Sequence[ModelStream]) -> None:
        while not done() and self._advance(needed):
            if self._random.random() < self._eagerness:
                self._advance([self._random.choice(self._streams)])

    def _advance(self, wanted: Sequence[ModelStream]) -> bool:
        """Run one kernel that streams need next; return whether there was one."""
        ready: list[ModelStream] = []
        seen: set[ModelStream] = set()
        left = list(wanted)
        while left:
            stream = left.pop()
            if stream in seen:
                continue
            seen.add(stream)
            if not stream.queue:
                continue
            first = stream.queue[0]
            if isinstance(first, Kernel):
                ready.append(stream)
            else:
                left.append(first.stream)
        if not ready:
            return False
        self._run_first(self._random.choice(ready))
        return True

    def _run_first(self, stream: ModelStream) -> None:
        kernel = stream.queue.popleft()
        assert isinstance(kernel, Kernel)
        try:
            with (
                torch.inference_mode(),
                _disable_current_modes(),
            ):  # accesses by kernels were noted when they were launched
                kernel.run()
        except Exception as error:  # raised where the host waits, as of a real device
            self._failure = self._failure or f"{kernel.name} failed on the device: {error}"
        stream.done += 1
        self._pass_waits()

    def _pass_waits(self) -> None:
        """Let streams pass over waits for what is complete, by which other events may become complete."""
        changed = True
        while changed:
            changed = False
            for stream in self._streams:
                while stream.queue and isinstance(stream.queue[0], ModelEvent) and stream.queue[0].complete:
                    stream.queue.popleft()
                    stream.done += 1
                    changed = True


def _caller() -> str:
    """Return file and line of the innermost caller outside of PyTorch and the model."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_HERE) and not any(part in name for part in _OUTSIDE):
            return f"{'/'.join(Path(name).parts[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


__all__ = ["Kernel", "ModelEvent", "ModelStream", "ModelledFailure", "Scheduler"]
