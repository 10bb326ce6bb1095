"""Sleeps that end when they are due, on the monotonic clock."""

from __future__ import annotations

import ctypes
import os
import time

_PR_SET_TIMERSLACK = 29

_LATE_NS = 80_000
"""How late an idle virtual machine often wakes a thread: the last part of a sleep is a busy wait instead."""

_BUSY_SHARE = 0.01
"""Largest part of a sleep that is a busy wait, so that many sleeping threads of a machine need few of its cores."""


def sleep_until(end_ns: int) -> None:
    """Sleep until a time of the monotonic clock, in a busy wait for the last microseconds that lets other threads run,
    of which some end their sleeps at the same time.
    """
    left_ns = end_ns - time.monotonic_ns()
    awake_ns = end_ns - int(min(_LATE_NS, _BUSY_SHARE * left_ns))
    while (left_ns := awake_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns / 1e9)
    while time.monotonic_ns() < end_ns:
        os.sched_yield()


def wake_on_time() -> None:
    """Make this thread's sleeps end on time, not up to 50 µs later to save power."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
