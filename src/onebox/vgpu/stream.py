"""A stream: what one virtual device has been asked to do and has not been sent yet.

Operators are recorded and sent in batches, without waiting: after :data:`CALLS` of them, when somebody asks for a
value, after an optimizer's step, and when nothing has come for :data:`IDLE_S`. A batch that has come before is a block
on the worker and is called by number.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from onebox.errors import OneboxError, OperatorError, PeerLost
from onebox.pool import Pool
from onebox.pool.switchboard import Answer
from onebox.vgpu.coding import SHORTEST, Book, Record, block_of, coded, plain
from onebox.vgpu.recipe import Recipe
from onebox.vgpu.tensor import Handle
from onebox.wire import FREE, Kernel, TensorSpec
from onebox.wire.messages import Call, Define, Free, Get, Instruction, Operate, Perform, Replay
from onebox.wire.sayings import Made, Tensors

CALLS = 64
"""Calls of a batch: few enough that a worker starts early, many enough that a message costs little."""

SOON = 8
"""Calls of the first batch after the client has waited: the worker has nothing else to do; each next batch has twice as
many. In this way boundaries depend on the script alone, and batches repeat."""

BYTES = 256 << 10
"""Bytes of new tensors after which a batch is sent, so that they are on their way while the client goes on."""

IDLE_S = 0.001
"""How long a record may wait for the next."""

AHEAD = 256
"""Batches that the client may be ahead of a worker, so that what is queued stays bounded: enough for a channel with a
round trip of 60 ms to a device that does 1,000 steps a second, of four batches each."""

AHEAD_BYTES = 256 << 20
"""Bytes of uploads that may be on their way."""

RECIPES = 1 << 16
"""The most kinds of calls that are remembered."""

FIRST_SEED = 67280421310721
"""The seed of random numbers before anybody sets one; PyTorch's own value."""

FIRST = 1 << 30
"""The first number of a buffer; those of :meth:`onebox.pool.Pool.new_number` are lower."""

RETURNS = 1 << 20
"""Numbers that are set aside for the returns of one operator."""

_probe = [object()]
_ALONE = sys.getrefcount(_probe[0])
"""What is counted for an object that only a list holds."""


