"""Files of records that all have the same size, read in any order without a memory map.

A positioned read (`pread`) costs as little as a page fault of a map, but it releases the GIL while it waits, and a file
that has become shorter meanwhile is an error, not a crash of the process.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from pathlib import Path

from onebox.errors import DataError
from onebox.feed.sources.formats.files import OpenFiles, unreadable


class Records:
    """Fixed-size records in consecutive files.

    Args:
        paths: The files.
        counts: Number of records of each.
        record_bytes: Bytes of a record.
        offset: Offset of the first record of each file, in bytes.
        step_bytes: Distance between the beginnings of records; by default ``record_bytes``.

    Raises:
        DataError: A file cannot be read.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        counts: Sequence[int],
        record_bytes: int,
        *,
        offset: int = 0,
        step_bytes: int | None = None,
    ) -> None:
        self._files = OpenFiles(paths)
        self._ends = list(itertools.accumulate(counts))
        self._record_bytes = record_bytes
        self._offset = offset
        self._step_bytes = record_bytes if step_bytes is None else step_bytes

    def __len__(self) -> int:
        """Number of records in all files."""
        return self._ends[-1]

    def place(self, index: int) -> tuple[Path, int]:
        """Return the file of a record, and the record's number in it."""
        number, inside = self._find(index)
        return self._files.paths[number], inside

    def read(self, index: int) -> bytes:
        """Read a record.

        Raises:
            DataError: It cannot be read, or the file has become shorter.
        """
        number, inside = self._find(index)
        path = self._files.paths[number]
        try:
            raw = self._files.read(number, self._record_bytes, self._offset + inside * self._step_bytes)
        except OSError as error:
            raise unreadable(path, error, index) from error
        if len(raw) < self._record_bytes:
            problem = f"{path}: record {inside} is cut off, the file has become shorter while it was used"
            raise DataError(f"{problem}. Fetch it again.", path=path, sample=index)
        return raw

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self._ends[-1]:
            raise IndexError(f"sample {index} of {self._ends[-1]}")
        number = bisect.bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)
