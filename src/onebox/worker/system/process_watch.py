"""Detection of the end of another process of this host."""

from __future__ import annotations

from pathlib import Path


class ProcessWatch:
    """Watch of a process, which detects its end even if its parent has not collected it.

    Args:
        process: Its id.

    Raises:
        ProcessLookupError: There is no such process.
    """

    def __init__(self, process: int) -> None:
        self.process = process
        self._began = self._read()
        if not self._began:
            raise ProcessLookupError(f"process {process} has ended")

    def ended(self) -> bool:
        """Return whether it has ended."""
        return self._read() != self._began

    def _read(self) -> str:
        """Return the start time of the process, or an empty string if it has ended."""
        try:
            stat = Path(f"/proc/{self.process}/stat").read_text()
        except OSError:
            return ""
        state, *rest = stat[stat.rindex(")") + 1 :].split()  # the name before it may contain any characters
        return "" if state in "ZX" else rest[18]
