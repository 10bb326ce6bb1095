"""The clock of an emulated device: how far its work has come, on the machine's monotonic clock."""

from __future__ import annotations

import math
import time

_MOST_S = 1e8
_LAST_NS = 1 << 62
"""Longest work, and the last time: three years and a century, so that no time is too long for a message."""


class DeviceClock:
    """The time at which a device has done all that it was given.

    It is ahead of the machine's clock as long as the device is busy, and behind it where the process is late: what the
    process does costs the device no time.

    Args:
        speed: Divisor of the costs of work.
    """

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self.now_ns = time.monotonic_ns()

    def work(self, cost_s: float) -> None:
        """Do work that costs a time at speed 1."""
        self.wait(self.now_ns + math.ceil(min(cost_s / self.speed, _MOST_S) * 1e9))

    def wait(self, at_ns: int) -> None:
        """Wait for what happens at a time."""
        self.now_ns = min(max(self.now_ns, at_ns), _LAST_NS)
