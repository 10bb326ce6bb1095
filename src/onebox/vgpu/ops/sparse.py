"""Sparse tensors in coordinate format on a virtual device, as gradients of embeddings.

A worker holds dense tensors only. A sparse one is a pair of them here, indices and values, and the operators that
autograd and optimizers apply to sparse gradients are composed of dense ones. Others raise an error that suggests
``to_dense()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.dispatch.dispatch import launch
from onebox.vgpu.dispatch.registry import foreign, special
from onebox.vgpu.runtime.context import displayed, queue_of

aten = torch.ops.aten
_make: Any = Tensor._make_wrapper_subclass
_device: Any = torch._C.TensorBase.device

Handler = Callable[..., Any]
_handlers: dict[Any, Handler] = {}


class VirtualSparse(Tensor):
    """A sparse tensor (COO) of ``vgpu:i``, made of two virtual tensors.

    Attributes:
        pair: Indices [sparse dimensions, entries] and values [entries, *dense dimensions].
        coalesced: Whether the indices are known to be sorted and unique.
    """

    pair: tuple[Tensor, Tensor]
    coalesced: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator by dense ones."""
        return _handle(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        text: str = torch._tensor_str._str(self, tensor_contents=tensor_contents)
        return "tensor" + text[len(type(self).__name__) :]

    @property
    def device(self) -> Any:  # type: ignore[override]
        """The device, by the script's name for it."""
        return displayed(_device.__get__(self))

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True if the script calls the device ``cuda``."""
        return bool(self.device.type == "cuda")

    def new(self, *args: Any, **kwargs: Any) -> Any:
        """Return a sparse tensor of the same device: PyTorch's legacy constructor, which its optimizers use."""
        indices, values, size = args
        return torch.sparse_coo_tensor(indices, values, size, check_invariants=False)


def _sparse(indices: Tensor, values: Tensor, size: Any, coalesced: bool = False) -> VirtualSparse:
    place = torch.device("vgpu", values.device.index)  # autograd aborts at a device whose PyTorch is not there: cuda
    made: VirtualSparse = _make(VirtualSparse, tuple(size), dtype=values.dtype, device=place, layout=torch.sparse_coo)
    made.pair, made.coalesced = (indices, values), coalesced
    return made


def _handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = _handlers.get(func)
    if handler is None and func._schema.name.startswith("aten::_foreach_"):
        return _each(func, *args, **kwargs)
    if handler is None:
        raise NotImplementedError(
            f"{func} of a sparse tensor is not supported on virtual devices; make it dense with .to_dense()"
        )
    return handler(*args, **kwargs)


def _each(func: Any, tensors: list[Tensor], *others: Any, **kwargs: Any) -> Any:
    """Run an operator on lists as one on tensors, for each element."""
    method = getattr(Tensor, func._schema.name.removeprefix("aten::_foreach_"))
    made = []
    for number, tensor in enumerate(tensors):
        beside = [other[number] if isinstance(other, list | tuple) else other for other in others]
        made.append(method(tensor, *beside, **kwargs))
    return made if func._schema.returns else None


foreign[VirtualSparse] = _handle


def _does(*functions: Any) -> Callable[[Handler], Handler]:
    """Decorator that makes a function the implementation of operators with a sparse argument."""

    def register(handler: Handler) -> Handler:
        for function in functions:
            _handlers[function] = handler
        return handler

    return register


def implement(library: torch.library.Library) -> None:
    """Register the construction of empty ones, which PyTorch uses to copy from the host."""
    library.impl("empty.memory_format", _empty, "SparsePrivateUse1")


# ---- construction


@special(aten._sparse_coo_tensor_with_dims_and_tensors.default)
def _from_pair(args: tuple[Any, ...], kwargs: dict[str, Any]) -> VirtualSparse:
    """Construct one from its indices and values."""
    _, _, size, indices, values = args
    return _sparse(indices, values, size, bool(kwargs.get("is_coalesced")))


@special(aten._embedding_bag_backward.default)
def _of_bags(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the gradient of the weight of an ``EmbeddingBag``, sparse if requested."""
    grad, indices, offsets, bags, sizes, _maxima, count, by_frequency, mode, sparse, weights, *padding = args
    if not sparse:
        made: Tensor = launch(queue_of(grad.device), aten._embedding_bag_backward.default, *args, **kwargs)
        return made
    if not bags.numel():  # as PyTorch computes it: the bag of each index
        starts = torch.zeros(len(indices) + 1, dtype=indices.dtype, device=indices.device)
        bags = starts.index_add_(0, offsets, torch.ones_like(offsets))[:-1].cumsum(0) - 1
    return aten._embedding_bag_sparse_backward.default(
        grad, indices, offsets, bags, sizes, count, by_frequency, mode, weights, *padding, **kwargs
    )


def _empty(size: Any, dtype: Any = None, device: Any = None, **_: Any) -> VirtualSparse:
    place = queue_of(device or torch.device("vgpu")).device
    indices = torch.empty((len(size), 0), dtype=torch.int64, device=place)
    return _sparse(indices, torch.empty((0,), dtype=dtype or torch.get_default_dtype(), device=place), size, True)


@special(aten._to_sparse.sparse_dim, aten._to_sparse.default)
def _from_dense(args: tuple[Any, ...], kwargs: dict[str, Any]) -> VirtualSparse:
    """Construct one from a dense tensor; waits for the number of non-zero elements."""
    dense = args[0]
    if kwargs.get("layout") not in (None, torch.sparse_coo) or kwargs.get("blocksize") is not None:
        raise NotImplementedError("on virtual devices, sparse tensors are in coordinate format (torch.sparse_coo) only")
    count = args[1] if len(args) > 1 else dense.dim() - (kwargs.get("dense_dim") or 0)
    there = dense != 0
    for _ in range(dense.dim() - count):
        there = there.any(-1)
    indices = there.nonzero().t().contiguous()
    return _sparse(indices, dense[tuple(indices)] if count else dense.unsqueeze(0), dense.shape, True)


@_does(aten.detach.default, aten.alias.default, aten._coalesced_.default)
def _again(tensor: VirtualSparse, coalesced: bool | None = None) -> VirtualSparse:
    if coalesced is not None:
        tensor.coalesced = coalesced
        return tensor
    return _sparse(*tensor.pair, tensor.shape, tensor.coalesced)


# ---- properties


@_does(aten._indices.default, aten.indices.default)
def _indices(tensor: VirtualSparse) -> Tensor:
    return tensor.pair[0].detach()


@_does(aten._values.default, aten.values.default)
def _values(tensor: VirtualSparse) -> Tensor:
    return tensor.pair[1].detach()


_does(aten._nnz.default)(lambda tensor: tensor.pair[0].shape[1])
_does(aten.is_coalesced.default)(lambda tensor: tensor.coalesced)
_does(aten.sparse_dim.default, aten._dimI.default)(lambda tensor: tensor.pair[0].shape[0])
_does(aten.dense_dim.default, aten._dimV.default)(lambda tensor: tensor.dim() - tensor.pair[0].shape[0])


# ---- whole-tensor operators


@_does(aten._coalesce.default)
def _coalesce(tensor: VirtualSparse) -> VirtualSparse:
    """Sort the indices and add up the values of each; waits for the number of unique ones."""
    indices, values = tensor.pair
    sizes = tensor.shape[: len(indices)]
    steps = [math.prod(sizes[number + 1 :]) for number in range(len(sizes))]
    flat = torch.zeros_like(indices[0])
    for row, step in zip(indices, steps, strict=True):
        flat = flat + row * step
    left, places = torch.unique(flat, sorted=True, return_inverse=True)
    total = torch.zeros((len(left), *values.shape[1:]), dtype=values.dtype, device=values.device)
    rows = [left.div(step, rounding_mode="floor") % size for step, size in zip(steps, sizes, strict=True)]
    return _sparse(torch.stack(rows), total.index_add_(0, places, values), tensor.shape, True)


@_does(aten._to_dense.default, aten.to_dense.default)
def _dense(tensor: VirtualSparse, dtype: Any = None, masked_grad: Any = None) -> Tensor:
    values = tensor.pair[1]
    made = torch.zeros(tensor.shape, dtype=dtype or tensor.dtype, device=values.device)
    return _add_to(made, tensor if dtype is None else _values_by(tensor, lambda value: value.to(dtype)))


@_does(aten._to_copy.default)
def _moved(tensor: VirtualSparse, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    indices, values = (part.to(device) if device is not None else part.clone() for part in tensor.pair)
    values = values if dtype is None else values.to(dtype)
    if values.device.type == "vgpu":
        return _sparse(indices, values, tensor.shape, tensor.coalesced)
    return torch.sparse_coo_tensor(
        indices, values, tensor.shape, is_coalesced=tensor.coalesced or None, check_invariants=False
    )


@_does(aten.copy_.default)
def _copy(tensor: Any, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy the elements of another sparse tensor, from any device."""
    if not isinstance(tensor, VirtualSparse):
        return tensor.copy_(_moved(source, device=tensor.device))
    if source.layout != torch.sparse_coo:
        raise RuntimeError("copy_() between dense and sparse tensors is not allowed")
    tensor.pair = (source._indices().to(tensor.device), source._values().to(tensor.device, tensor.dtype))
    tensor.coalesced = source.is_coalesced()
    return tensor


# ---- arithmetic


def _values_by(tensor: VirtualSparse, change: Callable[[Tensor], Tensor]) -> VirtualSparse:
    return _sparse(tensor.pair[0], change(tensor.pair[1]), tensor.shape, tensor.coalesced)


def _number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim():
        raise NotImplementedError(
            "a sparse tensor times a tensor is not supported on virtual devices; make it dense with .to_dense()"
        )
    return value


@_does(aten.clone.default)
def _clone(tensor: VirtualSparse, memory_format: Any = None) -> VirtualSparse:
    indices, values = tensor.pair
    return _sparse(indices.clone(), values.clone(), tensor.shape, tensor.coalesced)


_does(aten.neg.default)(lambda tensor: _values_by(tensor, torch.neg))
_does(aten.mul.Tensor, aten.mul.Scalar)(lambda tensor, by: _values_by(tensor, lambda value: value * _number(by)))
_does(aten.div.Tensor, aten.div.Scalar)(lambda tensor, by: _values_by(tensor, lambda value: value / _number(by)))


@_does(aten.mul_.Tensor, aten.mul_.Scalar)
def _scale(tensor: VirtualSparse, by: Any) -> VirtualSparse:
    tensor.pair[1].mul_(_number(by))
    return tensor


@_does(aten.div_.Tensor, aten.div_.Scalar)
def _divide(tensor: VirtualSparse, by: Any) -> VirtualSparse:
    tensor.pair[1].div_(_number(by))
    return tensor


@_does(aten.zero_.default)
def _zero(tensor: VirtualSparse) -> VirtualSparse:
    tensor.pair = (tensor.pair[0][:, :0], tensor.pair[1][:0])
    return tensor


@_does(aten.add.Tensor)
def _add(tensor: Any, other: Any, *, alpha: Any = 1) -> Tensor:
    if not isinstance(tensor, VirtualSparse):
        return _add_to(tensor.clone(), other, alpha=alpha)
    if not isinstance(other, VirtualSparse):
        raise RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")
    values = torch.cat([tensor.pair[1], other.pair[1] * alpha])
    return _sparse(torch.cat([tensor.pair[0], other.pair[0]], 1), values, tensor.shape)


@_does(aten.add_.Tensor)
def _add_to(tensor: Any, other: Any, *, alpha: Any = 1) -> Tensor:
    if isinstance(tensor, VirtualSparse):
        total = _add(tensor, other, alpha=alpha)
        tensor.pair, tensor.coalesced = total.pair, False
        return tensor
    indices, values = other.pair
    values = values if alpha == 1 else values * alpha
    if not len(indices):
        return tensor.add_(values.sum(0))
    return tensor.index_put_(tuple(indices), values.to(tensor.dtype), accumulate=True)


@_does(aten.sparse_mask.default)
def _mask(tensor: Any, mask: VirtualSparse) -> VirtualSparse:
    if isinstance(tensor, VirtualSparse):
        tensor = _dense(tensor)
    return _sparse(mask.pair[0], tensor[tuple(mask.pair[0])], tensor.shape, mask.coalesced)
