"""Arrays in NumPy's files, a sample a row, read on demand."""

from __future__ import annotations

import functools
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from onebox.errors import DataError, UsageError
from onebox.feed.checks import check_classes
from onebox.feed.sources.formats.files import open_regular, unreadable
from onebox.feed.sources.formats.npy import Header, read_header, to_tensor
from onebox.feed.sources.formats.records import Records

MAX_UNPACKED_BYTES = 2 << 30  # limit of one compressed array, which has to be held in memory
LOCAL_HEADER_BYTES = 30  # bytes of a zip member's header, before its name (PKWARE's APPNOTE.TXT, 4.3.7)


class NumpyFiles:
    """Inputs and targets in NumPy's files, a sample a row; rows are read on demand.

    Args:
        inputs: A file ``x.npy``; or ``data.npz:x``, the array ``x`` in an archive. Of archives that are compressed,
            arrays of up to 2 GiB are unpacked into memory.
        targets: Likewise; None for samples that are inputs only.
        classes: Names of the classes, where targets number them.

    Attributes:
        classes: Names of the classes, or None.

    Raises:
        DataError: A file is missing, damaged, or truncated, contains objects, or has another number of rows than the
            other.

    Example::

        source = NumpyFiles("images.npy", "labels.npy")
        images, label = source.decode(source.read(0), 0)
    """

    def __init__(
        self,
        inputs: str | os.PathLike[str],
        targets: str | os.PathLike[str] | None = None,
        *,
        classes: Sequence[str] | None = None,
    ) -> None:
        self._parts = [_Rows(os.fspath(part)) for part in (inputs, targets) if part is not None]
        self.classes = None if classes is None else check_classes(classes)
        counts = [len(part) for part in self._parts]
        if len(set(counts)) > 1:
            came = f"{self._parts[0].where} has {counts[0]} rows and {self._parts[1].where} {counts[1]}"
            raise DataError(f"{came}; there has to be one target an input.", path=self._parts[1].path)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._parts[0])

    @functools.cached_property
    def labels(self) -> Tensor:
        """The targets of all rows, ``int64 [N]``.

        Raises:
            UsageError: There are no targets, or they are not whole numbers.
            DataError: The file has become shorter.
        """
        if len(self._parts) < 2 or self._parts[1].dtype.kind not in "iu" or self._parts[1].shape[1:]:
            raise UsageError(f"{self._parts[0].where}: rows have no classes; targets are no whole numbers.")
        rows = b"".join(self._parts[1].read(index) for index in range(len(self)))
        return torch.from_numpy(np.frombuffer(rows, self._parts[1].dtype).astype(np.int64))

    def read(self, index: int) -> tuple[bytes, ...]:
        """Read a row of each array, as stored.

        Raises:
            DataError: It cannot be read.
        """
        return tuple(part.read(index) for part in self._parts)

    def decode(self, raw: tuple[bytes, ...], index: int) -> Tensor | tuple[Tensor, Tensor]:
        """A row of each array as a tensor of its type."""
        rows = [part.decode(row) for part, row in zip(self._parts, raw, strict=True)]
        return rows[0] if len(rows) == 1 else (rows[0], rows[1])

    def name(self, index: int) -> str:
        """The file of the inputs, and the number of the row."""
        return f"{self._parts[0].where}: {index}"


class _Rows:
    """The rows of one array, in its file, or in memory where it was compressed."""

    def __init__(self, place: str) -> None:
        text, _, array = place.rpartition(":") if ".npz:" in place else (place, "", "")
        self.path = Path(text).expanduser()
        self._array = f":{array}" if array else ""
        self.where = self.path.name + self._array
        self._content: bytes | None = None
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                if self.path.suffix == ".npz":
                    header, start = self._of_archive(file, array)
                else:
                    header = read_header(file)
                    start = header.offset
                    self._check_rest(os.fstat(file.fileno()).st_size - start, header)
        except OSError as error:
            raise unreadable(self.path, error) from error
        except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, struct.error, RuntimeError) as error:
            raise self._bad(f"is no array that can be read: {error}") from error
        if not header.shape or not header.shape[0]:
            raise self._bad(f"has an array of shape {list(header.shape)}, and has to have rows, one a sample")
        self._header = header
        self.dtype, self.shape = header.dtype, header.shape
        self._row_bytes = header.values_bytes // header.shape[0]
        self._records = Records([self.path], [header.shape[0]], self._row_bytes, offset=start)

    def __len__(self) -> int:
        return self._header.shape[0]

    def read(self, index: int) -> bytes:
        if self._content is None:
            return self._records.read(index)
        return self._content[index * self._row_bytes : (index + 1) * self._row_bytes]

    def decode(self, row: bytes) -> Tensor:
        return to_tensor(row, self._header.dtype, self._header.shape[1:])

    def _of_archive(self, file: BinaryIO, array: str) -> tuple[Header, int]:
        """Return the header of an array in an archive, and the offset of its values in the file."""
        with zipfile.ZipFile(file) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
            if array not in names:
                todo = f"say {self.path.name}:NAME with one of {', '.join(names[:20]) or 'none, it has no arrays'}"
                raise self._bad(f"has no array {array!r}; {todo}" if array else f"needs the name of an array; {todo}")
            info = archive.getinfo(array + ".npy")
            with archive.open(info) as member:
                header = read_header(cast(BinaryIO, member))
                self._check_rest(info.file_size - header.offset, header)
                if info.compress_type != zipfile.ZIP_STORED:
                    if header.values_bytes > MAX_UNPACKED_BYTES:
                        came = f"is compressed, and unpacked it has {header.values_bytes} bytes"
                        raise self._bad(f"{came}; save it by np.savez, or as .npy, which are read row by row")
                    self._content = member.read(header.values_bytes + 1)
                    self._check_rest(len(self._content), header)
        file.seek(info.header_offset)
        local = file.read(LOCAL_HEADER_BYTES)
        name_bytes, extra_bytes = struct.unpack("<HH", local[26:])
        return header, info.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes + header.offset

    def _check_rest(self, came: int, header: Header) -> None:
        if came != header.values_bytes:
            problem = f"its header says {header.dtype} {list(header.shape)}, {header.values_bytes} bytes of values"
            raise self._bad(f"is cut off or damaged: {problem}, and {came} came. Fetch it again")

    def _bad(self, what: str) -> DataError:
        return DataError(f"{self.path}{self._array} {what}.", path=self.path)
