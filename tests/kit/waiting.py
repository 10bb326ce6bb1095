"""Waits of tests for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

LOOK_S = 0.05
"""Time between two looks."""


def until(condition: Callable[[], _T], within_s: float = 60.0, turn: Callable[[], object] | None = None) -> _T:
    """Wait until a condition holds, and return what it returns then.

    Args:
        condition: What must hold.
        within_s: Bound that only a hang reaches.
        turn: Work to do between two looks; without, a short sleep.

    Raises:
        AssertionError: It does not hold within that time.
    """
    end_s = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > end_s:
            raise AssertionError(f"it does not hold within {within_s:g} s")
        if turn is None:
            time.sleep(LOOK_S)
        else:
            turn()
    return found
