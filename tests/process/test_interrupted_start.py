"""Ctrl-C at any point of opening a pool: that ends, with its workers and the client's loop."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType
from typing import Any

import psutil
import pytest

from onebox.pool import open_pool
from tests.kit.waiting import until

POINTS = 30


class Interrupt:
    """Raises ``KeyboardInterrupt`` at a line that the main thread comes to; counts them without one.

    Not within Python's own ``threading``, where handlers run at fewer points than a tracer.
    """

    def __init__(self, at: int | None = None) -> None:
        self.lines, self._at = 0, at

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        self.lines += event == "line"
        if self._at is not None and self.lines >= self._at and frame.f_globals.get("__name__") != "threading":
            self._at = None
            raise KeyboardInterrupt
        return self


def opened(interrupt: Interrupt) -> None:
    """Open a pool and close it."""
    sys.settrace(interrupt)
    try:
        pool = open_pool("cpu*2", threads=1)
    finally:
        sys.settrace(None)
    pool.close()


def loops() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "onebox-client-loop"}


def workers() -> list[int]:
    return [each.pid for each in psutil.Process().children(recursive=True) if each.name() == "onebox-worker"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_a_pool_whose_opening_is_interrupted_ends() -> None:
    """What was opened in the very line before may be left to the collector, which warns of it."""
    opened(Interrupt())  # with a zygote, which stays
    counted = Interrupt()
    opened(counted)
    serving, running = loops(), set(workers())  # of a pool that tests share
    for point in range(POINTS):
        with pytest.raises(KeyboardInterrupt):
            opened(Interrupt(1 + point * counted.lines // (POINTS + 1)))
        gc.collect()
        assert loops() <= serving
        until(lambda: set(workers()) <= running)
