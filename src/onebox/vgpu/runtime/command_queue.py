"""The command queue of one virtual device, whose operators C++ records, and the thread that sends what waits.

Operators are sent in batches, without waiting: after :data:`CALLS` of them, when a value is read, after an
optimizer's step, and when nothing has come for :data:`IDLE_S`. A batch is a tape on the worker, defined at its first
occurrence and run by number.
"""

from __future__ import annotations

import contextlib
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from onebox.errors import OneboxError, PoolError
from onebox.pool import Pool, WorkerReply
from onebox.pool.streams.message_log import stream_end
from onebox.portable import Wakeup
from onebox.vgpu import native
from onebox.vgpu.runtime.batcher import Batcher
from onebox.vgpu.runtime.request_channel import RequestChannel, ScriptErrors, SentMessage
from onebox.vgpu.runtime.script_time import ScriptTime
from onebox.vgpu.runtime.upload_packing import UploadPacking
from onebox.vgpu.signals import shielded
from onebox.wire import KernelSpec, SlotArgument, TensorSpec
from onebox.wire.protocol.eager import BoundMemory, Perform, SetGenerator
from onebox.wire.protocol.instructions import Ask, Call, Free, Get
from onebox.wire.protocol.requests import Define, Instruction
from onebox.wire.protocol.responses import FilledSlots, OperatorResult, Scalars, Tensors

CALLS = 64
"""Calls of a batch, whatever it frees: few enough that a worker starts early, many enough that a message is cheap."""

SOON = 32
"""Calls of the first batch after a wait, when the worker is idle; each next batch has twice as many. So boundaries
depend on the script alone, and batches repeat."""

BYTES = 256 << 10
"""Bytes of new tensors after which a batch is sent, so that they are transferred while the client goes on."""

IDLE_S = 0.001
"""How long a record may wait for the next one."""

KNOWN_CALLS = 1 << 16
"""The most kinds of calls that a device remembers."""

CACHED_VIEWS = 1 << 12
"""The most kernels that make buffers of views."""

FIRST_SEED = 67280421310721
"""The default seed; PyTorch's own value."""

RETURNS = 1 << 20
"""Numbers that are reserved for the returns of one operator."""

_FORKED = (
    "a forked process, such as a worker of a DataLoader, cannot use tensors that its parent has on virtual devices; "
    "give it tensors of the host (tensor.cpu()), and move to a device what comes from it, or use num_workers=0"
)

_probe = [object()]
ALONE = sys.getrefcount(_probe[0])
"""Reference count of an object that only one other references."""


class Buffer(Protocol):
    """The owner of a buffer on a worker."""

    number: int
    queue: CommandQueue

    def is_alone(self) -> bool:
        """Return whether nothing but this owner references the buffer."""


class RecordedOp:
    """A kind of call that a queue records: its kernel, and the counts that the queue needs.

    Args:
        kernel: The kernel for the worker.
        keeps: How many outputs of a call stay on the worker.
    """

    __slots__ = ("allocates", "inputs", "keeps", "kernel", "number")

    def __init__(self, kernel: KernelSpec, keeps: int) -> None:
        self.kernel = kernel
        self.inputs = kernel.inputs
        self.keeps = keeps
        self.allocates = kernel.name.startswith("aten.empty")
        """True if a call merely allocates its output."""
        self.number = 0
        """The kernel's number on the worker, set by the queue; 0 while the worker does not have the kernel."""


