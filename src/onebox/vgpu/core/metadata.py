"""Layout of a tensor that lives on a worker: element type, shape and position of the elements.

Instances are interned: tensors of equal layout share one, so that comparison and hashing are by identity, which makes
the key of an operator cheap.
"""

from __future__ import annotations

import threading
import weakref
from math import prod
from typing import Any

import torch
from torch import Tensor

from onebox.wire import DTYPES, Strided, dtype_name


class Metadata:
    """The layout of a dense tensor; made only by :func:`metadata` and related functions.

    Args:
        dtype: Element type.
        shape: Sizes, outermost first.
        strides: Elements from one index to the next, for each dimension.
        offset: Elements from the start of the storage to the first one.
        storage_bytes: Bytes of the storage.
        conjugate: Whether the elements are the conjugates of the stored ones, as in PyTorch's lazy ``conj``.
        negative: Whether they are the negatives of the stored ones, likewise.
    """

    __slots__ = (
        "__weakref__", "conjugate", "contiguous", "dtype", "negative", "offset", "plain", "shape", "storage_bytes",
        "strides",
    )  # fmt: skip

    def __init__(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        storage_bytes: int,
        conjugate: bool = False,
        negative: bool = False,
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.strides = strides
        self.offset = offset
        self.storage_bytes = storage_bytes
        self.conjugate = conjugate
        self.negative = negative
        self.plain = not (conjugate or negative)
        self.contiguous = strides == contiguous_strides(shape)

    def __repr__(self) -> str:
        bits = ", conjugate" * self.conjugate + ", negative" * self.negative
        return f"Metadata({self.dtype}, {self.shape}, {self.strides}, {self.offset}, {self.storage_bytes}{bits})"

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements, stored densely."""
        return prod(self.shape) * self.dtype.itemsize

    def strided(self) -> Strided:
        """Return it in the form of the wire.

        Raises:
            WireError: Tensors of its type cannot be sent.
        """
        return Strided(
            dtype_name(self.dtype),
            self.shape,
            self.strides,
            self.offset,
            self.storage_bytes,
            self.conjugate,
            self.negative,
        )

    def on_meta(self) -> Tensor:
        """Return a new tensor of the ``meta`` device with this layout."""
        if self.offset == 0 and self.contiguous and self.plain:
            made = torch.empty(self.shape, dtype=self.dtype, device="meta")
            if made.untyped_storage().nbytes() == self.storage_bytes:
                return made
        storage = torch.UntypedStorage(self.storage_bytes, device="meta")
        made = torch.empty((0,), dtype=self.dtype, device="meta").set_(storage, self.offset, self.shape, self.strides)
        if not self.plain:
            self.mark(made)
        return made

    def mark(self, tensor: Tensor) -> None:
        """Set the conjugate and negative bits of a tensor."""
        torch._C._set_conj(tensor, self.conjugate)
        torch._C._set_neg(tensor, self.negative)


_known: weakref.WeakValueDictionary[tuple[Any, ...], Metadata] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def metadata(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    storage_bytes: int,
    conjugate: bool = False,
    negative: bool = False,
) -> Metadata:
    """Return the interned instance of a layout; the arguments are those of :class:`Metadata`."""
    key = (dtype, shape, strides, offset, storage_bytes, conjugate, negative)
    with _lock:
        found = _known.get(key)
        if found is None:
            found = _known[key] = Metadata(*key)
        return found


def dense(dtype: torch.dtype, shape: tuple[int, ...]) -> Metadata:
    """Return the layout of a new contiguous tensor."""
    return metadata(dtype, shape, contiguous_strides(shape), 0, prod(shape) * dtype.itemsize)


def metadata_of(tensor: Tensor) -> Metadata:
    """Return the layout of a strided tensor of any device."""
    storage_bytes = tensor.untyped_storage().nbytes()
    return metadata(
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        storage_bytes,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def from_wire(strided: Strided) -> Metadata:
    """Return the layout of a worker's message."""
    return metadata(
        DTYPES[strided.dtype],
        strided.shape,
        strided.strides,
        strided.offset,
        strided.storage_bytes,
        strided.conjugate,
        strided.negative,
    )


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, as PyTorch gives them: sizes of 0 count as 1."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the order of dimensions in which a tensor is contiguous; ``None`` where it has gaps or overlaps."""
    order = sorted(range(len(shape)), key=lambda d: (strides[d], shape[d]), reverse=True)
    step = 1
    for dimension in reversed(order):
        if shape[dimension] != 1 and strides[dimension] != step:
            return None
        step *= max(shape[dimension], 1)
    return tuple(order)
