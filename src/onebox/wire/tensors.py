"""Tensors as frames: the dense elements of one tensor, in native byte order, nothing else.

``Tensor.numpy`` is not used: a storage exported to NumPy can never be resized again.
"""

from __future__ import annotations

import ctypes
from math import prod

import numpy as np
import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire.program import ITEM_BYTES, PROGRAM_TYPES, TensorSpec

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
"""Element types by their names on the wire."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_SMALL_BYTES = 1 << 12
"""Frames that are copied once more, which is quicker than to ask NumPy where they are."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the wire name of an element type.

    Raises:
        WireError: The type is not supported.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise WireError(f"tensors of {dtype} cannot travel; allowed: {', '.join(DTYPES)}") from None


def program_dtype_name(dtype: torch.dtype) -> str:
    """Return the wire name of an element type allowed in programs.

    Raises:
        WireError: The type is not allowed.
    """
    name = dtype_name(dtype)
    if name not in PROGRAM_TYPES:
        raise WireError(f"tensors of {dtype} cannot be trained with; allowed: {', '.join(PROGRAM_TYPES)}")
    return name


def spec_of(tensor: Tensor) -> TensorSpec:
    """Return the spec of a tensor."""
    return TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape))


def to_frame(tensor: Tensor) -> memoryview:
    """Return the elements of a tensor; memory is shared if the tensor is dense and on the CPU."""
    dense = _dense(tensor)
    dense = dense.as_strided((dense.numel(),), (1,))  # a single element is contiguous with any stride
    return memoryview(np.from_dlpack(dense.view(torch.uint8)))  # type: ignore[arg-type]


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor without a gradient whose elements lie on the CPU as they are sent."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()  # apply lazy conjugation and negation
    return tensor.detach().to("cpu").contiguous()


def copy_of(tensor: Tensor) -> tuple[Tensor, TensorSpec, memoryview]:
    """Return a dense copy of a tensor on the CPU, its spec, and its elements, which share the copy's memory."""
    dense = _dense(tensor)
    elements = np.empty(dense.nbytes, dtype=np.uint8)
    if not dense.nbytes:
        return torch.empty_like(dense), spec_of(dense), memoryview(elements)  # type: ignore[arg-type]
    copy = torch.frombuffer(elements, dtype=dense.dtype).view_as(dense)
    ctypes.memmove(copy.data_ptr(), dense.data_ptr(), dense.nbytes)
    return copy, spec_of(copy), memoryview(elements)  # type: ignore[arg-type]


def elements_of(tensor: Tensor) -> tuple[TensorSpec, memoryview]:
    """Return the spec and the elements of a tensor; see :func:`to_frame`."""
    return spec_of(tensor), to_frame(tensor)


def rows_of(tensor: Tensor, first: int, rows: int) -> Tensor:
    """Return rows of a tensor, by index of its first dimension; the whole tensor if ``rows`` is 0.

    Raises:
        WireError: The rows are out of bounds.
    """
    if not rows:
        return tensor
    if first < 0 or rows < 0 or not tensor.dim() or first + rows > tensor.shape[0]:
        raise WireError(f"rows {first} to {first + rows} of a tensor of shape {list(tensor.shape)}; it has none such")
    return tensor.narrow(0, first, rows)


def from_frame(spec: TensorSpec, frame: memoryview | bytes) -> Tensor:
    """Return a new CPU tensor with the elements of a frame.

    Raises:
        WireError: The size of the frame does not match the spec, or its type is not allowed.
    """
    check_elements(spec, frame)
    tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
    if 0 < spec.size_bytes <= _SMALL_BYTES:
        ctypes.memmove(tensor.data_ptr(), bytes(frame), spec.size_bytes)
    elif spec.size_bytes:
        ctypes.memmove(tensor.data_ptr(), np.frombuffer(frame, dtype=np.uint8).ctypes.data, spec.size_bytes)
    return tensor


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements lie side by side in memory, in any order, none of them twice."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def check_elements(spec: TensorSpec, frame: memoryview | bytes) -> None:
    """Require that a frame holds the elements of a tensor.

    Raises:
        WireError: The size of the frame does not match the spec, or its type is not allowed.
    """
    if spec.dtype not in DTYPES or min(spec.shape, default=0) < 0 or _extent(spec) >= 1 << 63:
        raise WireError(f"a tensor of {spec} is not allowed; types: {', '.join(DTYPES)}")
    if len(frame) != spec.size_bytes:
        raise WireError(f"{spec} needs {spec.size_bytes} bytes, but the frame has {len(frame)}")


def _extent(spec: TensorSpec) -> int:
    """Return the number of elements of a tensor, ignoring sizes of 0: torch computes strides from them."""
    return prod(size or 1 for size in spec.shape)
