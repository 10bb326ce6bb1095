"""Automatic mixed precision: switches for ``cuda`` apply to the virtual devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from onebox.vgpu.cuda_alias.device_names import to_vgpu_type
from onebox.vgpu.cuda_alias.patches import Patches

_BY_TYPE = ("get_autocast_dtype", "is_autocast_enabled", "set_autocast_dtype", "set_autocast_enabled")
"""Functions whose first argument is a device type, by default CUDA."""


def _typed(function: Callable[..., Any], fewest: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def translated(*args: Any) -> Any:
        if len(args) < fewest:
            args = ("cuda", *args)
        return function(to_vgpu_type(args[0]), *args[1:])

    return translated


def translate_amp(patches: Patches) -> None:
    """Make autocast, and the queries of its state, accept ``cuda``."""
    for name in _BY_TYPE:
        translated = _typed(getattr(torch, name), 2 if name.startswith("set") else 1)
        patches.set(torch, name, translated)
    available = torch._C._is_autocast_available
    patches.set(torch._C, "_is_autocast_available", _typed(available, 1))
    patches.set(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cuda"))
    patches.set(torch, "set_autocast_gpu_dtype", lambda dtype: torch.set_autocast_dtype("cuda", dtype))
