"""Asynchronous copies between a device and the host's memory, parallel to the device's work.

A CPU uses a separate thread, which copies outside of Python's lock; a GPU uses two streams, one for each direction.
Copies are made in the order of their requests, so that a
later copy may overwrite the source of an earlier one.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from onebox.worker.accelerator import Accelerator, Event
from onebox.worker.faults import FaultInjector
from onebox.worker.progress import Moment

WAIT_S = 300.0
"""Longest duration of a copy; after that it has failed."""

_JOIN_S = 5.0


class PendingCopy(Protocol):
    """A copy in progress."""

    def wait(self) -> Moment:
        """Order the device's next work after the copy; return the time of its completion, as far as that is known.

        Raises:
            RuntimeError: It failed.
        """

    def finish(self) -> None:
        """Wait on the host until it is complete.

        Raises:
            RuntimeError: It failed.
        """

    def order(self) -> None:
        """Order the device's next work after the copy, which may have failed."""


class AsyncCopier(Protocol):
    """Copies between a device and the host."""

    def block(self, size_bytes: int) -> Tensor:
        """Return new host memory, as bytes."""

    def move(self, source: Tensor, target: Tensor, *, back: bool = False) -> PendingCopy:
        """Begin to copy bytes to a destination of equal size.

        Args:
            source: Bytes on the device.
            target: A block of host memory.
            back: Whether the direction is reversed.
        """

    def settle(self) -> None:
        """Order the device's next work after all copies."""

    def close(self) -> None:
        """Stop copying; copies in progress may stay incomplete."""


def copier_for(accelerator: Accelerator, faults: FaultInjector) -> AsyncCopier:
    """Return the copier for a device.

    Args:
        accelerator: The device.
        faults: Faults to inject, for tests.
    """
    return StreamCopier(accelerator) if accelerator.asynchronous else ThreadCopier(faults)


class _Job:
    """A copy for the thread; holds both tensors until then."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self.tensors: tuple[Tensor, Tensor] | None = (source, target)
        self.done = threading.Event()
        self.failure = ""
        self.at_ns = 0

    def end(self, failure: str = "") -> None:
        """Complete it."""
        self.failure = failure
        self.at_ns = time.monotonic_ns()
        self.tensors = None
        self.done.set()

    def wait(self) -> int:
        if not self.done.wait(WAIT_S):
            raise RuntimeError(f"a copy between the device and the host's memory did not end within {WAIT_S:.0f} s")
        if self.failure:
            raise RuntimeError(f"a copy between the device and the host's memory failed: {self.failure}")
        return self.at_ns

    def finish(self) -> None:
        self.wait()

    def order(self) -> None:
        pass  # copies keep their tensors alive, and run in order


class ThreadCopier:
    """Copies within the host's memory by one thread, started at the first copy.

    Args:
        faults: Faults to inject, for tests.
    """

    def __init__(self, faults: FaultInjector) -> None:
        self._faults = faults
        self._cores = os.sched_getaffinity(0)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _Job | None = None
        self._closed = False

    def block(self, size_bytes: int) -> Tensor:
        """Return new memory."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def move(self, source: Tensor, target: Tensor, *, back: bool = False) -> PendingCopy:
        """Begin to copy bytes."""
        job = _Job(source, target)
        if self._closed:
            job.end("the worker ends")
            return job
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="onebox-transfer", daemon=True)
            self._thread.start()
        self._last = job
        self._jobs.put(job)
        return job

    def settle(self) -> None:
        """Wait for all copies."""
        last, self._last = self._last, None
        if last is not None:
            last.done.wait(WAIT_S)

    def close(self) -> None:
        """End the thread after its present copy."""
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_JOIN_S)
            self._thread = None

    def _work(self) -> None:
        with suppress(OSError):
            os.sched_setaffinity(0, self._cores)  # all cores of the worker, whichever the computing threads use
        while (job := self._jobs.get()) is not None:
            try:
                self._copy(job)
                job.end()
            except Exception as error:  # raised to the waiting caller
                job.end(str(error) or type(error).__name__)
            del job  # hold no tensors while idle

    def _copy(self, job: _Job) -> None:
        if self._closed:
            raise RuntimeError("the worker ends")
        self._faults.at("moving")
        assert job.tensors is not None
        source, target = job.tensors
        # One call outside of Python's lock: PyTorch's own copy would start threads from this one, and libc's bypasses
        # the caches for large copies.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


class StreamCopy:
    """A copy on a stream of its own."""

    def __init__(self, accelerator: Accelerator, event: Event) -> None:
        self.event = event
        self._accelerator = accelerator

    def wait(self) -> Moment:
        """Order the device's next work after the copy; return its event."""
        self.order()
        return self.event

    def finish(self) -> None:
        """Wait on the host until it is complete."""
        self.event.synchronize()

    def order(self) -> None:
        """Order the device's next work after the copy."""
        self._accelerator.current().wait(self.event)

    def over(self) -> bool:
        """Return whether it is complete."""
        return self.event.query()


class CopyStream:
    """Copies between a device and pinned memory, on one stream, parallel to the device's work and in their order.

    Args:
        accelerator: The device.
        yields: Whether a thread that waits for a copy yields its core, which wakes it later.
    """

    def __init__(self, accelerator: Accelerator, *, yields: bool = False) -> None:
        self.stream = accelerator.stream()
        self._accelerator = accelerator
        self._yields = yields

    def follow(self) -> None:
        """Order the next copies after the device's present work."""
        self.stream.wait_stream(self._accelerator.current())

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], *, hold: bool = False) -> StreamCopy:
        """Begin to copy tensors.

        Args:
            pairs: Each source with its target.
            hold: Whether the memory of sources on the device must not be reused before; else the caller keeps them.
        """
        with self._accelerator.on(self.stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
                if hold:
                    self._accelerator.keep(source, self.stream)
        return StreamCopy(self._accelerator, self.stream.record(timed=True, yields=self._yields))

    def settle(self) -> None:
        """Order the device's next work after all copies."""
        self._accelerator.current().wait_stream(self.stream)


class StreamCopier:
    """Copies between a device and pinned memory, with one stream for each direction.

    Args:
        accelerator: The device.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._streams: dict[bool, CopyStream] = {}
        self._uses: dict[int, StreamCopy] = {}  # the last copy from or to each block of the host, by address

    def block(self, size_bytes: int) -> Tensor:
        """Return new pinned memory."""
        return self._accelerator.pinned(size_bytes)

    def move(self, source: Tensor, target: Tensor, *, back: bool = False) -> PendingCopy:
        """Begin to copy bytes, ordered after the device's earlier work."""
        if back not in self._streams:
            self._streams[back] = CopyStream(self._accelerator)
        stream, block = self._streams[back], (source if back else target).data_ptr()
        stream.follow()
        if block in self._uses:
            stream.stream.wait(self._uses[block].event)
        self._uses[block] = copy = stream.copy([(source, target)])
        return copy

    def settle(self) -> None:
        """Order the device's next work after all copies."""
        for stream in self._streams.values():
            stream.settle()

    def close(self) -> None:
        """Do nothing: streams end with the process."""
