"""A run's metrics as JSON lines."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from onebox.errors import UsageError
from onebox.files import open_regular, put_file, read_regular
from onebox.report.run.json_files import to_json

VERSION = 2
"""Version of the records of a run, and of its summary; those of version 1 have no account and do not name theirs."""

_LARGEST_BYTES = 4 << 30
_WAITING_BYTES = 16 << 20
"""Limit of buffered lines that cannot be written; later lines are lost."""


class MetricsLog:
    """Appends one JSON object per line to a file, each line at once.

    Lines that cannot be written, as on a full disk, are buffered, up to a limit, and written before the next line.

    JSON has no NaN and no infinity: a number that is not finite is written as ``null``, so that a diverging loss is
    recorded and the file stays readable. An incomplete last line, as after a crash, is dropped when the file is opened.

    Args:
        path: The file; its folder exists. Existing lines stay.

    Raises:
        OSError: The file cannot be opened.

    Example:
        >>> with MetricsLog(folder.metrics) as log:  # doctest: +SKIP
        ...     log.write({"step": 1, "loss": 0.5})
    """

    def __init__(self, path: Path | str) -> None:
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - close() closes it
        self._waiting = bytearray()
        _drop_unfinished_line(Path(path))

    def write(self, record: Mapping[str, object]) -> None:
        """Append one line.

        Args:
            record: Values by name.

        Raises:
            UsageError: A value cannot be expressed in JSON; nothing is written.
            OSError: It cannot be written now; a later call tries again.
            ValueError: The log is closed.
        """
        line = to_json(record) + b"\n"
        if len(self._waiting) + len(line) <= _WAITING_BYTES:
            self._waiting += line
        self._write()

    def _write(self) -> None:
        while self._waiting:
            written = self._file.write(self._waiting)
            del self._waiting[:written]

    def close(self) -> None:
        """Write buffered lines, if possible, and close the file. Idempotent."""
        if not self._file.closed:
            with self._file, contextlib.suppress(OSError):
                self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _drop_unfinished_line(path: Path) -> None:
    os.close(open_regular(path))  # to open a pipe would block
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def rewind_metrics(path: Path | str, *, step: int, epochs: float = math.inf) -> None:
    """Drop the records of what comes after a given step, which a resumed run writes again.

    Args:
        path: The file; nothing happens where there is none.
        step: The last step that stays. A record without a ``step`` stays too.
        epochs: Number of epochs whose results stay.

    Raises:
        UsageError: A line is not a JSON object.
        OSError: The file cannot be read or written.
    """
    path = Path(path)
    if not path.exists():
        return
    content = read_regular(path, _LARGEST_BYTES)
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    kept = [line for line in lines if _stays(path, line, step, epochs)]
    put_file(path, b"".join(kept), private=False)


def _stays(path: Path, line: bytes, step: int, epochs: float) -> bool:
    try:
        record = msgspec.json.decode(line, type=dict[str, Any])
        closes = record.get("event") in ("epoch", "account", "feed")
        return float(record.get("step", 0)) <= step and (not closes or float(record.get("epoch", 0)) <= epochs)
    except (msgspec.DecodeError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {line[:80]!r} is no record of a run: {error}") from None
