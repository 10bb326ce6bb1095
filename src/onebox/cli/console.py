"""The console of the commands."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable

from rich.console import Console, RenderableType
from rich.table import Table

_WIDEST = 120
UNLIMITED = 10_000


class OutputConsole(Console):
    """Standard output; a closed pipe raises BrokenPipeError, also from tables and bars.

    Characters that its encoding lacks are replaced: that of Windows has few, where the output goes to a file or a pipe.
    """

    def __init__(self, *, highlight: bool = True, quiet: bool = False) -> None:
        super().__init__(highlight=highlight, quiet=quiet)
        if isinstance(sys.stdout, io.TextIOWrapper) and not self.encoding.startswith("utf"):
            sys.stdout.reconfigure(errors="replace")

    def on_broken_pipe(self) -> None:
        """Re-raise the error that is being handled; rich itself would end the program here."""
        raise BrokenPipeError

    def write_line(self, text: str) -> None:
        """Print a text literally; the terminal wraps it."""
        self.print(text, markup=False, highlight=False, soft_wrap=True)

    def widen(self, tables: Iterable[RenderableType], most: int = _WIDEST) -> None:
        """Let tables exceed a narrow terminal, up to a number of columns, rather than be cut."""
        widest = max(map(self._natural, tables))
        self.width = max(self.width, min(widest, most))

    def fitting(self, make: Callable[[bool], Table]) -> Table:
        """Return a table, or its narrow form where the terminal is not wide enough.

        A width of 120 columns is assumed where it is unknown, as in a pipe.

        Args:
            make: Makes the table, or its narrow form for True.
        """
        wide = make(False)
        told = self.is_terminal or os.environ.get("COLUMNS")
        room = self.width if told else _WIDEST
        return wide if self._natural(wide) <= room else make(True)

    def _natural(self, table: RenderableType) -> int:
        """Return the natural width of a table in columns."""
        return self.measure(table, options=self.options.update(max_width=UNLIMITED)).maximum
