"""A run's metrics as JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from onebox.report.files import to_json


class MetricsLog:
    """Appends one JSON object per line to a file; each line is flushed as it is written.

    JSON has no NaN and no infinity: a number that is not finite is written as ``null``, so that a loss that
    diverges is on record and the file stays readable. What a crash left of an unfinished last line is dropped
    when the file is opened.

    Args:
        path: The file; its folder exists. What is in it stays.

    Raises:
        OSError: The file cannot be opened.

    Example:
        >>> with MetricsLog(folder.metrics) as log:  # doctest: +SKIP
        ...     log.write({"step": 1, "loss": 0.5})
    """

    def __init__(self, path: Path | str) -> None:
        self._file = Path(path).open("ab")  # noqa: SIM115 - close() closes it
        _drop_unfinished_line(Path(path))

    def write(self, record: Mapping[str, object]) -> None:
        """Append one line.

        Args:
            record: Names to values.

        Raises:
            UsageError: A value cannot be expressed in JSON; nothing is written.
            ValueError: The log is closed.
        """
        self._file.write(to_json(record) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _drop_unfinished_line(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
