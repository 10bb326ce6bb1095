"""Device arguments: the functions and methods of PyTorch that accept ``cuda`` as a device.

They are a table: an owner, the names of its functions, and the translation of their arguments. Operators without a
device argument are not in it and cost nothing. The factories are read from PyTorch's own schemas, so that new ones are
included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nested
from torch.utils import _device

from onebox.vgpu.cuda_alias.device_names import DEVICE_TYPES, to_vgpu
from onebox.vgpu.patches import Patches

Function = Callable[..., Any]

_COMPARED = frozenset({"eq", "ne"})
"""Operators whose schemas have a device although their Python functions take none: scripts compare devices."""


def named(function: Function) -> Function:
    """Wrap a function to translate the keyword ``device`` and drop requests for pinned memory."""

    @functools.wraps(function)
    def translated(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            place = kwargs.get("device")
            if place.__class__ in DEVICE_TYPES:
                kwargs["device"] = to_vgpu(place)
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False  # tensors for a worker are copied in any case
        return function(*args, **kwargs)

    return translated


def _static(function: Function) -> Any:
    """Wrap a static method, to translate all devices among its arguments: a subclass that reported ``cuda`` would abort
    a PyTorch without CUDA in C++."""
    return staticmethod(anywhere(named(function)))


def anywhere(function: Function) -> Function:
    """Wrap a function to translate its keyword ``device`` and each positional argument that is a device."""

    @functools.wraps(function)
    def translated(*args: Any, **kwargs: Any) -> Any:
        if kwargs and kwargs.get("device").__class__ in DEVICE_TYPES:
            kwargs["device"] = to_vgpu(kwargs["device"])
        return function(*[to_vgpu(value) if value.__class__ in DEVICE_TYPES else value for value in args], **kwargs)

    return translated


def factories() -> list[str]:
    """Return the functions in ``torch`` that take a device."""
    schemas = torch._C._jit_get_all_schemas()
    aten = {
        schema.name.removeprefix("aten::")
        for schema in schemas
        if schema.name.startswith("aten::") and any("Device" in str(argument.type) for argument in schema.arguments)
    }
    names = (aten | {"asarray"}) - _COMPARED
    return sorted(name for name in names if hasattr(torch._C._VariableFunctions, name) and hasattr(torch, name))


def methods() -> list[str]:
    """Return the methods of tensors that take a device as a keyword alone."""
    return [name for name in dir(torch.Tensor) if name == "new" or name.startswith("new_")]


def table() -> Iterator[tuple[Any, list[str], Callable[[Function], Function]]]:
    """Yield owners, names of their functions, and the translation of their arguments."""
    yield torch, factories(), named
    yield torch.fft, ["fftfreq", "rfftfreq"], named
    yield torch.nested, ["as_nested_tensor", "nested_tensor"], named
    yield torch.Tensor, methods(), named
    yield torch.Tensor, ["is_pinned", "pin_memory", "to"], anywhere
    yield torch.Tensor, ["_make_wrapper_subclass"], _static
    yield torch.UntypedStorage, ["__new__"], _static


def translate_entries(patches: Patches) -> None:
    """Make all of them accept ``cuda``."""
    constructors = _device._device_constructors()  # cached by PyTorch from now on: modes see the originals
    patches.set(_device.DeviceContext, "__torch_function__", _in_context(constructors))
    for owner, names, how in table():
        for name in names:
            patches.set(owner, name, how(getattr(owner, name)))


def _in_context(constructors: set[Function]) -> Function:
    """Return the translation that ``with torch.device(...)`` and ``torch.set_default_device`` apply to each
    function."""

    def give_device(self: Any, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in constructors and kwargs.get("device") is None:
            kwargs["device"] = to_vgpu(self.device)
        return func(*args, **kwargs)

    return give_device
