"""Streams of scripts on a worker: a failure stops a stream until the script has been told of it."""

from __future__ import annotations

from collections import deque

from onebox.errors import WireError
from onebox.wire.protocol.eager import StreamHeader
from onebox.wire.protocol.responses import MessageTimes, WorkerFailure
from onebox.worker.progress import Moment, moment_ns

MOST_STREAMS = 1 << 12
"""Most streams of a worker: one for each process that uses it."""


_UNTOLD = 1 << 12
"""The most messages of a stream whose times no reply has told; of more the oldest are forgotten."""


class MessageClock:
    """The times of a stream's messages, which replies tell when the device has executed them."""

    def __init__(self) -> None:
        self._begun = (0, 0, 0)  # the present message, its start, and the time waited until then
        self._untold: deque[tuple[int, int, Moment, int]] = deque(maxlen=_UNTOLD)
        self._latest_ns = 0  # end of the latest message that was told

    def begin(self, message: int, now_ns: int, waited_ns: int) -> None:
        """Begin a message.

        Args:
            message: Its number.
            now_ns: The time.
            waited_ns: Time that the worker has waited for others until now.
        """
        self._begun = message, now_ns, waited_ns

    def end(self, at: Moment, waited_ns: int) -> None:
        """End the present message at a moment of the device's work."""
        message, start_ns, before_ns = self._begun
        self._untold.append((message, start_ns, at, waited_ns - before_ns))

    def take(self) -> tuple[MessageTimes, ...]:
        """Return the messages that the device has executed, each once.

        An asynchronous device begins a message when it has executed the one before.
        """
        found = []
        while self._untold and (isinstance(at := self._untold[0][2], int) or at.query()):
            message, start_ns, _, waited_ns = self._untold.popleft()
            end_ns = moment_ns(at)
            start_ns = min(max(start_ns, self._latest_ns), end_ns)
            self._latest_ns = end_ns
            found.append(MessageTimes(message, start_ns, end_ns, waited_ns))
        return tuple(found)


class ScriptStream:
    """The stream of one script.

    Attributes:
        failure: The failure that has stopped it; ``None`` while it runs.
        clock: The times of its messages.
    """

    def __init__(self) -> None:
        self.clock = MessageClock()
        self.failure: WorkerFailure | None = None
        self._message = self._errors = 0  # of the present message
        self._stopped = (0, 0)  # the message in which it was stopped, and the script's errors with it

    def begin(self, what: StreamHeader) -> None:
        """Begin a message; go on if the script has been told of the failure before it sent this one.

        A lack of another device's data has its cause there: the script is told of that.
        """
        self._message, self._errors = what.message, what.errors
        message, errors = self._stopped
        if self.failure is not None:
            lacks_peer = self.failure.kind == "peer" and what.errors > errors
            if what.told >= message or lacks_peer:
                self.failure = None

    def stop(self, failure: WorkerFailure) -> None:
        """Stop it, unless it is."""
        if self.failure is None:
            self.failure = failure
            self._stopped = self._message, self._errors


class ScriptStreams:
    """The streams of a worker, by number."""

    def __init__(self) -> None:
        self._streams: dict[int, ScriptStream] = {}

    def begin(self, what: StreamHeader) -> ScriptStream:
        """Begin a message of a stream, and return the stream.

        Raises:
            WireError: There are too many.
        """
        found = self._streams.get(what.number)
        if found is None:
            if len(self._streams) >= MOST_STREAMS:
                raise WireError(f"this worker has {MOST_STREAMS} streams; no more are allowed")
            found = self._streams[what.number] = ScriptStream()
        found.begin(what)
        return found

    def stop(self, failure: WorkerFailure) -> None:
        """Stop all of them."""
        for stream in self._streams.values():
            stream.stop(failure)

    def stopped(self, first: int, end: int) -> bool:
        """Return whether a stream with a number in a range, its end excluded, is stopped."""
        return any(stream.failure is not None for number, stream in self._streams.items() if first <= number < end)

    def end(self, first: int, end: int) -> None:
        """End the streams with numbers in a range, its end excluded."""
        for number in [number for number in self._streams if first <= number < end]:
            del self._streams[number]
