"""Progress of a worker, and waits that are marked in it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from onebox.worker.system.clock import sleep_until


class WorkerProgress:
    """How far a worker is; written by the thread that works, read by the one that watches."""

    def __init__(self) -> None:
        self.executed = 0
        self.doing = ""
        self.waiting = False

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Mark what happens inside as waiting for others, which is no stall of this worker."""
        before, self.waiting = self.waiting, True
        try:
            yield
        finally:
            self.waiting = before


def wait_until(end_ns: int, progress: WorkerProgress) -> None:
    """Sleep until a time on the clock of ``time.monotonic_ns``, never less.

    Args:
        end_ns: When to go on; at once where that has passed.
        progress: Told that the worker waits, so that it is not taken for one that hangs.
    """
    if end_ns > time.monotonic_ns():
        with progress.wait():
            sleep_until(end_ns)
