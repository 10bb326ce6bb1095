"""NumPy's file format (.npy), read strictly: its header is checked against the size of the file, objects are rejected.

The format is NEP 1's, "A Simple File Format for NumPy Arrays". Nothing is ever unpickled.
"""

from __future__ import annotations

import ast
import io
import math
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 10_000  # NumPy's own limit for untrusted files
KINDS = "?bhilqBHILQefdFD"
"""NumPy's type codes with a PyTorch type, in either byte order."""


@dataclass(frozen=True)
class Header:
    """The header of an array file.

    Args:
        dtype: Type of the values, as stored.
        shape: Sizes of the dimensions.
        offset: Offset of the values, in bytes from the start.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def values_bytes(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: BinaryIO) -> Header:
    """Read the header of an array.

    Raises:
        ValueError: It is not such a file, or its array has an unsupported type or order.
    """
    start = file.read(len(MAGIC) + 4)
    if len(start) < len(MAGIC) + 4 or not start.startswith(MAGIC):
        raise ValueError("it does not begin as a .npy file does")
    version = start[6], start[7]
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"it is of version {version[0]}.{version[1]} of the format; allowed are 1.0 and 2.0")
    size = start[8:] if version == (1, 0) else start[8:] + file.read(2)
    size_bytes = int.from_bytes(size, "little")
    if size_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {size_bytes} bytes; allowed are {MAX_HEADER_BYTES}")
    text = file.read(size_bytes)
    try:
        problem = ast.literal_eval(text.decode("latin-1").strip())
        descr, fortran, shape = problem["descr"], problem["fortran_order"], problem["shape"]
        dtype = np.dtype(descr)
    except (ValueError, TypeError, SyntaxError, KeyError, RecursionError, MemoryError) as error:
        raise ValueError(f"its header is damaged ({error})") from error
    if dtype.char not in KINDS:
        raise ValueError(f"it has values of type {dtype}; allowed are numbers that PyTorch has a type for")
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"its header says shape {shape}")
    if fortran and len(shape) > 1:
        raise ValueError("it is in Fortran's order; save np.ascontiguousarray(array)")
    return Header(dtype, shape, len(start) + len(size) - 2 + size_bytes)


def parse_npy(content: bytes) -> Tensor:
    """Return the array of a whole file as a tensor of the same type and shape.

    Raises:
        ValueError: It is not such a file, or not exactly one array.
    """
    header = read_header(io.BytesIO(content))
    came = len(content) - header.offset
    if came != header.values_bytes:
        problem = f"its header says {header.dtype} {list(header.shape)}, {header.values_bytes} bytes of values"
        raise ValueError(f"{problem}, and {came} came")
    return to_tensor(content[header.offset :], header.dtype, header.shape)


def to_tensor(values: bytes, dtype: np.dtype, shape: tuple[int, ...]) -> Tensor:
    """Convert stored values to a tensor that shares no memory with them."""
    array = np.frombuffer(values, dtype).reshape(shape)
    return torch.from_numpy(array.astype(dtype.newbyteorder("="), copy=True))
