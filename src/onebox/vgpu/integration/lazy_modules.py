"""Lazy modules (``nn.LazyLinear`` and its like) on a virtual device.

A parameter that has no shape yet cannot be a virtual tensor. It stays on the host, stores the device to which its
module was moved, and becomes a tensor there when it gets its shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

_Mixin: Any = LazyModuleMixin

_PLACE = "_onebox_place"
"""The attribute of a parameter without a shape that holds the device of its module."""


def apply_lazily(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Move or convert a module; parameters without a shape only record it."""
    shelved = [
        (held, name, tensor)
        for held in (self._parameters, self._buffers)
        for name, tensor in held.items()
        if is_lazy(tensor)
    ]
    for held, name, _ in shelved:
        held[name] = None
    try:
        super(_Mixin, self)._apply(fn, recurse)
    finally:
        for held, name, tensor in shelved:
            held[name] = tensor
    for _, _, tensor in shelved:
        _note(tensor, fn)
    return self


def _note(tensor: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """Record the device and type to which a function converts tensors, on a tensor without a shape."""
    place = tensor.__dict__.get(_PLACE, tensor.data.device)
    with torch.no_grad():
        like = fn(torch.empty(0, dtype=tensor.data.dtype, device=place))
    virtual = like.device.type == "vgpu"
    tensor.__dict__.pop(_PLACE, None)
    if virtual:
        tensor.__dict__[_PLACE] = like.device
    tensor.data = torch.empty(0, dtype=like.dtype, device="cpu" if virtual else like.device)


def materializer(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``materialize`` of parameters without a shape, to create them on the device of their module."""

    @functools.wraps(original)
    def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        place = torch.device(device) if device is not None else self.__dict__.pop(_PLACE, None)
        if place is None or place.type != "vgpu":
            original(self, shape, device, dtype)
            return
        made = torch.empty(shape, device=place, dtype=self.data.dtype if dtype is None else dtype)
        kept = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        self.__class__ = self.cls_to_become
        torch.utils.swap_tensors(self, kept)

    return materialize
