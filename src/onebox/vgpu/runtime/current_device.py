"""``vgpu`` without a number: the thread's current device.

Most of PyTorch asks Python which device that is. Some functions ask the C++ guard of the device, and that of a device
made in Python knows number 0 only; these are told the number here. It is done when a thread first chooses another one.
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
    """Return a device with its number, where it is ``vgpu`` without one; all else as it came.

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
    """Let PyTorch's functions that take a device know the current one. Idempotent.

    Args:
        current: Returns the number of the thread's current device.
    """
    with _lock:
        if _done:
            return
        _done.append(True)
        _device_constructors()  # remembers the functions that a default device is given to, before they are others
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
