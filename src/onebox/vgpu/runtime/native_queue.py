"""The command queue of a device in C++, which records the calls itself, and the thread that sends what waits."""

from __future__ import annotations

import contextlib
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from onebox.errors import OneboxError
from onebox.pool import Pool
from onebox.portable import Wakeup
from onebox.vgpu import native
from onebox.vgpu.runtime.command_queue import BYTES, CACHED_OPS, IDLE_S, Buffer, CommandQueue, RecordedOp
from onebox.vgpu.runtime.request_channel import ScriptErrors
from onebox.vgpu.signals import shielded
from onebox.wire.protocol.requests import Instruction


class NativeCommandQueue(CommandQueue):
    """A command queue whose calls are recorded in C++.

    Args:
        pool: The pool.
        worker: The number of the device in it.
        ring: Called when an instruction waits, so that it is sent when idle.
        errors: The failures that the script has been told of.
    """

    def __init__(self, pool: Pool, worker: int, ring: Any, errors: ScriptErrors | None = None) -> None:
        self._synchronous = False
        self.native: Any = None
        super().__init__(pool, worker, ring, errors)
        self.native = native.load().Queue(worker, self._next, CACHED_OPS)
        self.native.owner = self
        self.views: dict[Any, RecordedOp] = {}
        """The kernels that make a buffer of a view, by its layout and that in its buffer."""
        self._once: list[int] = []  # kernels of calls that are not repeated
        self._limit()

    @property
    def used(self) -> bool:
        """True if an operator has had a result on the device."""
        return int(self.native.reserve(0)) > self._begin

    @property
    def synchronous(self) -> bool:
        """Whether every operator is waited for."""
        return self._synchronous

    @synchronous.setter
    def synchronous(self, on: bool) -> None:
        self._synchronous = on
        self._limit()

    def write_before_use(self, write: Callable[[], None]) -> None:
        """Have a function called before the next use of the device; C++ asks Python before a call only then."""

        def counted() -> None:
            try:
                write()
            finally:
                self.native.add_due(-1)

        self.native.add_due(1)
        super().write_before_use(counted)

    def define(self, op: RecordedOp) -> None:
        """Send a kernel before its first call."""
        with self.lock:
            if not op.number:
                self._define(op)

    def forget(self, op: RecordedOp) -> None:
        """Free a kernel after its only call, which has been recorded."""
        with self.lock:
            self._once.append(op.number)

    @shielded
    def record(self, op: RecordedOp, inputs: list[int], floats: list[float]) -> int:
        """Record a call and return the number of its first output."""
        self.define(op)
        first, full = self.native.record(op.number, inputs, floats, op.keeps, op.allocates)
        if full:
            self.flush(wait=self.synchronous)
        return int(first)

    def send_full(self) -> None:
        """Send the recorded calls, of which there are enough, or wait for the only one."""
        self.flush(wait=self.synchronous)

    def new_number(self) -> int:
        """Return the number of a buffer that is not filled by a call."""
        return int(self.native.reserve(1))

    @shielded
    def before(self, instruction: Instruction, frames: Sequence[Any] = ()) -> None:
        """Send an instruction before the recorded calls; it fills buffers that none of them uses."""
        with self.lock:
            if not self._first:
                self._ring(self)
            self._first.append((instruction, frames))
            self._frame_bytes += sum(len(frame) for frame in frames)
            full = self._frame_bytes > BYTES
        if full:
            self.flush()

    def fresh(self, number: int) -> bool:
        """Return whether a buffer is merely allocated, unused so far, and may be filled by the client."""
        return bool(self.native.fresh(number))

    @shielded
    def follow(self) -> None:
        """Note that this process has another default element type, on which results of operators depend."""
        self.flush(pace=False)
        self.native.forget()
        with self.lock:
            self._default_type = torch.get_default_dtype()

    def _reserve(self, count: int) -> int:
        return int(self.native.reserve(count))

    def _taken(self, handles: Sequence[Buffer]) -> tuple[int, ...]:
        return ()

    def _take(self) -> list[Instruction]:
        code, inputs, outputs, strays, floats = map(tuple, self.native.take())
        return self._batches.replayed(code, inputs, outputs, strays, floats) if code or strays else []

    def _take_ended(self) -> tuple[int, ...]:
        once, self._once = self._once, []
        return (*self.native.take_evicted(), *self.native.take_ended_generators(), *once)

    def _limit(self) -> None:
        if self.native is not None:
            self.native.set_most_calls(1 if self._synchronous else self._size)

    @property
    def _waiting(self) -> bool:
        return bool(self.native.calls or self._first)

    @property
    def waiting_calls(self) -> int:
        """The number of recorded calls, and of other instructions, that have not been sent."""
        return int(self.native.calls) + len(self._first)


class NativeIdleFlusher:
    """The thread that sends what a queue has recorded when no further operator comes."""

    def __init__(self) -> None:
        self._bell = Wakeup()
        self._over = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._queues: Callable[[], Iterable[Any]] = tuple

    def ring(self, queue: CommandQueue) -> None:
        """Note that a command queue has begun a batch."""
        self._bell.set()

    def start(self, queues: Callable[[], Iterable[Any]]) -> None:
        """Start the thread, if it does not run.

        Args:
            queues: Returns the queues that it looks after.
        """
        with self._lock:
            if self._thread is None:
                self._queues = queues
                native.load().set_bell(self._bell.entrance)
                self._thread = threading.Thread(target=self._run, name="onebox-idle", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """End the thread: a daemon that the interpreter stops during its own shutdown can crash the process."""
        self._over = True
        self._bell.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def after_fork(self) -> None:
        """Forget the thread, which a forked process lacks."""
        self.__init__()  # type: ignore[misc]

    def _run(self) -> None:
        poller = selectors.DefaultSelector()
        poller.register(self._bell.descriptor, selectors.EVENT_READ)
        while not self._over:
            poller.select()
            self._bell.clear()
            waits = True
            while waits and not self._over:
                seen = {queue: queue.waiting_calls for queue in self._queues()}
                time.sleep(IDLE_S)
                waits = False
                for queue, calls in seen.items():
                    if queue.waiting_calls != calls:
                        waits = True
                    elif calls:
                        with contextlib.suppress(OneboxError):  # the next use of the device raises the error
                            queue.flush(pace=False)


__all__ = ["NativeCommandQueue", "NativeIdleFlusher"]
