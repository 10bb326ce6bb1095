"""What one virtual device's worker has been sent: messages go out here, and their answers are waited for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from onebox.errors import OneboxError, PeerLost
from onebox.pool import Pool, WorkerReply
from onebox.vgpu.runtime.in_flight import InFlight, first_failure
from onebox.vgpu.signals import deliver_signals, interruptible, shielded
from onebox.wire.protocol.requests import Instruction

SLICE_S = 0.05
"""A wait for a worker looks for signals at least this often."""


@interruptible
def _wait(future: Future[WorkerReply]) -> None:
    """Wait until a worker has answered; handlers of signals run here."""
    while not _settled(future):
        deliver_signals()


@shielded
def _settled(future: Future[WorkerReply]) -> bool:
    # an exception in the middle of threading.Condition.wait, where no handler may raise, hides behind one of its own
    try:
        future.exception(SLICE_S)
    except TimeoutError:
        return False
    return True


class RequestChannel:
    """The messages to one worker: how many, how far the client is ahead by them, and what failed of them.

    Args:
        pool: The pool.
        worker: The number of the device in it.

    Attributes:
        lock: Held by whoever sends.
        waits: How often the client has waited for an answer.
        messages: How many have been sent.
        others: Those of all devices of the pool; set by whoever makes the devices.
    """

    def __init__(self, pool: Pool, worker: int) -> None:
        self.lock = threading.RLock()
        self.waits = 0
        self.messages = 0
        self.others: Sequence[RequestChannel] = ()
        self._pool = pool
        self._worker = worker
        self._ahead = InFlight()

    def message(self, instructions: Sequence[Instruction], frames: Sequence[Any], *, kept: bool) -> Future[WorkerReply]:
        """Send a message, with the lock; return what the worker will answer.

        Args:
            instructions: What to do.
            frames: Tensors that they bring.
            kept: Whether it counts among those that the client is ahead by.
        """
        future = self._pool.post(self._worker, instructions, frames, answer=True)
        self.messages += 1
        if kept:
            self._ahead.add(future, sum(len(frame) for frame in frames))
        return future

    def answer(self, future: Future[WorkerReply] | None) -> WorkerReply:
        """Wait for an answer.

        An error knows the frames that it has passed, so none of them may know the error, or the future that holds it:
        the tensors of all frames above would stay until the garbage collector comes.

        Raises:
            OneboxError: What the instructions failed of; or the worker or the pool is gone.
        """
        assert future is not None
        self.waits += 1
        try:
            _wait(future)
            return future.result()
        except OneboxError as error:
            missed = isinstance(error, PeerLost)
            told = first_failure([(each.lock, each._ahead) for each in self.others]) if missed else None
            with self.lock:
                self._ahead.told()  # what failed before this, it is the cause of, or hidden by this
            if told is not None:
                raise told.with_traceback(None) from None
            raise
        finally:
            future = told = None

    def pace(self) -> None:
        """Wait where the worker is too far behind; what failed there is told to who asks for its results.

        The worker may itself be waiting for another one, whose thread may need this one's lock: nothing is locked here
        during the wait.
        """
        while True:
            with self.lock:
                oldest = self._ahead.too_far()
            if oldest is None:
                return
            _wait(oldest)

    def raise_failed(self) -> None:
        """Raise what has failed since the last wait, which nobody has been told of yet.

        Raises:
            OneboxError: It has.
        """
        with self.lock:
            failed = self._ahead.failed()
            self._ahead.told()
        try:
            if failed is not None:
                raise failed
        finally:
            del failed

    def reached(self, mark: int) -> bool:
        """Tell whether the worker has done all up to a message."""
        with self.lock:
            return self.messages - len(self._ahead) >= mark
