"""Sleeps that end when they are due, on the monotonic clock."""

from __future__ import annotations

import ctypes
import time

_PR_SET_TIMERSLACK = 29


def sleep_until(end_ns: int) -> None:
    """Sleep until a time of the monotonic clock."""
    while (left_ns := end_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns / 1e9)


def wake_on_time() -> None:
    """Make this thread's sleeps end on time, not up to 50 µs later to save power."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