class CommandQueue:
    """The operators of one device, in the order in which the script issued them.

    Args:
        pool: The pool.
        worker: The number of the device in it.
        ring: Called when an instruction waits, so that it is sent when idle; C++ rings for calls.
        errors: The failures that the script has been told of.
        begin: Makes the queues in C++ of all devices of the pool; that of this one if ``None``.
        script_time: Where the script's time goes.
    """

    def __init__(
        self,
        pool: Pool,
        worker: int,
        ring: Any,
        errors: ScriptErrors | None = None,
        begin: Callable[[], None] | None = None,
        script_time: ScriptTime | None = None,
    ) -> None:
        self.pool = pool
        self.worker = worker
        self.device = torch.device("vgpu", worker)
        self._begin = begin or self.begin
        self._native: Any = None
        self.views: dict[Any, RecordedOp] = {}
        """The kernels that make a buffer of a view, by its layout and that in its buffer."""
        self.ended: deque[int] = deque()  # definitions of which nothing is left
        self.unwaited: deque[Callable[[], None]] = deque()  # writes of collectives whose works were collected
        self._writes = threading.RLock()  # taken before all other locks, and held while they are run
        self._writing = False
        self.channel = RequestChannel(pool, worker, errors or ScriptErrors(), script_time or ScriptTime())
        self.lock = self.channel.lock
        self.packing = UploadPacking(pool, worker)
        self._synchronous = False
        self.has_learned = False
        """True if an operator has been of a new kind, or on new shapes, since the last :meth:`synchronize`."""
        self.seed = FIRST_SEED
        self._ring = ring
        self._start: list[tuple[Instruction, Sequence[Any]]] = []  # what precedes the first use
        self._default_type: torch.dtype | None = None  # of this process, where the worker may have another one
        if pool.attached or torch.get_default_dtype() is not torch.float32:
            self._default_type = torch.get_default_dtype()
        if pool.attached:
            self._start.append((SetGenerator(0, FIRST_SEED), ()))
        self._bound: BoundMemory | None = None  # what is to be said of this process's memory there
        self.offloads, self.most_bytes = False, 0
        self._size = CALLS
        self._first: list[tuple[Instruction, Sequence[Any]]] = []  # instructions that precede the calls, with frames
        self._frame_bytes = 0
        self._batches = Batcher(pool.new_number)
        self.has_shared = False
        """True if another process may write to some buffers."""
        self._brought: dict[int, tuple[TensorSpec, Any]] = {}  # what the latest reply to a read has brought along
        self._brought_at: tuple[int, int] = (0, 0)
        self._asked: Get | None = None
        self._asked_time: SentMessage | None = None
        self._moment = 0
        self._forked = False

    @property
    def native(self) -> Any:
        """The queue in C++, which records operators; there is none before the first tensor of the device."""
        if self._native is None:
            self._begin()
        return self._native

    def begin(self) -> None:
        """Make the queue in C++."""
        made = native.load().Queue(self.worker, self.pool.first_buffer, KNOWN_CALLS)
        made.owner = self
        self._native = made
        self._limit()

    @property
    def begun(self) -> bool:
        """True once there may be tensors of the device."""
        return self._native is not None

    @property
    def has_rank(self) -> bool:
        """True if the device is a rank's, which may wait for other ranks."""
        return self.channel.of_rank

    @property
    def used(self) -> bool:
        """True if an operator has had a result on the device."""
        return self.begun and int(self.native.reserve(0)) > self.pool.first_buffer

    @property
    def synchronous(self) -> bool:
        """True while every operator is waited for."""
        return self._synchronous

    @synchronous.setter
    def synchronous(self, on: bool) -> None:
        self._synchronous = on
        self._limit()

    # ---- recording

    @shielded
    def record(self, op: RecordedOp, inputs: list[int], floats: list[float]) -> int:
        """Record a call and return the number of its first output."""
        self.define(op)
        first, full = self.native.record(op.number, inputs, floats, op.keeps, op.allocates)
        if full:
            self.send_full()
        return int(first)

    def send_full(self) -> None:
        """Send the recorded calls, of which there are enough, or wait for the only one."""
        self.flush(wait=self.synchronous)

    def limit_views(self) -> None:
        """Free the kernels of views where there are too many."""
        with self.lock:
            if len(self.views) >= CACHED_VIEWS:
                self.ended.extend(op.number for op in self.views.values())
                self.views.clear()

    def bound_memory(self, *, offload: bool | None = None, most_bytes: int | None = None) -> None:
        """Say what happens where a buffer finds no room, from the next message on.

        Args:
            offload: Whether buffers go to the host's memory; as before when ``None``.
            most_bytes: The most bytes of buffers; 0 for the worker's quota, as before when ``None``.
        """
        with self.lock:
            self.offloads = self.offloads if offload is None else offload
            self.most_bytes = self.most_bytes if most_bytes is None else most_bytes
            first = self.pool.first_buffer
            self._bound = BoundMemory(first, stream_end(first), self.offloads, self.most_bytes)

    def define(self, op: RecordedOp) -> None:
        """Send a kernel before its first call."""
        with self.lock:
            if not op.number:
                self._define(op)

    def _define(self, op: RecordedOp) -> None:
        """Send a kernel before its first call."""
        number = self.pool.new_number()
        self._first.append((Define(number, op.kernel), ()))
        op.number = number

    @shielded
    def call(self, program: int, handles: Sequence[Buffer], outputs: int) -> int:
        """Run a stored program after the recorded calls, and return the number of its first output.

        Args:
            program: Its number.
            handles: The buffers that it reads. One that nothing else references is freed by the call, so that the
                worker can reuse its memory after its last read.
            outputs: Number of its outputs.
        """
        with self.lock:
            first = self._reserve(outputs)
            takes = tuple(
                at for at in range(len(handles)) if sys.getrefcount(handles[at]) == ALONE and handles[at].is_alone()
            )
            made = tuple(range(first, first + outputs))
            numbers = tuple(handle.number for handle in handles)
            asked = [self._send([Call(program, numbers, made, takes)], (), awaited=self.synchronous)]
        if self.synchronous:
            self.channel.answer(asked.pop())
        else:
            self.channel.pace()
        return first

    def read_on_worker(self, buffers: Sequence[int]) -> None:
        """Make the worker wait for the content of buffers that it receives in the background."""
        if buffers:
            reading = RecordedOp(KernelSpec("aten.alias.default", (SlotArgument(0),), {}, 1, 0, (None,)), 0)
            for number in buffers:
                self.record(reading, [number], [])
            self.flush([Free((), (reading.number,))], pace=False)

    def new_number(self) -> int:
        """Return the number of a buffer that is not filled by a call."""
        return int(self.native.reserve(1))

    def _reserve(self, count: int) -> int:
        """Return the first of some numbers for buffers that the next instruction fills, which is no call."""
        self.native.interrupt()
        return int(self.native.reserve(count))

    @shielded
    def before(self, instruction: Instruction, frames: Sequence[Any] = ()) -> None:
        """Send an instruction before the recorded calls; it fills buffers that none of them uses.

        Unreferenced buffers are freed before it, where no call is recorded or much is sent, to make room.
        """
        size_bytes = sum(len(frame) for frame in frames)
        with self.lock:
            if self.begun and self.native.dead and (size_bytes > BYTES or not self.native.calls):
                self._first += [(each, ()) for each in self._take()]
            if not self._first:
                self._ring(self)
            self._first.append((instruction, frames))
            self._frame_bytes += size_bytes
            full = self._frame_bytes > BYTES
        if full:
            self.flush()

    def fresh(self, number: int) -> bool:
        """Return whether a buffer is merely allocated, unused so far, and may be filled by the client.

        The allocating call is taken back where it has not been sent; where the idle thread has sent it, the upload
        replaces the allocation.
        """
        return bool(self.native.fresh(number))

    def write_before_use(self, write: Callable[[], None]) -> None:
        """Let a write precede the next use of a tensor of the device, before which C++ asks Python only then; called in
        finalizers."""
        self.native.add_due(1)
        self.unwaited.append(write)

    @shielded
    def write_unwaited(self) -> None:
        """Write the results of collectives that nobody has waited for and whose works were collected, in order.

        Called before each use of a tensor of the device, by the thread that uses it: a finalizer, which may run where a
        lock is held or a call is half recorded, only enqueues the write.
        """
        with self._writes:  # another thread's use waits for a write that is under way
            if self._writing:  # the use is part of such a write
                return
            self._writing = True
            try:
                while self.unwaited:
                    try:
                        self.unwaited[0]()
                    except OneboxError:  # the next read raises it
                        pass
                    finally:
                        self.unwaited.popleft()  # only now: whoever finds none need not wait
                        self.native.add_due(-1)
            finally:
                self._writing = False

    def after_fork(self) -> None:
        """Replace the locks in a forked process; another thread of its parent may have held them."""
        self.lock = self.channel.lock = threading.RLock()
        self._writes, self._writing = threading.RLock(), False
        self.packing.after_fork()
        self.synchronous = self._forked = True  # so that already the first operator raises the error

    # ---- sending

    def require_own(self) -> None:
        """Raise an error in a forked process, whose parent has the device."""
        if self._forked:
            raise PoolError(_FORKED)

    @shielded
    def flush(
        self, last: Sequence[Instruction] = (), frames: Sequence[Any] = (), *, wait: bool = False, pace: bool = True
    ) -> WorkerReply | None:
        """Send the recorded calls.

        Args:
            last: Instructions to send after them.
            frames: Raw elements of their tensors.
            wait: Whether to wait until the worker has executed everything, and return its reply.
            pace: Whether to wait where the worker is too far behind; not allowed while holding a lock.

        Raises:
            OneboxError: The worker or the pool is gone; with ``wait``, the instructions failed.
        """
        if wait:
            return self.channel.answer(self._send(last, frames, awaited=True))
        self._send(last, frames, awaited=False)
        if pace:
            self.channel.pace()
        return None

    def _send(self, last: Sequence[Instruction], frames: Sequence[Any], *, awaited: bool) -> SentMessage | None:
        """Send the recorded calls and, after them, some instructions; return the message.

        A question is a message of its own, so that failures of the calls are not its reply.

        Args:
            last: The instructions.
            frames: Raw elements of their tensors.
            awaited: Whether the caller will wait for the reply; otherwise an empty message is not sent.
        """
        self.require_own()
        with self.lock:
            calls = self._take()
            if awaited or self._first or calls or last:
                if self._default_type is not None:
                    self._start.append((self.pool.default_type(self.worker, self._default_type), ()))
                    self._default_type = None
                if self._bound is not None:
                    self._start.append((self._bound, ()))
                    self._bound = None
                self._first, self._start = [*self._start, *self._first], []
            recorded: list[Instruction] = [instruction for instruction, _ in self._first]
            carried = [frame for _, brought in self._first for frame in brought]
            if calls:
                self._size = min(2 * self._size, CALLS)
                recorded += calls
            if last and isinstance(last[0], Get):
                self._asked = asked = self._with_expected(last[0])
                last = [asked]
            ended = self._take_ended()
            if ended:  # not after a query: where it fails, the rest of its message is left out
                recorded.append(Free((), ended))
            self._first, self._frame_bytes = [], 0
            self._limit()
            if recorded and last and isinstance(last[0], Ask):
                self.channel.message(recorded, carried, awaited=False)
                recorded, carried = [], []
            if awaited and last:
                self._size = min(SOON, CALLS)
                self._limit()
            if not (awaited or recorded or last):
                return None
            return self.channel.message([*recorded, *last], [*carried, *frames], awaited=awaited)

    def _take(self) -> list[Instruction]:
        """Return the instructions for the recorded calls, which are no longer waiting."""
        if not self.begun:
            return []
        code, inputs, outputs, strays, floats = map(tuple, self.native.take())
        return self._batches.instructions(code, inputs, outputs, strays, floats) if code or strays else []

    def _take_ended(self) -> tuple[int, ...]:
        """Return the definitions that are to be freed."""
        if not self.begun:
            return ()
        ended = [self.ended.popleft() for _ in range(len(self.ended))]
        return (*self.native.take_evicted(), *self.native.take_ended_generators(), *ended)

    def _limit(self) -> None:
        """Set the number of calls with which the next batch is sent."""
        if self.begun:
            self.native.set_most_calls(1 if self._synchronous else self._size)

    @property
    def waiting(self) -> int:
        """The number of recorded calls, and of other instructions, that have not been sent."""
        return (int(self.native.calls) if self.begun else 0) + len(self._first)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of a random number generator of this device, in PyTorch's format."""
        return 16 if self.pool.devices[self.worker].kind == "cuda" else torch.Generator().get_state().numel()

    # ---- waits

    @shielded
    def perform(self, kernel: KernelSpec, inputs: list[int], floats: list[float]) -> tuple[OperatorResult, int]:
        """Run an operator and wait for its result; also return the number of the first return.

        Raises:
            OneboxError: It failed.
        """
        with self.lock:
            first = self._reserve(RETURNS)
            asked = [self._send([Perform(kernel, tuple(inputs), tuple(floats), first)], (), awaited=True)]
        answer = self.channel.answer(asked.pop())
        (made,) = (result for result in answer.results if isinstance(result, OperatorResult))
        return made, first

    @shielded
    def read(self, number: int) -> tuple[TensorSpec, Any]:
        """Return a buffer's content as a frame.

        The reply brings along the single elements that are expected to be read, too. They count until anything is
        recorded or sent: it may write to them, or fail, which the next read raises.

        Raises:
            OneboxError: It is void, or the worker is gone.
        """
        with self.lock:
            self.require_own()
            recorded = self.native.recorded if self.begun else 0
            if (recorded, self.channel.messages) == self._brought_at and not self._first and number in self._brought:
                return self._brought[number]
            sent = [self._send([Get((number,))], (), awaited=True)]
            asked, at = self._asked, (recorded, self.channel.messages)
        answer = self.channel.answer(sent.pop())
        assert asked is not None
        (tensors,) = (result for result in answer.results if isinstance(result, Tensors))
        found = list(zip(tensors.specs, answer.frames, strict=True))
        with self.lock:
            others = ((spec, bytes(frame)) for spec, frame in found[1:])  # not what the reply came in
            self._brought, self._brought_at = dict(zip(asked.buffers[1:], others, strict=True)), at
        return found[0]

    def _with_expected(self, get: Get) -> Get:
        """Return a request for a buffer and for what is expected to be read, too.

        The latter is never void: if its call had failed, the script would be told by this read, or has been told since
        the latest one.
        """
        others, told = self.native.take_expected() if self.begun else (), self.channel.moment != self._moment
        self._moment = self.channel.moment
        return (
            get
            if told or self.has_shared
            else Get((*get.buffers, *(each for each in others if each != get.buffers[0])))
        )

    @shielded
    def ask_time(self) -> SentMessage:
        """Ask when the worker has executed everything recorded, without a wait; the same question if nothing has been
        since the latest."""
        with self.lock:
            last = self._asked_time
            if last is None or last.number != self.channel.messages or self.waiting:
                last = self._asked_time = self._send([Ask("time")], (), awaited=False)
        self.channel.pace()
        assert last is not None
        return last

    @shielded
    def time_s(self, asked: SentMessage) -> float:
        """Return the answer, in seconds on the worker's clock.

        Raises:
            OneboxError: There is none: the stream had stopped, or the worker is gone.
        """
        (found,) = (result for result in self.channel.reply(asked).results if isinstance(result, Scalars))
        return found.values[0]

    @shielded
    def filled(self, numbers: Sequence[int]) -> set[int]:
        """Return the buffers that are not void.

        Raises:
            OneboxError: The worker is gone.
        """
        answer = self.flush([Ask("filled", tuple(numbers))], wait=True)
        assert answer is not None
        return {number for result in answer.results if isinstance(result, FilledSlots) for number in result.filled}

    @property
    def unused(self) -> bool:
        """True if other processes may use the device, and this one has not."""
        return bool(self._start)

    def start_with(self, *instructions: tuple[Instruction, Sequence[Any]]) -> bool:
        """Replace the instructions, with their frames, that precede the first use of an unused device; return whether
        it is one."""
        with self.lock:
            if self._start:
                self._start = list(instructions)
                return True
            return False

    @shielded
    def synchronize(self) -> None:
        """Wait until the worker has executed everything recorded; a device that others use may have nothing of it.

        Raises:
            OneboxError: It is gone; or an operator has failed since the last wait and was not reported.
        """
        with self.lock:
            unused = self.unused and not self.waiting
            learned, self.has_learned = self.has_learned, False
        if not unused:
            try:
                self.flush(wait=True)
                self.channel.raise_failed()
            except BaseException:
                self.has_learned = learned
                raise

    def idle(self) -> bool:
        """Return whether the worker has executed everything recorded; sends what has not been sent."""
        return self.channel.reached(self.mark())

    def mark(self) -> int:
        """Send the recorded calls and return the number of the last message, for :meth:`RequestChannel.reached`."""
        self.flush()
        return self.channel.messages

    @shielded
    def follow(self) -> None:
        """Note that this process has another default element type, on which results of operators depend.

        The worker has it before what is recorded next: in a pool that is shared it may be another rank's by now.
        """
        self.flush(pace=False)
        if self.begun:
            self.native.forget()
        with self.lock:
            self._default_type = torch.get_default_dtype()


class IdleFlusher:
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
            while not self._over and self._look():
                pass

    def _look(self) -> bool:
        """Send what no further call has followed for a while; return whether something still waits."""
        seen = {queue: queue.waiting for queue in self._queues()}
        time.sleep(IDLE_S)
        waits = False
        for queue, calls in seen.items():
            if queue.waiting != calls:
                waits = True
            elif calls:
                with contextlib.suppress(OneboxError):  # the next use of the device raises the error
                    queue.flush(pace=False)
        return waits
