"""The request channel of one device: messages to its worker, those in flight, their failures, and waits for replies."""

from __future__ import annotations

import copy
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from onebox.errors import DeviceMemoryError, OneboxError, OperatorError, PeerLost, WireError, WorkerError
from onebox.pool import Pool, WorkerReply
from onebox.pool.errors import CAUSE_S
from onebox.sizes import enough_text
from onebox.vgpu.runtime.script_events import ScriptEvents
from onebox.vgpu.runtime.script_lines import current_line
from onebox.vgpu.runtime.script_time import ScriptTime
from onebox.vgpu.signals import deliver_signals, interruptible, shielded
from onebox.wire.protocol.eager import StreamHeader
from onebox.wire.protocol.requests import Instruction

MESSAGES = 256
"""Limit of messages in flight to a worker, so that queues stay bounded: enough for a channel with a round trip of 60 ms
to a device that does 1,000 steps a second, of four messages each."""

BYTES = 256 << 20
"""Limit of bytes of uploads in flight."""

UPLOAD_BYTES = 64 << 10
"""Bytes of uploads in flight from which on a wait may be one for them."""

SLICE_S = 0.05
"""A wait for a worker checks for signals at least this often."""

_LOOK_S = 0.002
"""Interval of checks for failures on other devices."""

_GROUP_ENDED = (
    "the process group has ended with the failure of a rank, as one of NCCL does; that rank's own error says why. Let "
    "the error end this rank, too, so that torchrun starts all of them again (--max-restarts), or form the group again "
    "in all ranks: destroy_process_group(), then init_process_group()"
)


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


_moments = itertools.count(1)
"""Numbers the failures that scripts are told of, in order."""


class ScriptErrors:
    """The failures that a script has been told of, on all devices of a pool; or a rank, on its own.

    Args:
        called: Returns the name of the device type in the script.
        send: Called with a device before its failure counts as told: sends what has been recorded until then.
        tidy: Called with the devices of a failure before it is raised.

    Attributes:
        count: Their number.
        last: The latest failure of an operator; ``None`` before the first.
        moment: Number of the latest failure among those of all ranks.
    """

    def __init__(
        self,
        called: Callable[[], str] = lambda: "vgpu",
        send: Callable[[int], object] = lambda _: None,
        tidy: Callable[[set[int]], object] = lambda _: None,
    ) -> None:
        self.count = 0
        self.last: OperatorError | None = None
        self.moment = 0
        self.called = called
        self.send = send
        self.tidy = tidy

    def tell(self, error: BaseException) -> None:
        """Count a failure."""
        self.count += 1
        self.moment = next(_moments)
        if isinstance(error, OperatorError):
            self.last = copy.copy(error)  # without its traceback, which refers to the script's tensors

    def for_rank(self) -> ScriptErrors:
        """Return those of a rank, of which there are none yet."""
        return ScriptErrors(self.called, self.send, self.tidy)

    def out_of_memory(self, error: DeviceMemoryError) -> torch.OutOfMemoryError:
        """Return PyTorch's error for a lack of memory, which begins as that of CUDA does under its name: some libraries
        decide by these words whether smaller batches would help."""
        called = self.called()
        asked = f" Tried to allocate {enough_text(error.asked_bytes)}." if error.asked_bytes else ""
        name = "CUDA" if called == "cuda" else called
        made = torch.OutOfMemoryError(f"{name} out of memory.{asked} {error}")
        made.__cause__ = error
        return made


class SentMessage(NamedTuple):
    """A message to a worker.

    Args:
        future: Future of the reply.
        number: How many messages had been sent with it.
        size_bytes: Bytes of its tensors.
        awaited: Whether a caller waits for the reply, and so raises its failure.
        errors: How many failures the script had been told of when it was sent.
    """

    future: Future[WorkerReply]
    number: int
    size_bytes: int
    awaited: bool
    errors: int = 0


