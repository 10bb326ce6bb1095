"""Factories: operators that make a tensor of a device from no tensor, such as ``torch.zeros(3, device="vgpu:1")``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from onebox.errors import WireError
from onebox.vgpu.dispatch.dispatch import dispatch, launch
from onebox.vgpu.runtime.context import queue_of
from onebox.wire import overload


def factories() -> list[OpOverload]:
    """Return the operators of this torch that take a device and no tensor."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        if not schema.name.startswith("aten::"):
            continue
        types = {argument.name: str(argument.type) for argument in schema.arguments}
        if not types.get("device", "").endswith("Device]") or any("Tensor" in kind for kind in types.values()):
            continue
        if [str(value.type) for value in schema.returns] != ["Tensor"] or "Storage" in str(schema):
            continue
        with contextlib.suppress(WireError):
            name = f"aten.{schema.name.removeprefix('aten::')}.{schema.overload_name or 'default'}"
            found.append(overload(name))
    return found


def implement(library: torch.library.Library) -> None:
    """Register the factories."""
    for function in factories():
        library.impl(function, _maker(_INSTEAD.get(function, function)), "PrivateUse1")
    library.impl("_copy_from", _copied, "PrivateUse1")
    library.impl("_local_scalar_dense", _number, "PrivateUse1")
    library.impl("_pin_memory", _not_pinned, "CPU")


def _maker(function: OpOverload) -> Callable[..., Any]:
    typed = any(argument.name == "dtype" for argument in function._schema.arguments)

    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.pop("device", None) or torch.device("vgpu")
        kwargs.pop("pin_memory", None)
        queue = queue_of(device)
        if typed and kwargs.get("dtype") is None and torch.get_default_dtype() is not torch.float32:
            kwargs["dtype"] = function(*args, **{**kwargs, "device": "meta"}).dtype  # the worker has its own default
        return launch(queue, function, *args, **kwargs, device=queue.device)

    return make


_INSTEAD = {torch.ops.aten._efficientzerotensor.default: torch.ops.aten.zeros.default}
"""Factories of tensor kinds that virtual devices do not support, and those of ordinary tensors in their place."""


def _copied(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy from or to a device where PyTorch bypasses the tensor's class, as ``torch.tensor`` does."""
    return dispatch(torch.ops.aten.copy_.default, (target, source, non_blocking), None)


def _number(tensor: torch.Tensor) -> Any:
    """Read a tensor's one number where PyTorch bypasses its class, as ``torch.tensor`` of a list of them does."""
    return dispatch(torch.ops.aten._local_scalar_dense.default, (tensor,), None)


def _not_pinned(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Return an ordinary copy for a request of pinned memory, as tensors for a worker are copied in any case."""
    return tensor.clone()
