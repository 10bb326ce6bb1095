"""The request channel of one device: messages to its worker, those in flight, their failures, and waits for replies."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from onebox.errors import OneboxError, OperatorError, PeerLost
from onebox.pool import Pool, WorkerReply
from onebox.pool.errors import CAUSE_S
from onebox.vgpu.signals import deliver_signals, interruptible, shielded
from onebox.wire.protocol.requests import Instruction

MESSAGES = 256
"""Limit of messages in flight to a worker, so that queues stay bounded: enough for a channel with a round trip of 60 ms
to a device that does 1,000 steps a second, of four messages each."""

BYTES = 256 << 20
"""Limit of bytes of uploads in flight."""

SLICE_S = 0.05
"""A wait for a worker checks for signals at least this often."""

_LOOK_S = 0.002
"""Interval of checks for failures on other devices."""


@interruptible
def _wait(future: Future[WorkerReply], end_s: float = math.inf) -> None:
    """Wait until a worker has replied, at most until a time; signal handlers run here."""
    while not _settled(future) and time.monotonic() < end_s:
        deliver_signals()


@shielded
def _settled(future: Future[WorkerReply]) -> bool:
    # an exception in the middle of threading.Condition.wait would be hidden by one of its own
    try:
        future.exception(SLICE_S)
    except TimeoutError:
        return False
    return True


class SentMessage(NamedTuple):
    """A message to a worker.

    Args:
        future: Future of the reply.
        number: How many messages had been sent with it.
        size_bytes: Bytes of its tensors.
        awaited: Whether a caller waits for the reply, and so raises its failure.
    """

    future: Future[WorkerReply]
    number: int
    size_bytes: int
    awaited: bool


class InFlight:
    """The messages in flight to one worker, which replies in order; for one thread at a time.

    A worker sends a failure as soon as it occurs and then executes the rest of the message. So the reply to a failed
    message does not show that the message has been executed; the next reply does.
    """

    def __init__(self) -> None:
        self._messages: deque[SentMessage] = deque()
        self._size_bytes = 0
        self._executed = 0
        self._failed: BaseException | None = None
        self._lost_peer = 0

    def add(self, message: SentMessage) -> None:
        """Add a message."""
        self._messages.append(message)
        self._size_bytes += message.size_bytes

    def __len__(self) -> int:
        """Return the number of messages without a reply."""
        self._look()
        return len(self._messages)

    def busy(self) -> bool:
        """Return whether there are messages without a reply for which nobody waits."""
        self._look()
        return any(not message.awaited for message in self._messages)

    def executed(self) -> int:
        """Return the number of the last message that is known to be executed to its end."""
        self._look()
        return self._executed

    def too_far(self) -> Future[WorkerReply] | None:
        """Return the oldest message if the limits are exceeded, so that it is waited for."""
        self._look()
        if len(self._messages) > MESSAGES or self._size_bytes > BYTES:
            return self._messages[0].future
        return None

    def failed(self) -> BaseException | None:
        """Return the error of the first failed message that has not been reported."""
        self._look()
        return self._failed

    def mark_reported(self) -> None:
        """Mark all failures so far as reported."""
        self._look()
        self._failed = None

    def lost_peer(self) -> int:
        """Return the number of the last message that has failed because data from another worker did not come; 0 for
        none."""
        self._look()
        for message in self._messages:
            if message.future.done():
                self._note_peer(message)
        return self._lost_peer

    def _note_peer(self, message: SentMessage) -> None:
        if isinstance(message.future.exception(), PeerLost):
            self._lost_peer = max(self._lost_peer, message.number)

    def _look(self) -> None:
        while self._messages and self._messages[0].future.done():
            message = self._messages.popleft()
            self._size_bytes -= message.size_bytes
            error = message.future.exception()
            self._executed = message.number - (error is not None)
            if error is not None:
                self._note_peer(message)
                if not message.awaited:
                    self._failed = self._failed or error


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

    def message(
        self, instructions: Sequence[Instruction], frames: Sequence[Any], *, awaited: bool
    ) -> Future[WorkerReply]:
        """Send a message, with the lock held; return the future of its reply.

        Args:
            instructions: The instructions.
            frames: Raw elements of their tensors.
            awaited: Whether the caller will wait for the reply.
        """
        future = self._pool.post(self._worker, instructions, frames, answer=True)
        self.messages += 1
        self._in_flight.add(SentMessage(future, self.messages, sum([len(frame) for frame in frames]), awaited))
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
            cause = _first_failure(self.others) if isinstance(error, PeerLost) else None
            with self.lock:
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

    def lost_peer(self) -> int:
        """Return the number of the last message that has failed because data from another worker did not come; 0 for
        none."""
        with self.lock:
            return self._in_flight.lost_peer()

    def probe(self) -> Future[WorkerReply]:
        """Send an empty message, to whose reply the worker has executed everything before."""
        with self.lock:
            return self.message((), (), awaited=True)

    def settle(self, probe: Future[WorkerReply], end_s: float) -> None:
        """Wait for the reply to a probe, at most until a time."""
        self.waits += 1
        _wait(probe, end_s)

    def reached(self, mark: int) -> bool:
        """Return whether the worker has executed everything up to a message.

        Raises:
            OneboxError: The worker or the pool is gone.
        """
        with self.lock:
            if self._in_flight.executed() >= mark:
                return True
            if not self._in_flight:  # the last message has failed, and may still be executed: the next reply shows it
                self.message((), (), awaited=False)
            return False


def _first_failure(channels: Iterable[RequestChannel]) -> OperatorError | None:
    """Return the failure on another device, where this device's error is only that data from there is missing.

    The other device may report it later, up to :data:`~onebox.pool.errors.CAUSE_S`.

    Args:
        channels: The channels of all devices.
    """
    end_s, busy = time.monotonic() + CAUSE_S, True
    while busy and time.monotonic() < end_s:
        busy = False
        for channel in channels:
            with channel.lock:
                busy = busy or channel._in_flight.busy()
                found = channel._in_flight.failed()
                if isinstance(found, OperatorError):
                    channel._in_flight.mark_reported()
                    return found
        time.sleep(_LOOK_S if busy else 0)
    return None