class FailedMessage(NamedTuple):
    """A failed message.

    Args:
        error: The error.
        number: Number of the message.
        errors: How many failures the script had been told of when it was sent.
    """

    error: BaseException
    number: int
    errors: int


class InFlight:
    """The messages in flight to one worker, which replies in order; for one thread at a time.

    A worker sends a failure as soon as it occurs, or at the end of its routine, and then executes the rest of the
    message. So the reply to a failed message does not show that the message has been executed; the next reply does.

    Args:
        errors: What the script has been told of.
    """

    def __init__(self, errors: ScriptErrors | None = None) -> None:
        self.told = 0
        """Number of the latest message with a failure that the script has been told of."""
        self.errors = errors or ScriptErrors()
        self._messages: deque[SentMessage] = deque()
        self._size_bytes = 0
        self._executed = 0
        self._failed: FailedMessage | None = None
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

    def upload_bytes(self) -> int:
        """Return the bytes of uploads in the messages without a reply."""
        self._look()
        return self._size_bytes

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

    def failed(self) -> FailedMessage | None:
        """Return the first failure that the script has not been told of."""
        self._look()
        if self._failed is not None and self.is_told(self._failed):
            self._failed = None
        return self._failed

    def mark_told(self, number: int) -> None:
        """Note that the script has been told of the failures of the messages up to one."""
        self.told = max(self.told, number)
        if self._failed is not None and self.is_told(self._failed):
            self._failed = None

    def is_told(self, failed: FailedMessage) -> bool:
        """Return whether the script has been told of a failure, or of the one on another device that caused it."""
        return failed.number <= self.told or self.is_consequence(failed)

    def is_consequence(self, failed: FailedMessage) -> bool:
        """Return whether a message lacked data of another device, and the script has been told of a failure since."""
        return isinstance(failed.error, PeerLost) and failed.errors < self.errors.count

    def before(self, number: int) -> list[Future[WorkerReply]]:
        """Return the futures of the messages without a reply that were sent before one."""
        self._look()
        return [message.future for message in self._messages if message.number < number]

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
                failed = FailedMessage(error, message.number, message.errors)
                known = self._failed is not None and not self.is_told(self._failed)
                if not (message.awaited or known or self.is_told(failed)):
                    self._failed = failed