class Stream:
    """The operators of one device, in the order in which the script issued them.

    Args:
        pool: The pool.
        worker: The number of the device in it.
        ring: Called when a batch begins, so that an idle one is sent.
    """

    def __init__(self, pool: Pool, worker: int, ring: Any) -> None:
        self.pool = pool
        self.worker = worker
        self.device = torch.device("vgpu", worker)
        self.recipes: dict[Any, Recipe] = {}
        self.dead: deque[int] = deque()
        self.ended: deque[int] = deque()  # generators whose objects have gone
        self.lock = threading.RLock()
        self.records = 0
        self.waits = 0
        self.messages = 0
        self.synchronous = False
        self.others: Sequence[Stream] = ()
        """The streams of all devices of the pool; set by whoever makes them."""
        self.seed = FIRST_SEED
        self._ring = ring
        self._next = FIRST
        self._size = CALLS
        self._first: list[Instruction] = []  # what must be there before the calls
        self._frames: list[Any] = []
        self._frame_bytes = 0
        self._calls: list[Record] = []
        self._keeps: list[int] = []
        self._floats: list[float] = []
        self._reads_of: dict[int, int] = {}
        self._keeps_of: dict[int, int] = {}
        self._rooms: set[int] = set()
        self._book = Book()
        self._ahead: deque[tuple[Future[Answer], int]] = deque()
        self._ahead_bytes = 0
        self._untold: BaseException | None = None

    # ---- recording

    def record(self, recipe: Recipe, inputs: list[int], floats: list[float]) -> int:
        """Take a call and return the number of the first of its outputs."""
        with self.lock:
            calls = self._calls
            if not calls:
                self._ring(self)
            if self.dead:
                self._bury()
            if not recipe.number:
                self._define(recipe)
            first = self._next
            self._next = first + recipe.keeps
            calls.append((recipe.number, inputs, first))
            self._keeps.append(recipe.keeps)
            if floats:
                self._floats += floats
            self.records += 1
            full = len(calls) >= self._size or self.synchronous
        if full:
            self.flush(wait=self.synchronous)
        return first

    def _bury(self) -> None:
        """Let the buffers end whose tensors have gone."""
        while self.dead:
            try:
                number = self.dead.popleft()
            except IndexError:  # another thread was faster
                return
            self._calls.append((FREE, number, 0))
            self._keeps.append(0)

    def _define(self, recipe: Recipe) -> None:
        """Send a kernel before its first call."""
        number = self.pool.new_number()
        self._first.append(Define(number, recipe.kernel))
        self._reads_of[number], self._keeps_of[number] = recipe.inputs, recipe.keeps
        recipe.number = number
        if recipe.kernel.name.startswith("aten.empty"):
            self._rooms.add(number)

    def call(self, program: int, handles: list[Handle], outputs: int) -> int:
        """Run a stored program behind what is recorded, and return the number of the first of its outputs.

        Args:
            program: Its number.
            handles: The buffers that it reads. One that nobody but this list holds ends with the call, so that the
                worker can use its memory as soon as it has been read for the last time.
            outputs: How many it makes.
        """
        with self.lock:
            first = self._next
            self._next += outputs
            takes = tuple(at for at in range(len(handles)) if sys.getrefcount(handles[at]) == _ALONE)
            made = tuple(range(first, self._next))
            numbers = tuple(handle.number for handle in handles)
            asked = [self._post([Call(program, numbers, made, takes)], (), kept=not self.synchronous)]
        if self.synchronous:
            self._answer(asked.pop())
        else:
            self.pace()
        return first

    def new_number(self) -> int:
        """Return the number of a buffer that something else than a call fills."""
        with self.lock:
            number = self._next
            self._next += 1
            return number

    def before(self, instruction: Instruction, frames: Sequence[Any] = ()) -> None:
        """Let an instruction go ahead of the calls that are recorded; it fills buffers that none of them knows."""
        with self.lock:
            if not self._calls and not self._first:
                self._ring(self)
            self._first.append(instruction)
            self._frames += frames
            self._frame_bytes += sum(len(frame) for frame in frames)
            full = self._frame_bytes > BYTES
        if full:
            self.flush()

    def fresh(self, number: int) -> bool:
        """Take back the call that filled a buffer, if it is the last one and only made room."""
        with self.lock:
            if not self._calls or self._calls[-1][2] != number or self._keeps[-1] != 1:
                return False
            if self._calls[-1][0] not in self._rooms:
                return False
            self._calls.pop()
            self._keeps.pop()
            return True

    # ---- sending

    def flush(
        self, last: Sequence[Instruction] = (), frames: Sequence[Any] = (), *, wait: bool = False, pace: bool = True
    ) -> Answer | None:
        """Send what is recorded.

        Args:
            last: Instructions that come after it.
            frames: Tensors that they bring.
            wait: Whether to wait for the worker to have done it all, and return its answer.
            pace: Whether to wait where the worker is too far behind; not for who holds a lock.

        Raises:
            OneboxError: The worker or the pool is gone; with ``wait``, what the instructions failed of.
        """
        if wait:
            return self._answer(self._post(last, frames, kept=False))
        self._post(last, frames, kept=True)
        if pace:
            self.pace()
        return None

    def _answer(self, future: Future[Answer] | None) -> Answer:
        """Wait for an answer.

        An error knows the frames that it has passed, so none of them may know the error, or the future that holds it:
        the tensors of all frames above would stay until the garbage collector comes.
        """
        assert future is not None
        self.waits += 1
        try:
            return future.result()
        except OneboxError as error:
            told = self._cause(error)
            with self.lock:
                self._arrived()
                self._untold = None  # what failed before this, it is the cause of, or hidden by this
            if told is not None:
                raise told.with_traceback(None) from None
            raise
        finally:
            del future

    def _cause(self, error: OneboxError) -> BaseException | None:
        """Return what failed on another device, where this one says only that something does not come from there."""
        for stream in self.others if isinstance(error, PeerLost) else ():
            with stream.lock:
                stream._arrived()
                if isinstance(stream._untold, OperatorError):
                    found, stream._untold = stream._untold, None
                    return found
        return None

    def _post(self, last: Sequence[Instruction], frames: Sequence[Any], *, kept: bool) -> Future[Answer] | None:
        """Send what is recorded and, behind it, some instructions; return what the worker will answer.

        A question goes in a message of its own: what fails of the rest is not its answer.

        Args:
            last: The instructions.
            frames: Tensors that they bring.
            kept: Whether the message counts among those that the client is ahead by; then nothing is sent where there
                is nothing to send.
        """
        with self.lock:
            if self.dead:
                self._bury()
            if self.ended:
                gone = tuple(self.ended.popleft() for _ in range(len(self.ended)))
                last = [*last, Free((), gone)]
            recorded, carried = [*self._first, *self._batch()], self._frames
            self._first, self._frames, self._frame_bytes = [], [], 0
            if kept or not last:
                if kept and not recorded and not last:
                    return None
                return self._message([*recorded, *last], [*carried, *frames], kept=kept)
            if recorded:
                self._message(recorded, carried, kept=True)
            self._size = min(SOON, CALLS)
            return self._message(last, frames, kept=False)

    def _message(self, instructions: Sequence[Instruction], frames: Sequence[Any], *, kept: bool) -> Future[Answer]:
        self.messages += 1
        future = self.pool.post(self.worker, instructions, frames, answer=True)
        if kept:
            size_bytes = sum(len(frame) for frame in frames)
            self._ahead.append((future, size_bytes))
            self._ahead_bytes += size_bytes
        return future

    def pace(self) -> None:
        """Wait where the worker is too far behind; what failed there is told to who asks for its results.

        The worker may itself be waiting for another one, whose thread may need this stream: nothing is locked here
        during the wait.
        """
        while True:
            with self.lock:
                self._arrived()
                if len(self._ahead) <= AHEAD and self._ahead_bytes <= AHEAD_BYTES:
                    return
                oldest = self._ahead[0][0]
            oldest.exception()

    def _arrived(self) -> None:
        """Take note of the messages that have been answered, and of the first that failed; called with the lock."""
        while self._ahead and self._ahead[0][0].done():
            future, size_bytes = self._ahead.popleft()
            self._ahead_bytes -= size_bytes
            self._untold = self._untold or future.exception()

    def _batch(self) -> list[Instruction]:
        """Return the instructions for the recorded calls."""
        if not self._calls:
            return []
        self._size = min(2 * self._size, CALLS)
        calls, keeps, floats = self._calls, self._keeps, tuple(self._floats)
        self._calls, self._keeps, self._floats = [], [], []
        if len(calls) < SHORTEST:
            return [Operate(plain(calls, keeps), floats)]
        coding = coded(calls, keeps)
        key = (coding.code, tuple(slot for slot, _ in coding.outputs))
        block = self._book.look(key)
        if block is None:
            gone = self._book.shed()
            return [Operate(plain(calls, keeps), floats), *([Free((), tuple(gone))] if gone else [])]
        instructions: list[Instruction] = [Free(coding.strays)] if coding.strays else []
        if not block:
            block = self.pool.new_number()
            self._book.define(key, block)
            instructions.append(Define(block, block_of(coding, self._keeps_of, self._reads_of, len(floats))))
        instructions.append(Replay(block, coding.inputs, tuple(number for _, number in coding.outputs), floats))
        return instructions

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of a random number generator of this device, as PyTorch gives it."""
        return 16 if self.pool.devices[self.worker].kind == "cuda" else torch.Generator().get_state().numel()

    # ---- waiting

    def perform(self, kernel: Kernel, inputs: list[int], floats: list[float]) -> tuple[Made, int]:
        """Run an operator and wait for what it returned; also return the number of the first return.

        Raises:
            OneboxError: It failed.
        """
        with self.lock:
            first = self._next
            self._next += RETURNS
            asked = [self._post([Perform(kernel, tuple(inputs), tuple(floats), first)], (), kept=False)]
        answer = self._answer(asked.pop())
        (made,) = (result for result in answer.results if isinstance(result, Made))
        return made, first

    def read(self, number: int) -> tuple[TensorSpec, Any]:
        """Return what a buffer holds, as a frame.

        Raises:
            OneboxError: It is void, or the worker is gone.
        """
        answer = self.flush([Get((number,))], wait=True)
        assert answer is not None
        (tensors,) = (result for result in answer.results if isinstance(result, Tensors))
        return tensors.specs[0], answer.frames[0]

    def synchronize(self) -> None:
        """Wait until the worker has done all that was recorded.

        Raises:
            OneboxError: It is gone; or something has failed since the last wait, which nobody has asked for yet.
        """
        self.flush(wait=True)
        with self.lock:
            self._arrived()
            failed, self._untold = self._untold, None
        try:
            if failed is not None:
                raise failed
        finally:
            del failed

    def idle(self) -> bool:
        """Tell whether the worker has done all that was recorded; sends what has not been sent."""
        self.flush()
        return self.reached(self.mark())

    def mark(self) -> int:
        """Send what is recorded and return the number of the last message, for :meth:`reached`."""
        self.flush()
        return self.messages

    def reached(self, mark: int) -> bool:
        """Tell whether the worker has done all up to a message."""
        with self.lock:
            behind = sum(not future.done() for future, _ in self._ahead)
            return self.messages - behind >= mark

    def remember(self, key: Any, recipe: Recipe) -> None:
        """Keep a recipe for the next call of its kind; with too many of them, forget all."""
        with self.lock:
            if len(self.recipes) >= RECIPES:
                numbers = tuple(known.number for known in self.recipes.values() if known.number)
                self.flush([Free((), numbers)])
                for known in self.recipes.values():
                    known.number = 0
                self.recipes.clear()
            self.recipes[key] = recipe

    def handle(self, number: int) -> Handle:
        """Return the owner of a buffer."""
        return Handle(self, number)
