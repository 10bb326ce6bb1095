"""A command in a session of its own, of which nothing is left when it ends or its time is over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DUMP_S = 3.0
"""Time for the stacks of all threads to be written before the processes are killed."""

LEAVE_S = 3.0
"""Time for workers to end after the command that started them."""

_STATE, _SESSION = 0, 3
"""Places in ``/proc/PID/stat`` behind the name of the program."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a command ended.

    Args:
        status: Exit status; negative for a signal.
        seconds: Duration.
        late: Whether its time was over.
        left: Number of processes that were alive :data:`LEAVE_S` after it.
    """

    status: int
    seconds: float
    late: bool
    left: int

    def problem(self, limit_s: float) -> str:
        """Return what was wrong; empty where the command did as it should within its time."""
        if self.late:
            return f"not over after {limit_s:.0f} s; its processes were ended"
        if self.status:
            return f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
        return f"{self.left} processes were left and have been ended" if self.left else ""


def run(command: Sequence[str], *, log: Path, limit_s: float, folder: Path, environment: Mapping[str, str]) -> Ending:
    """Run a command, and end all processes of its session.

    One whose time is over gets SIGABRT, at which Python writes the stacks of all threads, then SIGKILL with all of its
    processes. So do they where this call is interrupted.

    Args:
        command: It.
        log: File for all of its output.
        limit_s: Longest duration.
        folder: Working directory.
        environment: Its environment variables.
    """
    begin_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**environment, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            late = not _ends(process, limit_s)
            seconds = time.monotonic() - begin_s
            if late:
                process.send_signal(signal.SIGABRT)
                _ends(process, DUMP_S)
            return Ending(status=_status(process), seconds=seconds, late=late, left=_end(process.pid, late))
        finally:
            _kill(process.pid)
            process.wait()


def _ends(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(limit_s)
        return True
    return False


def _status(process: subprocess.Popen[bytes]) -> int:
    status = process.poll()
    return -signal.SIGKILL if status is None else status


def _end(session: int, late: bool) -> int:
    """Wait until a session has no process or the time for that is over, and return the number of those left."""
    until_s = time.monotonic() + (0.0 if late else LEAVE_S)
    while (left := len(list(_members(session)))) and time.monotonic() < until_s:
        time.sleep(0.05)
    return left


def _kill(session: int) -> None:
    """Kill all processes of a session, and those that they start meanwhile."""
    for _ in range(10):
        members = list(_members(session))
        for member in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member, signal.SIGKILL)
        if not members:
            return
        time.sleep(0.05)


def _members(session: int) -> Iterator[int]:
    """Yield the processes of a session that are alive."""
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[_SESSION]) == session and fields[_STATE] not in "ZX":
                yield int(path.name)
