"""The current device for ``vgpu`` without a number.

Most of PyTorch gets the current device from Python. Some functions use the C++ guard, which for a device made in Python
always returns 0; their arguments get the number here. They are patched when a thread first chooses another device.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

_lock = threading.Lock()
_done: list[bool] = []


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


def register(current: Callable[[], int]) -> None:
    """Make PyTorch's functions that take a device use the current one. Idempotent.

    Args:
        current: Returns the number of the thread's current device.
    """
    with _lock:
        if _done:
            return
        _done.append(True)
        _device_constructors()  # caches the functions that a default device applies to, before they are patched
        owner: Any
        for owner, names in ((torch.Tensor, ("to", "new_tensor")), (torch, ("tensor", "as_tensor", "asarray"))):
            for name in names:
                setattr(owner, name, _telling(getattr(owner, name), current, positional=name == "to"))


def _telling(original: Callable[..., Any], current: Callable[[], int], *, positional: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if positional and len(args) > 1:
            args = (args[0], numbered(args[1], current), *args[2:])
        if "device" in kwargs:
            kwargs["device"] = numbered(kwargs["device"], current)
        return original(*args, **kwargs)

    return call


__all__ = ["numbered", "register"]
