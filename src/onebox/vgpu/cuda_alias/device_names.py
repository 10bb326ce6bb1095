"""Device names: translation between ``cuda`` of scripts and ``vgpu`` of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from onebox.vgpu.runtime.context import current_device

_MEANT = "cuda"
_GIVEN = "vgpu"

DEVICE_TYPES = (str, torch.device)
"""Types of device arguments that may need translation; a plain number means an accelerator already."""


def to_vgpu(place: Any) -> Any:
    """Translate a script's device for PyTorch: ``vgpu:1`` for ``cuda:1``, the current device for ``cuda``.

    Args:
        place: A device, or the name of one. All else is returned unchanged, so that PyTorch itself raises the error.
    """
    kind = place.__class__
    if kind is str:
        if not place.startswith(_MEANT):
            return place
        place = torch.device(place)
    elif kind is not torch.device:
        return place
    if place.type != _MEANT:
        return place
    return torch.device(_GIVEN, current_device() if place.index is None else place.index)


def to_cuda(device: torch.device) -> torch.device:
    """Translate a device of PyTorch for a script: ``cuda:1`` for ``vgpu:1``."""
    if device.type != _GIVEN:
        return device
    return torch.device(_MEANT) if device.index is None else torch.device(_MEANT, device.index)


def to_vgpu_type(kind: Any) -> Any:
    """Translate a script's device type, for functions that take types such as ``"cuda"`` alone."""
    return _GIVEN if kind == _MEANT else kind


def number_of(place: Any) -> int:
    """Return the number of the device argument of a function of ``torch.cuda``.

    Args:
        place: ``None`` for the current device, a number, a device or the name of one.

    Raises:
        ValueError: It is not a ``cuda`` device.
    """
    if isinstance(place, int) and not isinstance(place, bool):
        return current_device() if place < 0 else place
    if place is None:
        return current_device()
    device = torch.device(place)
    if device.type not in (_MEANT, _GIVEN):
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return current_device() if device.index is None else device.index
