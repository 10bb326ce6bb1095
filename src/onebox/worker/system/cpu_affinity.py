"""The cores that a worker's operators run on; its other threads, which mostly wait, run on any.

A thread begins on the cores of the one that starts it, so that those of operators are where the working thread is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator

_everywhere: set[int] = set()
"""Where this process ran before it was told to stay on some cores; empty while it is not."""


def use_cores(cores: Collection[int]) -> None:
    """Let this thread, and those that it starts from now on, run on some cores only; where that is refused, on any."""
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # such as a core that has been switched off since
        os.sched_setaffinity(0, cores)
        _everywhere.update(before)


def use_all_cores() -> None:
    """Let this thread run on any core that the process had at first."""
    if _everywhere:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, _everywhere)


@contextlib.contextmanager
def threads_on_all_cores() -> Iterator[None]:
    """Let threads that are started inside run on any core."""
    mine = os.sched_getaffinity(0)
    use_all_cores()
    try:
        yield
    finally:
        if _everywhere:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, mine)
