"""Observation of another process of this host: whether it has ended, and whether it reads from a disk."""

from __future__ import annotations

from pathlib import Path

DISK_WAIT_S = 60.0
"""Longest wait for a disk that is not taken for a hang: of a process whose pages were dropped or swapped on a machine
with a slow or busy disk."""


class ProcessWatch:
    """Watch of a process, which detects its end even if its parent has not collected it.

    Args:
        process: Its id.

    Raises:
        ProcessLookupError: There is no such process.
    """

    def __init__(self, process: int) -> None:
        self.process = process
        self._began = start_time(process)
        if not self._began:
            raise ProcessLookupError(f"process {process} has ended")

    def ended(self) -> bool:
        """Return whether it has ended."""
        return start_time(self.process) != self._began


def start_time(process: int) -> str:
    """Return the start time of a process, in ticks since the start of the host; an empty string if it has ended."""
    state, *rest = _stat(f"/proc/{process}/stat") or ("X",)
    return "" if state in "ZX" else rest[18]


def disk_reads(process: int) -> tuple[int, bool]:
    """Return the number of pages that a process has read from disks when it needed them, and whether one of its threads
    waits for a disk now; (0, False) if it has ended.
    """
    fields = _stat(f"/proc/{process}/stat")
    if not fields:
        return 0, False
    threads = Path(f"/proc/{process}/task").glob("*/stat")
    return int(fields[9]), any((_stat(str(thread)) or "X")[0] == "D" for thread in threads)


def _stat(path: str) -> list[str]:
    """Return the fields of a process or thread from its state on, as in proc(5); nothing if it has ended."""
    try:
        stat = Path(path).read_text()
    except OSError:
        return []
    return stat[stat.rindex(")") + 1 :].split()  # the name before it may contain any characters
