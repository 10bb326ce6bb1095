"""CPU affinity: the cores of a worker's operators; its other threads, which mostly wait, may use any core.

A thread inherits the affinity of the thread that starts it, so that operators' threads have that of the working thread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator

_everywhere: set[int] = set()
"""Affinity of this process before it was restricted; empty if it is not restricted."""


def use_cores(cores: Collection[int]) -> None:
    """Restrict this thread, and those that it starts later, to some cores; ignored if the system refuses."""
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # such as a core that has been disabled since
        os.sched_setaffinity(0, cores)
        _everywhere.update(before)


def use_all_cores() -> None:
    """Let this thread use all cores that the process had at first."""
    if _everywhere:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, _everywhere)


@contextlib.contextmanager
def threads_on_all_cores() -> Iterator[None]:
    """Let threads that are started in the context use all cores."""
    mine = os.sched_getaffinity(0)
    use_all_cores()
    try:
        yield
    finally:
        if _everywhere:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, mine)
