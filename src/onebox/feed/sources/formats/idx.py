"""The IDX file format of MNIST, read strictly.

A file is two zero bytes, a type code, the number of dimensions, each dimension as a big-endian 32-bit number,
then the values, the last dimension running fastest. (The format is described on the MNIST page of Y. LeCun,
C. Cortes and C. Burges, "The MNIST database of handwritten digits".)
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from onebox.errors import DataError
from onebox.feed.sources.formats.files import open_regular

UINT8_CODE = 0x08
GZIP_MAGIC = b"\x1f\x8b"
MAX_VALUES_BYTES = 1 << 30  # EMNIST, the largest of the family, has 0.55 GB of pixels


def read_idx(path: Path, *, dims: int) -> Tensor:
    """Read an IDX file of unsigned bytes, gzipped or not (its first bytes tell).

    Args:
        path: The file.
        dims: Number of dimensions that it has to have.

    Returns:
        Tensor: ``uint8``, of the shape that the file states.

    Raises:
        DataError: The file cannot be read, or is not exactly one well-formed array within the size limit.
    """
    try:
        with open(open_regular(path), "rb") as file:
            zipped = file.read(2) == GZIP_MAGIC
            file.seek(0)
            if not zipped:
                return _read_array(file, path, dims)
            with gzip.GzipFile(fileobj=file) as unzipped:
                return _read_array(cast(BinaryIO, unzipped), path, dims)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, f"its gzip stream is broken ({error})") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.", path=path) from error


def _read_array(stream: BinaryIO, path: Path, dims: int) -> Tensor:
    shape = _read_header(stream, path, dims)
    size_bytes = math.prod(shape)
    if not 0 < size_bytes <= MAX_VALUES_BYTES:
        limit = f"allowed are 1 to {MAX_VALUES_BYTES} bytes of values"
        raise _damaged(path, f"its header says {list(shape)}, {size_bytes} bytes; {limit}")
    # One byte more than expected: detects excess data, and makes gzip verify its checksum.
    values = stream.read(size_bytes + 1)
    if len(values) != size_bytes:
        came = "more" if len(values) > size_bytes else f"only {len(values)}"
        raise _damaged(path, f"its header says {list(shape)}, {size_bytes} bytes of values, and {came} came")
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).view(shape)


def _read_header(stream: BinaryIO, path: Path, dims: int) -> tuple[int, ...]:
    expected = bytes([0, 0, UINT8_CODE, dims])
    magic = stream.read(4)
    if magic != expected:
        came = magic.hex() or "nothing"
        raise _damaged(path, f"it starts with {came}; {dims}-dimensional IDX bytes start with {expected.hex()}")
    header = stream.read(4 * dims)
    if len(header) != 4 * dims:
        raise _damaged(path, f"it ends inside its header, after {4 + len(header)} bytes")
    return struct.unpack(f">{dims}I", header)


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} is damaged or not the right file: {what}. Fetch it again.", path=path)
