"""Operators on virtual tensors that have tensors of the host, or of other classes, among their arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.core.tensor import command_queue_of, is_virtual
from onebox.vgpu.dispatch.copies import upload
from onebox.vgpu.dispatch.dispatch import mixed_devices
from onebox.vgpu.dispatch.op_inference import changed
from onebox.vgpu.dispatch.registry import for_mixed_calls

aten = torch.ops.aten

HOST_ARGUMENTS = frozenset[Any](
    {
        aten.index.Tensor,
        aten.index_put.default,
        aten.index_put_.default,
        aten._index_put_impl_.default,
        aten._unsafe_index.Tensor,
        aten._unsafe_index_put.default,
    }
)
"""Operators that accept host tensors of any size beside those of a device, as PyTorch's indexing does."""


@for_mixed_calls
def _run_mixed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that has a host tensor among its arguments; a single number is allowed, as on any device."""
    seen = _tensors((args, kwargs))
    virtual = [value for value in seen if is_virtual(value)]
    if not virtual:
        raise RuntimeError(f"{func} with no virtual tensor")
    queue = command_queue_of(virtual[0])

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor) and not is_virtual(value):
            if value.layout != torch.strided:
                raise NotImplementedError(
                    f"{func} with a tensor of layout {value.layout} is not supported: virtual devices hold dense "
                    "(strided) tensors only; convert it with .to_dense()"
                )
            if (
                value.device.type != "cpu"
                or (value.dim() and func not in HOST_ARGUMENTS)
                or _written(func, value, args)
            ):
                raise mixed_devices(seen)
            return upload(value, queue)
        return value

    return func(*changed(args, moved), **{key: changed(value, moved) for key, value in kwargs.items()})


def _written(func: Any, value: Tensor, args: tuple[Any, ...]) -> bool:
    """Return whether an operator would write to a host tensor."""
    for argument, given in zip(func._schema.arguments, args, strict=False):
        if given is value and argument.alias_info is not None and argument.alias_info.is_write:
            return True
    return any(argument.is_out for argument in func._schema.arguments)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
