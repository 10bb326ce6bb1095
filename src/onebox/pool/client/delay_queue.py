"""Emulated latency and bandwidth of the channel between the client and its workers.

Pure: the time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")


class DelayQueue(Generic[_T]):
    """A queue whose items become available in order after a delay.

    One thread may put while another takes.

    Args:
        latency_s: Delay of every item in seconds; 0 for a plain queue.
        bandwidth_bps: Bytes per second that enter the queue; an item waits until those before it have entered.
    """

    def __init__(self, latency_s: float = 0.0, bandwidth_bps: float = math.inf) -> None:
        self.latency_s = latency_s
        self.plain = not latency_s and bandwidth_bps == math.inf
        self._bandwidth_bps = bandwidth_bps
        self._free_s = -math.inf
        self._queue: deque[tuple[float, _T]] = deque()

    def put(self, item: _T, now_s: float, size_bytes: int = 0) -> None:
        """Add an item."""
        self._free_s = max(self._free_s, now_s) + size_bytes / self._bandwidth_bps
        self._queue.append((self._free_s + self.latency_s, item))

    def take(self, now_s: float) -> list[_T]:
        """Remove and return the items that are due; all of them from a plain queue."""
        queue, taken = self._queue, []
        while queue and (self.plain or queue[0][0] <= now_s):
            taken.append(queue.popleft()[1])
        return taken

    def take_all(self) -> list[_T]:
        """Remove and return all items, due or not."""
        queue, taken = self._queue, []
        while queue:
            taken.append(queue.popleft()[1])
        return taken

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next item is due; infinite where there is none."""
        try:
            due_s = self._queue[0][0]
        except IndexError:
            return math.inf
        return max(0.0, due_s - now_s)