class RequestChannel:
    """The messages to one worker, with their number, those in flight, and their failures.

    They are a stream: after a failure the worker skips what follows, up to the first message that was sent after the
    script had been told.

    Args:
        pool: The pool.
        worker: The number of the device in it.
        errors: What the script has been told of, on all devices of the pool.
        script_time: Where the script's time goes.

    Attributes:
        lock: Held while sending.
        waits: Number of waits for a reply so far.
        messages: Number of messages sent so far.
        others: The channels of all devices of the pool; set by the creator of the devices.
        of_rank: Whether the device is a rank's.
        events: What is noted for a timeline; ``None`` without one.
    """

    def __init__(self, pool: Pool, worker: int, errors: ScriptErrors, script_time: ScriptTime) -> None:
        self.lock = threading.RLock()
        self.waits = 0
        self.messages = 0
        self.others: Sequence[RequestChannel] = ()
        self._pool = pool
        self._worker = worker
        self._time = script_time
        self._script = self._errors = errors
        self._rank = errors.for_rank()
        self.of_rank = False
        self.events: ScriptEvents | None = None
        self._in_flight = InFlight(errors)

    def message(self, instructions: Sequence[Instruction], frames: Sequence[Any], *, awaited: bool) -> SentMessage:
        """Send a message, with the lock held.

        Args:
            instructions: The instructions.
            frames: Raw elements of their tensors.
            awaited: Whether the caller will wait for the reply.
        """
        number, errors = self.messages + 1, self._errors.count
        begin = StreamHeader(self._pool.first_buffer, number, self._in_flight.told, errors)
        future = self._pool.post(self._worker, [begin, *instructions], frames, answer=True)
        self.messages = number
        sent = SentMessage(future, number, sum([len(frame) for frame in frames]), awaited, errors)
        self._in_flight.add(sent)
        if self.events is not None:
            future.add_done_callback(self.events.sent(self._worker, number, instructions, current_line()))
        return sent

    def answer(self, sent: SentMessage | None) -> WorkerReply:
        """Wait for a reply.

        An error references the frames that it has passed, so none of them may reference the error, or the future that
        holds it: the tensors of all frames above would stay until the garbage collector runs.

        Raises:
            OneboxError: The instructions failed, or some before them in the stream; or the worker or the pool is gone.
            torch.OutOfMemoryError: Likewise, for lack of memory.
        """
        assert sent is not None
        self.waits += 1
        try:
            self._wait(sent.future)
            return sent.future.result()
        except OneboxError as error:
            cause = self._tell(FailedMessage(error, sent.number, sent.errors))
            if cause is not None:
                raise cause.with_traceback(None) from cause.__cause__
            raise
        finally:
            sent = cause = None

    def reply(self, sent: SentMessage) -> WorkerReply:
        """Wait for a reply that is no read, whose failure the next read raises.

        Raises:
            OneboxError: The instructions failed.
        """
        _wait(sent.future)
        return sent.future.result()

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
            self._wait(oldest, ahead=True)

    @shielded
    def _wait(self, future: Future[WorkerReply], end_s: float = math.inf, *, ahead: bool = False) -> None:
        """Wait until a worker has replied, at most until a time, and count it as the time of the script's line.

        While uploads are on their way, the part of it in which the device does nothing is theirs.

        Args:
            future: Future of the reply.
            end_s: The time.
            ahead: Whether the script is too far ahead, and waits for no value.
        """
        if future.done():
            return
        line, since_ns, busy_ns = current_line(), time.monotonic_ns(), self._pool.busy_ns(self._worker)
        with self.lock:
            uploading = self._in_flight.upload_bytes() >= UPLOAD_BYTES
        self._time.begin_wait(since_ns)
        try:
            _wait(future, end_s)
        finally:
            now_ns = time.monotonic_ns()
            idle_ns = max(0, now_ns - since_ns - (self._pool.busy_ns(self._worker) - busy_ns))
            self._time.end_wait(line, since_ns, now_ns, arriving_ns=idle_ns if uploading else 0, ahead=ahead)
            if self.events is not None:
                self.events.add("ahead" if ahead else "wait", line, since_ns, now_ns)

    def note_upload(self, size_bytes: int, since_ns: int) -> None:
        """Count the time since a moment as one in which the script copied what it uploads."""
        now_ns = time.monotonic_ns()
        self._time.uploaded(size_bytes, now_ns - since_ns)
        if self.events is not None:
            self.events.add("upload", current_line(), since_ns, now_ns, size_bytes)

    def raise_failed(self) -> None:
        """Raise the failure that has stopped the stream, unless the script has been told.

        Raises:
            OneboxError: There is one.
            torch.OutOfMemoryError: Likewise, a lack of memory.
        """
        with self.lock:
            failed = self._in_flight.failed()
            held = [] if failed is not None else self._in_flight.before(self.messages)
        try:
            if held:  # the worker has replied; an error about another worker is held back until its cause is known
                for future in held:
                    _wait(future)
                with self.lock:
                    failed = self._in_flight.failed()
            if failed is not None:
                raise self._tell(failed) or failed.error
        finally:
            held.clear()
            failed = future = None  # type: ignore[assignment]

    def _tell(self, failed: FailedMessage) -> BaseException | None:
        """Note that the script is told of a failure; return what is raised in its place, if anything.

        Where another device's data was missing, that is the failure there, of which the script is told, too.
        """
        error, told = failed.error, [(self, failed)]
        if isinstance(error, PeerLost):
            if self._in_flight.is_consequence(failed):
                error = copy.copy(self._errors.last) or error
            elif (cause := _first_failure(self.others)) is not None:
                error = cause[1].error
                if not self.of_rank:
                    told.append(cause)
            elif self.of_rank:
                error = self._told_to_others() or error
            if self.of_rank and self._pool.attached:
                error = _in_ended_group(error)
        self._errors.send(self._worker)
        for channel, one in told:
            with channel.lock:
                channel._in_flight.mark_told(one.number)
        self._errors.tell(error)
        if isinstance(error, OperatorError | PeerLost | WireError):
            self._errors.tidy({channel._worker for channel, _ in told})
        try:
            if isinstance(error, DeviceMemoryError):
                return self._errors.out_of_memory(error)
            return None if error is failed.error else error
        finally:
            told.clear()
            error = failed = cause = one = None  # type: ignore[assignment]

    def _told_to_others(self) -> OperatorError | None:
        """Return the latest failure that another rank has been told of since this one was told of any; the thread of
        that rank may need a moment."""
        end_s = time.monotonic() + CAUSE_S
        while time.monotonic() < end_s:
            latest = max((channel._rank for channel in self.others), key=lambda each: each.moment, default=None)
            if latest is not None and latest.moment > self._errors.moment and latest.last is not None:
                return copy.copy(latest.last)
            time.sleep(_LOOK_S)
        return None

    def require_told(self, moment: int) -> None:
        """Raise the failure for which another rank has left, unless this one has been told of one.

        Args:
            moment: That of the failure that this rank had been told of with its latest collective; see :attr:`moment`.

        Raises:
            OneboxError: It has not.
            torch.OutOfMemoryError: Likewise, for a lack of memory.
        """
        if self._errors.moment > moment:
            return
        error: WorkerError | None = self._told_to_others()
        if error is None:
            error = PeerLost("another rank has left the group, and is not known to have failed", worker=self._worker)
        self._errors.tell(error)
        raise self._errors.out_of_memory(error) if isinstance(error, DeviceMemoryError) else error

    @property
    def moment(self) -> int:
        """Number of the latest failure that the script has been told of."""
        return self._errors.moment

    def begin_rank(self) -> None:
        """Let the device be a rank's, which is told of its failures by itself."""
        self.of_rank = True
        self._rank.count = max(self._rank.count, self._script.count)
        self._errors = self._in_flight.errors = self._rank

    def end_rank(self) -> None:
        """Let the device be the script's again."""
        self.of_rank = False
        self._script.count = max(self._script.count, self._rank.count)
        self._errors = self._in_flight.errors = self._script

    @property
    def told(self) -> int:
        """Number of the latest message with a failure that the script has been told of."""
        return self._in_flight.told

    def lost_peer(self) -> int:
        """Return the number of the last message that has failed because data from another worker did not come; 0 for
        none."""
        with self.lock:
            return self._in_flight.lost_peer()

    def probe(self) -> SentMessage:
        """Send an empty message, to whose reply the worker has executed everything before."""
        with self.lock:
            return self.message((), (), awaited=True)

    def settle(self, probe: SentMessage, end_s: float) -> None:
        """Wait for the reply to a probe, at most until a time."""
        self.waits += 1
        self._wait(probe.future, end_s)

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


def _in_ended_group(error: BaseException) -> BaseException:
    """Return the error with what the rank of a process can do, which forms no other group by itself."""
    if _GROUP_ENDED in str(error):
        return error
    made = copy.copy(error)
    made.args = (f"{error}\n  {_GROUP_ENDED}",)
    return made


def _first_failure(channels: Iterable[RequestChannel]) -> tuple[RequestChannel, FailedMessage] | None:
    """Return the failure on another device, with its channel.

    For an error that is only about data that is missing from there; the other device may report it later, up to
    :data:`~onebox.pool.errors.CAUSE_S`.

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
                if found is not None and isinstance(found.error, OperatorError):
                    return channel, found
        time.sleep(_LOOK_S if busy else 0)
    return None
