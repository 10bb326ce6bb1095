"""Replies whose values an asynchronous device is still computing, so that its next work is queued meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onebox.wire.protocol.responses import Reply, Result
from onebox.worker.accelerator import Event
from onebox.worker.progress import Trace

Deferred = Callable[[], Result]
"""Returns a result when the device has done the work before it."""

Outcome = Result | Deferred


class PendingReply:
    """A reply to a message.

    Args:
        number: The message's number.
        results: The results of its instructions.
        frames: Frames of tensors, or functions that return them, as of results.
        trace: Times and memory of the instructions.
        after: Mark in the device's work with which everything is complete; ``None`` if it is.
    """

    def __init__(
        self,
        number: int,
        results: Sequence[Outcome],
        frames: Sequence[Any],
        trace: Trace,
        after: Event | None,
    ) -> None:
        self.number = number
        self._results = results
        self._frames = frames
        self._trace = trace
        self._after = after

    @property
    def complete(self) -> bool:
        """True if :meth:`message` can be called.

        Raises:
            RuntimeError: The device has failed.
        """
        return self._after is None or self._after.query()

    def wait(self) -> None:
        """Wait until it is complete.

        Raises:
            RuntimeError: The device has failed.
        """
        if self._after is not None:
            self._after.synchronize()

    def message(self) -> tuple[Reply, list[Any]]:
        """Return the message with its frames."""
        results = tuple(each() if callable(each) else each for each in self._results)
        frames = [each() if callable(each) else each for each in self._frames]
        return Reply(self.number, results, None, self._trace.times_ns(), tuple(self._trace.used_bytes)), frames
