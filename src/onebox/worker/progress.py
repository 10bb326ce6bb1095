"""Progress of a worker, and waits that are marked in it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from onebox.worker.system.clock import sleep_until


class WorkerProgress:
    """Progress of a worker; written by the working thread, read by the watching thread."""

    def __init__(self) -> None:
        self.executed = 0
        self.doing = ""
        self.waiting = False

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Mark the context as waiting for others, which is not a stall of this worker."""
        before, self.waiting = self.waiting, True
        try:
            yield
        finally:
            self.waiting = before


def wait_until(end_ns: int, progress: WorkerProgress) -> None:
    """Sleep until a time on the clock of ``time.monotonic_ns``, never less.

    Args:
        end_ns: The time; returns at once if it has passed.
        progress: Notified of the wait, so that the worker does not appear to hang.
    """
    if end_ns > time.monotonic_ns():
        with progress.wait():
            sleep_until(end_ns)
