"""Scripts that train on a pool of their own, in a process of their own, for tests of how a process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.kit import warm

REPOSITORY = Path(__file__).resolve().parents[3]
START_S = 240.0

_HEADER = """
import os, signal, sys, time
import torch
import onebox
from onebox.pool import open_pool
from tests.process.faults.training import batch, parts, steps, train, trainer_on

signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background of a shell ignores it


def ready(pool):
    print("workers", *pool.process_ids, flush=True)


if __name__ == "__main__":
"""


class Script:
    """A script that is running; leaving the context kills what is left of it.

    Args:
        folder: Where to put it.
        body: Its main part. It calls ``ready(pool)`` when the test may go on.
        environment: Variables that it has beside ours.
        paths: Folders that Python is to look into first.
    """

    def __init__(
        self,
        folder: Path,
        body: str,
        environment: Mapping[str, str] | None = None,
        paths: Sequence[Path] = (),
    ) -> None:
        path = folder / "script.py"
        path.write_text(_HEADER + "".join(f"    {line}\n" for line in body.strip().splitlines()))
        self.workers: list[int] = []
        self._process: subprocess.Popen[str] = warm.Popen(
            [sys.executable, path],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**warm.single(), "PYTHONPATH": os.pathsep.join(map(str, [*paths, REPOSITORY])), **(environment or {})},
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until the script has called ``ready``; then :attr:`workers` holds the process ids of its workers."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("workers "), self._process.communicate()
        self.workers = [int(word) for word in line.split()[1:]]

    def wait_for(self, beginning: str) -> None:
        """Wait until the script has written a line that begins so."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(beginning):
                return
        raise AssertionError(self._process.communicate())

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the process, or to its process group as a terminal does."""
        (os.killpg if group else os.kill)(self.pid, number)

    def end(self, within_s: float) -> tuple[int, str, str]:
        """Wait for the end and return the exit status and what it wrote to standard output and error."""
        output, errors = self._process.communicate(timeout=within_s)
        return self._process.returncode, output, errors


def gone(processes: list[int], within_s: float) -> bool:
    """Tell whether processes have ended within a time; who is to reap orphans may take longer."""
    return happens(lambda: not any(runs(process) for process in processes), within_s)


def runs(process: int) -> bool:
    """Tell whether a process has not ended."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def happens(condition: Callable[[], bool], within_s: float) -> bool:
    """Tell whether something comes true within a time."""
    end_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True
