"""Overlaps of memory that PyTorch's kernels refuse when they write to ``out``.

Operators with ``out`` get other memory to write to, where theirs is shared with an argument or lies in no plain order
(:mod:`.argument_checks`), so that their own checks see none of it. The tables were found by calling each operator of
PyTorch's database with such arguments; the functions are those of ATen's ``MemoryOverlap.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from onebox.wire.tensors import is_dense

_PARTLY = frozenset({
    "addr", "aminmax", "bernoulli", "cat", "complex", "cumprod", "cumsum", "floor_divide", "gather", "gelu",
    "hardshrink", "index", "index_add", "index_copy", "index_reduce", "index_select", "isin", "kthvalue",
    "linalg_cross", "logcumsumexp", "masked_select", "max", "min", "mode", "nonzero", "normal", "polar", "renorm",
    "scatter", "scatter_add", "scatter_reduce", "softplus", "softshrink", "sort", "split_copy",
    "split_with_sizes_copy", "stack", "take", "topk", "unbind_copy", "unsafe_split", "where",
})  # fmt: skip
"""Operators that refuse an argument which is not the result but has a part of its memory, as pointwise ones do."""

_ADDED = frozenset({"addbmm", "addmm", "addmv", "baddbmm"})
"""Operators that do so for their first argument only."""

_WHOLLY: Mapping[str, frozenset[str]] = {
    "cat": frozenset({"tensors"}),
    "gather": frozenset({"self"}),
    "index": frozenset({"self", "indices"}),
    "index_add": frozenset({"index", "source"}),
    "index_copy": frozenset({"index", "source"}),
    "index_reduce": frozenset({"index", "source"}),
    "index_select": frozenset({"self", "index"}),
    "linalg_cross": frozenset({"self", "other"}),
    "masked_select": frozenset({"self", "mask"}),
    "nonzero": frozenset({"self"}),
    "scatter": frozenset({"index", "src"}),
    "scatter_add": frozenset({"index", "src"}),
    "scatter_reduce": frozenset({"index", "src"}),
    "stack": frozenset({"tensors"}),
    "take": frozenset({"self", "index"}),
}
"""Arguments that may not even be the result itself."""


def require_apart(operator: OpOverload, outs: Sequence[Tensor], read: Mapping[str, Sequence[Tensor]]) -> None:
    """Refuse what PyTorch refuses, in its words.

    Args:
        operator: An operator with ``out``.
        outs: The tensors that it writes to.
        read: Those that it reads, by the names of its arguments.

    Raises:
        RuntimeError: An element of a result and one of an argument are at one place.
    """
    name = operator._schema.name.rpartition("::")[2]
    first_only = name in _ADDED
    if not (first_only or name in _PARTLY or torch.Tag.pointwise in operator.tags):
        return
    for argument, tensors in read.items():
        wholly = argument in _WHOLLY.get(name, ())
        for out in outs if argument == "self" or not first_only else ():
            if any(_overlap(out, tensor, wholly=wholly) for tensor in tensors):
                raise RuntimeError(
                    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a "
                    "single memory location. Please clone() the tensor before performing the operation."
                )


def require_shape(
    operator: OpOverload, out: Tensor, shape: Sequence[int], read: Mapping[str, Sequence[Tensor]]
) -> None:
    """Refuse a result of another shape in a tensor that is read, too, by operators that compute element by element.

    Raises:
        RuntimeError: PyTorch would have raised it.
    """
    each = torch.Tag.pointwise in operator.tags or operator._schema.name == "aten::where"
    if each and any(out is tensor for tensors in read.values() for tensor in tensors):
        raise RuntimeError(f"output with shape {list(out.shape)} doesn't match the broadcast shape {list(shape)}")


def _overlap(out: Tensor, other: Tensor, *, wholly: bool) -> bool:
    """Return whether a result and an argument have elements in common, other than all of them in the same order; with
    ``wholly`` those, too. Tensors with gaps count as apart."""
    if out is other:
        return wholly
    if not (out.numel() and other.numel() and is_dense(out) and is_dense(other)):
        return False
    if out.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    begins, ends = zip(*(_reach(tensor) for tensor in (out, other)), strict=True)
    if begins[0] == begins[1] and ends[0] == ends[1] and out.stride() == other.stride():
        return wholly
    return bool(begins[0] < ends[1] and begins[1] < ends[0])


def _reach(tensor: Tensor) -> tuple[int, int]:
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return begin, begin + tensor.nbytes
