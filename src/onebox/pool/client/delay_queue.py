"""An emulated way of the channel between the client and its workers: its latency, and how many bytes go over it.

Pure: the time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")


class DelayQueue(Generic[_T]):
    """A queue that what is put into it leaves some time later, in the order in which it came.

    One thread may put while another takes.

    Args:
        latency_s: Seconds that everything spends in it; 0 for a plain queue.
        bandwidth_bps: Bytes per second that go in; what comes before others have waits for them first.
    """

    def __init__(self, latency_s: float = 0.0, bandwidth_bps: float = math.inf) -> None:
        self.latency_s = latency_s
        self.plain = not latency_s and bandwidth_bps == math.inf
        self._bandwidth_bps = bandwidth_bps
        self._free_s = -math.inf
        self._queue: deque[tuple[float, _T]] = deque()

    def put(self, item: _T, now_s: float, size_bytes: int = 0) -> None:
        """Put something in."""
        self._free_s = max(self._free_s, now_s) + size_bytes / self._bandwidth_bps
        self._queue.append((self._free_s + self.latency_s, item))

    def take(self, now_s: float) -> list[_T]:
        """Take out what has been in for long enough; all of it from a plain queue."""
        queue, taken = self._queue, []
        while queue and (self.plain or queue[0][0] <= now_s):
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
