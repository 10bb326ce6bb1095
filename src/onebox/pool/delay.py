"""Emulated latency of the channel between the client and its workers. Pure: the time is an argument."""

from __future__ import annotations

import math
from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")


class DelayLine(Generic[_T]):
    """A queue that what is put into it leaves a fixed time later, in the order in which it came.

    One thread may put while another takes.

    Args:
        latency_s: Seconds that everything spends in it; 0 for a plain queue.
    """

    def __init__(self, latency_s: float = 0.0) -> None:
        self.latency_s = latency_s
        self._queue: deque[tuple[float, _T]] = deque()

    def put(self, item: _T, now_s: float) -> None:
        """Put something in."""
        self._queue.append((now_s + self.latency_s, item))

    def take(self, now_s: float) -> list[_T]:
        """Take out what has been in for long enough; all of it where there is no latency."""
        queue, taken = self._queue, []
        while queue and (not self.latency_s or queue[0][0] <= now_s):
            taken.append(queue.popleft()[1])
        return taken

    def take_all(self) -> list[_T]:
        """Take out everything, whether or not it is due."""
        queue, taken = self._queue, []
        while queue:
            taken.append(queue.popleft()[1])
        return taken

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next thing is due; infinite where there is none."""
        try:
            due_s = self._queue[0][0]
        except IndexError:
            return math.inf
        return max(0.0, due_s - now_s)
