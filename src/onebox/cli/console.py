"""Where the commands print."""

from __future__ import annotations

from collections.abc import Iterable

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
        unlimited = self.options.update(max_width=_UNLIMITED)
        widest = max(self.measure(table, options=unlimited).maximum for table in tables)
        self.width = max(self.width, min(widest, _WIDEST))
