"""How bytes go between a device and the host's memory, beside the work of the device.

On a CPU by a thread of its own, which copies outside of Python's lock; on a GPU by two streams, one in each direction;
on a device without values not at all, in as much time as it would take a GPU. Copies are made in the order in which
they are asked for, so that what a copy has read may be overwritten by the next one.
"""

from __future__ import annotations

import ctypes
import math
import os
import queue
import threading
import time
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from onebox.cost import ACCELERATOR_BPS
from onebox.worker.faults import FaultInjector
from onebox.worker.progress import WorkerProgress, wait_until

WAIT_S = 300.0
"""A copy that has not ended by then never will."""

_JOIN_S = 5.0


class PendingCopy(Protocol):
    """A copy that is being made."""

    def wait(self) -> int:
        """Let what the device does next come behind the copy; return since when it is known to be made.

        Raises:
            RuntimeError: It failed.
        """

    def finish(self) -> None:
        """Wait until it is made, on the host.

        Raises:
            RuntimeError: It failed.
        """

    def order(self) -> None:
        """Let nothing that the device does next overtake the copy, which may have failed."""


class AsyncCopier(Protocol):
    """Copies between a device and the host."""

    def block(self, size_bytes: int) -> Tensor:
        """Return new memory of the host, as bytes."""

    def move(self, source: Tensor, target: Tensor, *, back: bool = False) -> PendingCopy:
        """Begin to copy bytes to where there are as many.

        Args:
            source: On the device.
            target: A block of the host.
            back: Whether it is the other way round.
        """

    def settle(self) -> None:
        """Let what the device does next come behind all copies."""

    def close(self) -> None:
        """End what copies; what has begun may stay unfinished."""


def copier_for(device: torch.device, faults: FaultInjector, progress: WorkerProgress) -> AsyncCopier:
    """Return what copies to and from a device.

    Args:
        device: The device.
        faults: Faults to inject, for tests.
        progress: Told when the worker sleeps for a copy that is not made.
    """
    if device.type == "cuda":
        return StreamCopier(device)
    return EmulatedCopier(progress) if device.type == "meta" else ThreadCopier(faults)


class EmulatedCopier:
    """Moves nothing, for tensors without elements, and lets that last: at :data:`ACCELERATOR_BPS`, one after the other
    in each direction.

    Args:
        progress: Told when the worker sleeps for it.
    """

    def __init__(self, progress: WorkerProgress) -> None:
        self._progress = progress
        self._free_ns = {False: 0, True: 0}

    def block(self, size_bytes: int) -> Tensor:
        """Return as many bytes, without elements."""
        return torch.empty(size_bytes, dtype=torch.uint8, device="meta")

    def move(self, source: Tensor, target: Tensor, *, back: bool = False) -> PendingCopy:
        """Return what will be made in so much time."""
        begin_ns = max(self._free_ns[back], time.monotonic_ns())
        self._free_ns[back] = begin_ns + math.ceil(source.numel() / ACCELERATOR_BPS * 1e9)
        return _Due(self._free_ns[back], self._progress)

    def settle(self) -> None:
        """There is nothing to be read by a copy."""

    def close(self) -> None:
        """Nothing is open."""


class _Due:
    """A copy that is made at a time."""

    def __init__(self, at_ns: int, progress: WorkerProgress) -> None:
        self._at_ns = at_ns
        self._progress = progress

    def wait(self) -> int:
        wait_until(self._at_ns, self._progress)
        return self._at_ns

    def finish(self) -> None:
        self.wait()

    def order(self) -> None:
        pass


class _Job:
    """A copy that a thread makes; holds both tensors until then."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self.tensors: tuple[Tensor, Tensor] | None = (source, target)
        self.done = threading.Event()
        self.failure = ""
        self.at_ns = 0

    def wait(self) -> int:
        if not self.done.wait(WAIT_S):
            raise RuntimeError(f"a copy between the device and the host's memory did not end within {WAIT_S:.0f} s")
        if self.failure:
            raise RuntimeError(f"a copy between the device and the host's memory failed: {self.failure}")
        return self.at_ns

    def finish(self) -> None:
        self.wait()

    def order(self) -> None:
        pass  # copies keep what they read and write alive, and are made in their order


class ThreadCopier:
    """Copies within the host's memory, by one thread, which begins with the first copy.

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
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="onebox-transfer", daemon=True)
            self._thread.start()
        self._last = job = _Job(source, target)
        self._jobs.put(job)
        return job

    def settle(self) -> None:
        """Wait for all copies."""
        last, self._last = self._last, None
        if last is not None:
            last.done.wait(WAIT_S)

    def close(self) -> None:
        """End the thread behind the copy that it is at."""
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_JOIN_S)
            self._thread = None

    def _work(self) -> None:
        with suppress(OSError):
            os.sched_setaffinity(0, self._cores)  # all of the worker's, whichever those are of who computes
        while (job := self._jobs.get()) is not None:
            try:
                self._copy(job)
            except Exception as error:  # whoever waits hears of it
                job.failure = str(error) or type(error).__name__
            job.at_ns = time.monotonic_ns()
            job.tensors = None
            job.done.set()
            del job  # nothing is held while there is nothing to do

    def _copy(self, job: _Job) -> None:
        if self._closed:
            raise RuntimeError("the worker ends")
        self._faults.at("moving")
        assert job.tensors is not None
        source, target = job.tensors
        # One call, outside of Python's lock: PyTorch's own copy would begin threads of its own in this one, and libc's
        # goes past the caches where there is much to copy.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


class _Event:
    """A copy on a stream of its own."""

    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device = device
        self._event = event

    def wait(self) -> int:
        self.order()
        return time.monotonic_ns()

    def finish(self) -> None:
        self._event.synchronize()

    def order(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class StreamCopier:
    """Copies between a GPU and pinned memory, by a stream in each direction.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[bool, torch.cuda.Stream] = {}
        self._uses: dict[int, torch.cuda.Event] = {}  # the last copy from or to each block of the host, by its address

    def block(self, size_bytes: int) -> Tensor:
        """Return new pinned memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def move(self, source: Tensor, target: Tensor, *, back: bool = False) -> PendingCopy:
        """Begin to copy bytes, behind what the device has been given to do so far."""
        if back not in self._streams:
            self._streams[back] = torch.cuda.Stream(self._device)
        stream, block = self._streams[back], (source if back else target).data_ptr()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if block in self._uses:
            stream.wait_event(self._uses[block])
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            self._uses[block] = event = stream.record_event()
        return _Event(self._device, event)

    def settle(self) -> None:
        """Let what the device does next come behind all copies."""
        for stream in self._streams.values():
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def close(self) -> None:
        """Streams end with the process."""
