"""The request channel of one device: messages to its worker, and waits for the replies."""

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
"""A wait for a worker checks for signals at least this often."""


@interruptible
def _wait(future: Future[WorkerReply]) -> None:
    """Wait until a worker has replied; signal handlers run here."""
    while not _settled(future):
        deliver_signals()


@shielded
def _settled(future: Future[WorkerReply]) -> bool:
    # an exception in the middle of threading.Condition.wait would be hidden by one of its own
    try:
        future.exception(SLICE_S)
    except TimeoutError:
        return False
    return True


class RequestChannel:
    """The messages to one worker, with their number, those in flight, and their failures.

    Args:
        pool: The pool.
        worker: The number of the device in it.

    Attributes:
        lock: Held while sending.
        waits: Number of waits for a reply so far.
        messages: Number of messages sent so far.
        others: The channels of all devices of the pool; set by the creator of the devices.
    """

    def __init__(self, pool: Pool, worker: int) -> None:
        self.lock = threading.RLock()
        self.waits = 0
        self.messages = 0
        self.others: Sequence[RequestChannel] = ()
        self._pool = pool
        self._worker = worker
        self._in_flight = InFlight()

    def message(self, instructions: Sequence[Instruction], frames: Sequence[Any], *, kept: bool) -> Future[WorkerReply]:
        """Send a message, with the lock held; return the future of its reply.

        Args:
            instructions: The instructions.
            frames: Raw elements of their tensors.
            kept: Whether it counts as in flight.
        """
        future = self._pool.post(self._worker, instructions, frames, answer=True)
        self.messages += 1
        if kept:
            self._in_flight.add(future, sum(len(frame) for frame in frames))
        return future

    def answer(self, future: Future[WorkerReply] | None) -> WorkerReply:
        """Wait for a reply.

        An error references the frames that it has passed, so none of them may reference the error, or the future that
        holds it: the tensors of all frames above would stay until the garbage collector runs.

        Raises:
            OneboxError: The instructions failed; or the worker or the pool is gone.
        """
        assert future is not None
        self.waits += 1
        try:
            _wait(future)
            return future.result()
        except OneboxError as error:
            missed = isinstance(error, PeerLost)
            cause = first_failure([(each.lock, each._in_flight) for each in self.others]) if missed else None
            with self.lock:
                self._in_flight.note(error)
                self._in_flight.mark_reported()  # this failure is the cause of earlier ones, or hidden by them
            if cause is not None:
                raise cause.with_traceback(None) from None
            raise
        finally:
            future = cause = None

    def pace(self) -> None:
        """Wait where the worker is too far behind; failures there are raised by reads of its results.

        The worker may itself be waiting for another one, whose thread may need this one's lock: no lock is held during
        the wait.
        """
        while True:
            with self.lock:
                oldest = self._in_flight.too_far()
            if oldest is None:
                return
            _wait(oldest)

    def raise_failed(self) -> None:
        """Raise the first failure since the last wait that has not been reported.

        Raises:
            OneboxError: There is one.
        """
        with self.lock:
            failed = self._in_flight.failed()
            self._in_flight.mark_reported()
        try:
            if failed is not None:
                raise failed
        finally:
            del failed

    def take_lost_peer(self) -> bool:
        """Return whether a message has failed since the last call because data from another worker did not come."""
        with self.lock:
            return self._in_flight.take_lost_peer()

    def reached(self, mark: int) -> bool:
        """Return whether the worker has executed everything up to a message."""
        with self.lock:
            return self.messages - len(self._in_flight) >= mark
