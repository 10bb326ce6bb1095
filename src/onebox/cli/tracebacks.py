"""Tracebacks of a script's errors: the lines of the script, without those of this package above and below them."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import onebox

_OURS = (str(Path(onebox.__file__).parent), "<frozen runpy>", "<frozen importlib")
_USED = (str(Path(torch.__file__).parent), str(Path(concurrent.futures.__file__).parent))
"""Packages that this package calls: frames below its own are not the script's."""

_OUR_FAULT = (AssertionError, AttributeError, KeyError, NameError)
"""Errors that indicate a bug in this package: then all lines are shown, for its developers."""


def without_own_frames(error: BaseException) -> BaseException:
    """Remove this package's frames from the traceback of an error, and of its causes.

    Args:
        error: The error; it and its causes are modified.
    """
    seen: set[int] = set()
    each: Any = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        before = each.__cause__ if each.__cause__ is not None or each.__suppress_context__ else each.__context__
        while before is not None and id(before) not in seen and _pruned(before) is None:
            seen.add(id(before))  # wholly within this package
            before = before.__cause__ or before.__context__
        each.__traceback__ = _pruned(each)
        if each.__cause__ is not None:
            each.__cause__ = before
        each.__context__ = before
        each = before
    return error


def _pruned(error: BaseException) -> TracebackType | None:
    steps = []
    step = error.__traceback__
    while step is not None:
        steps.append(step)
        step = step.tb_next
    if steps and isinstance(error, _OUR_FAULT) and _in(steps[-1], _OURS):
        return error.__traceback__
    while steps and _in(steps[-1], _USED):
        if not any(_in(step, _OURS) for step in _down_from_script(steps)):
            break
        steps.pop()
    kept: TracebackType | None = None
    for step in reversed([step for step in steps if not _in(step, _OURS)]):
        kept = TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return kept


def _down_from_script(steps: list[TracebackType]) -> list[TracebackType]:
    """Return the frames below the last one of the script, which is neither of this package nor of one that it uses."""
    last = max((number for number, step in enumerate(steps) if not _in(step, _OURS + _USED)), default=-1)
    return steps[last + 1 :]


def _in(step: TracebackType, places: tuple[str, ...]) -> bool:
    return step.tb_frame.f_code.co_filename.startswith(places)
