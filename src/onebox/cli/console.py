"""Where the commands print."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.table import Table

_WIDEST = 120
_UNLIMITED = 10_000


class OutputConsole(Console):
    """Standard output; a reader that has gone is told as BrokenPipeError, by tables and bars too."""

    def on_broken_pipe(self) -> None:
        """Called inside the handler of the error; rich itself would end the program here."""
        raise BrokenPipeError

    def widen(self, tables: Iterable[Table]) -> None:
        """Let tables go on over the edge of a narrow terminal, up to 120 columns: cut cells would say nothing."""
        widest = max(map(self._natural, tables))
        self.width = max(self.width, min(widest, _WIDEST))

    def fitting(self, make: Callable[[bool], Table]) -> Table:
        """Return a table as it is, or its narrow form where the terminal has not the width.

        Where nobody said how wide it is, as in a pipe, that is 120 columns.

        Args:
            make: Makes the table, its narrow form if so told.
        """
        wide = make(False)
        told = self.is_terminal or os.environ.get("COLUMNS")
        room = self.width if told else _WIDEST
        return wide if self._natural(wide) <= room else make(True)

    def _natural(self, table: Table) -> int:
        """Return the columns that a table takes where there is room."""
        return self.measure(table, options=self.options.update(max_width=_UNLIMITED)).maximum
