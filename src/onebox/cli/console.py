"""Where the commands print."""

from __future__ import annotations

from rich.console import Console


class OutputConsole(Console):
    """Standard output; a reader that has gone is told as BrokenPipeError, by tables and bars too."""

    def on_broken_pipe(self) -> None:
        """Called inside the handler of the error; rich itself would end the program here."""
        raise BrokenPipeError
