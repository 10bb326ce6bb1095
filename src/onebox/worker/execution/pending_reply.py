"""Replies whose values an asynchronous device is still computing, so that its next work is queued meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from onebox.wire.protocol.responses import GroupTraffic, MessageTimes, Reply, Result
from onebox.worker.accelerator import DeviceFailed, Event
from onebox.worker.comm.api import RankLost
from onebox.worker.progress import Trace

Deferred = Callable[[], Result]
"""Returns a result when the device has done the work before it."""

Outcome = Result | Deferred

LOOK_S = 0.01
"""Interval at which groups are checked while a reply waits for the device: it asks for every operation that goes on."""

LOST_S = 15.0
"""Longest time that a device may go on after a group that it used was interrupted, whose abort ends its kernels."""


class PendingReply:
    """A reply to a message.

    Args:
        number: The message's number.
        results: The results of its instructions.
        frames: Frames of tensors, or functions that return them, as of results.
        trace: Times and memory of the instructions.
        after: Mark in the device's work with which everything is complete; ``None`` if it is.
        check: Requires that no group has failed since the message began.
        traffic: Returns what was carried to workers of other hosts.
    """

    def __init__(
        self,
        number: int,
        results: Sequence[Outcome],
        frames: Sequence[Any],
        trace: Trace,
        after: Event | None,
        check: Callable[[], None],
        traffic: Callable[[], tuple[GroupTraffic, ...]],
    ) -> None:
        self.number = number
        self._results = results
        self._frames = frames
        self._trace = trace
        self.after = after
        self._check = check
        self._traffic = traffic
        self.executed: Callable[[], tuple[MessageTimes, ...]] = tuple
        """Returns the messages of the script's stream that the device has executed since."""
        self._look_s = 0.0
        self._lost_s = 0.0

    @property
    def complete(self) -> bool:
        """True if :meth:`message` can be called.

        The device's work also ends with the kernels of an operation between workers that was interrupted, whose values
        are undefined. So the groups are checked after it, and not before.

        Raises:
            RankLost: A group has failed since the message began, and the device's work is over.
            DeviceFailed: It is not over long after such a failure.
            RuntimeError: The device has failed.
        """
        if self.after is None:
            return True
        over, now_s = self.after.query(), time.monotonic()
        if over or now_s >= self._look_s:
            self._look_s = now_s + LOOK_S
            try:
                self._check()
            except RankLost as error:
                if over:
                    raise
                self._lost_s = self._lost_s or now_s
                if now_s - self._lost_s > LOST_S:
                    raise DeviceFailed(f"the device goes on {LOST_S:.0f} s after a group failed: {error}") from error
        return over

    def message(self) -> tuple[Reply, list[Any]]:
        """Return the message with its frames."""
        results = tuple(each() if callable(each) else each for each in self._results)
        frames = [each() if callable(each) else each for each in self._frames]
        times_ns, used_bytes = self._trace.times_ns(), tuple(self._trace.used_bytes)
        traffic = self._traffic() if times_ns else ()
        return Reply(self.number, results, None, times_ns, used_bytes, traffic, self.executed()), frames
