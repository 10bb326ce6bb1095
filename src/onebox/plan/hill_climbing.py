"""Hill climbing, the loop of every local search of the planner: layouts, placements, cuts, orders of actions. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_State = TypeVar("_State")


def climb(start: _State, improved: Callable[[_State], _State | None], spent: Callable[[], bool]) -> _State:
    """Follow improvements until there are none, or until the effort is used up.

    Args:
        start: The state to begin with.
        improved: Returns a better state near another one, or ``None``.
        spent: Returns whether the effort is used up.
    """
    while not spent():
        better = improved(start)
        if better is None:
            break
        start = better
    return start
