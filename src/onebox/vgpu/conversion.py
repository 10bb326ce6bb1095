"""Modules: moved to a device by swapping their parameters, and loaded by copying into them.

``module.to`` cannot set the data of a tensor of another device, and new parameters would part tied ones; so PyTorch is
told to swap tensors. It would then swap in ``load_state_dict``, too, where others than the module may hold the
parameters: DistributedDataParallel does, and swapping is refused.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import nn

_loading = threading.local()


def register() -> None:
    """Let modules be moved and loaded so."""
    future: Any = torch.__future__
    future.set_swap_module_params_on_conversion(True)
    told = future.get_swap_module_params_on_conversion

    @functools.wraps(told)
    def get_swap_module_params_on_conversion() -> bool:
        return told() and not getattr(_loading, "depth", 0)

    future.get_swap_module_params_on_conversion = get_swap_module_params_on_conversion
    kind: Any = nn.Module
    load = kind._load_from_state_dict

    @functools.wraps(load)
    def _load_from_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        _loading.depth = getattr(_loading, "depth", 0) + 1
        try:
            load(self, *args, **kwargs)
        finally:
            _loading.depth -= 1

    kind._load_from_state_dict = _load_from_state_dict


__all__ = ["register"]
