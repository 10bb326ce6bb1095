"""Waits of tests for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

LOOK_S = 0.05
"""Time between two looks."""


def until(condition: Callable[[], _T], within_s: float = 60.0) -> _T:
    """Wait until a condition holds, and return what it returns then.

    Raises:
        AssertionError: It does not hold within that time.
    """
    end_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"it does not hold within {within_s:g} s"
        time.sleep(LOOK_S)
    return found
