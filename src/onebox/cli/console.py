"""The console of the commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.table import Table

_WIDEST = 120
_UNLIMITED = 10_000


class OutputConsole(Console):
    """Standard output; a closed pipe raises BrokenPipeError, also from tables and bars."""

    def on_broken_pipe(self) -> None:
        """Re-raise the error that is being handled; rich itself would end the program here."""
        raise BrokenPipeError

    def widen(self, tables: Iterable[Table]) -> None:
        """Let tables exceed a narrow terminal, up to 120 columns, rather than be cut."""
        widest = max(map(self._natural, tables))
        self.width = max(self.width, min(widest, _WIDEST))

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

    def _natural(self, table: Table) -> int:
        """Return the natural width of a table in columns."""
        return self.measure(table, options=self.options.update(max_width=_UNLIMITED)).maximum
