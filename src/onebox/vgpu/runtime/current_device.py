"""The current device for ``vgpu`` without a number.

Most of PyTorch gets the current device from Python. Some functions use the C++ guard, which for a device made in Python
always returns 0; their arguments get the number here. They are patched when a thread first chooses another device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from onebox.vgpu.patches import Patch, Patches


def numbered(place: Any, current: Callable[[], int]) -> Any:
    """Add the number to a device that is ``vgpu`` without one; other values are unchanged.

    Args:
        place: A device, the name of one, or anything.
        current: Returns the number of the thread's current device.
    """
    if place.__class__ is str:
        return torch.device("vgpu", current()) if place == "vgpu" else place
    if place.__class__ is torch.device and place.index is None and place.type == "vgpu":
        return torch.device("vgpu", current())
    return place


def patches_for(current: Callable[[], int]) -> Patches:
    """Return the patches that make PyTorch's functions that take a device use the current one.

    Args:
        current: Returns the number of the thread's current device.
    """
    functions: list[tuple[Any, str]] = [(torch.Tensor, "to"), (torch.Tensor, "new_tensor")]
    functions += [(torch, name) for name in ("tensor", "as_tensor", "asarray")]
    return Patches(
        (
            _list_constructors,
            *(Patch(owner, name, functools.partial(_telling, current, name == "to")) for owner, name in functions),
        )
    )


def _list_constructors(_: Patches) -> None:
    """Make PyTorch cache the functions that a default device applies to, before they are patched."""
    _device_constructors()


def _telling(current: Callable[[], int], positional: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if positional and len(args) > 1:
            args = (args[0], numbered(args[1], current), *args[2:])
        if "device" in kwargs:
            kwargs["device"] = numbered(kwargs["device"], current)
        return original(*args, **kwargs)

    return call
