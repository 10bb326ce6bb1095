"""Ends of killed processes: waited for with a bound, and reaped later where they do not come.

A killed process ends at once, unless it waits in the kernel for something that nothing interrupts, such as a driver or
a network file system. No caller waits for that: the process is left behind, with a line in the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import threading
from typing import NamedTuple, Protocol

KILLED_S = 2.0
"""Longest wait for the end of a killed process; the kernel usually takes some hundredths of a second."""

_NEWS = 256

_LOG = logging.getLogger("onebox")


class WaitableProcess(Protocol):
    """A process that can be waited for; ``subprocess.Popen``, and forked ones."""

    @property
    def pid(self) -> int:
        """The process id."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: It takes longer.
        """

    def kill(self) -> None:
        """Kill it."""


class LeftProcess(NamedTuple):
    """News of a process that was left behind.

    Args:
        name: Its purpose.
        pid: Its process id.
        ended: Whether it has ended meanwhile; otherwise it was left a moment ago.
    """

    name: str
    pid: int
    ended: bool


class LeftProcesses:
    """Processes that were killed and did not end in time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[int, tuple[str, WaitableProcess]] = {}  # by a descriptor of the process
        self._news: list[LeftProcess] = []

    def __len__(self) -> int:
        return len(self._left)

    def add(self, process: WaitableProcess, name: str, descriptor: int) -> None:
        """Add a process.

        Args:
            process: The process.
            name: Its purpose.
            descriptor: A process descriptor, which this object takes over.
        """
        _LOG.warning(
            "%s, process %d, was killed and does not end: it waits in the kernel, perhaps for a driver or a file "
            "system; it is left behind",
            name,
            process.pid,
        )
        with self._lock:
            self._left[descriptor] = name, process
            self._news.append(LeftProcess(name, process.pid, ended=False))

    def reap(self) -> None:
        """Reap those that have ended."""
        with self._lock:
            for descriptor, (name, process) in list(self._left.items()):
                if has_ended(descriptor, 0.0):
                    del self._left[descriptor]
                    os.close(descriptor)
                    self._news.append(LeftProcess(name, process.pid, ended=True))
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0)

    def news(self) -> list[LeftProcess]:
        """Reap those that have ended; return what has happened since the last call."""
        self.reap()
        with self._lock:
            news, self._news = self._news[-_NEWS:], []
        return news


LEFT_BEHIND = LeftProcesses()
"""The processes that this one has left behind."""


def end_process(
    process: WaitableProcess, name: str, *, grace_s: float, killed_s: float = KILLED_S, descriptor: int = -1
) -> bool:
    """End a child process: wait a while for it to end by itself, then kill it; leave it behind if that has no effect.

    Args:
        process: The process.
        name: Its purpose, for the log.
        grace_s: How long it may take to end by itself.
        killed_s: How long it may take to end once it is killed.
        descriptor: A process descriptor, where there is one.

    Returns:
        Whether it has ended.
    """
    LEFT_BEHIND.reap()
    try:
        process.wait(timeout=grace_s)
        return True
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        process.wait(timeout=killed_s)
        return True
    except subprocess.TimeoutExpired:
        LEFT_BEHIND.add(process, name, os.dup(descriptor) if descriptor >= 0 else os.pidfd_open(process.pid))
        return False


def has_ended(descriptor: int, timeout_s: float) -> bool:
    """Wait for the end of a process; return whether it came in that time.

    Args:
        descriptor: A process descriptor.
        timeout_s: Bound of the wait.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
