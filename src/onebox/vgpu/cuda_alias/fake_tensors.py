"""Tracing under the alias: fake tensors stay on ``vgpu``, compiled functions see the script's device names.

A fake tensor that reported ``cuda`` would abort a process whose PyTorch has no CUDA: autograd looks that device up in
C++.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from onebox.vgpu.cuda_alias.device_arguments import anywhere
from onebox.vgpu.cuda_alias.device_names import to_cuda
from onebox.vgpu.cuda_alias.patches import Patches

_active: list[bool] = []

_OF_CUDA_GRAPHS: dict[str, Any] = {
    "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),
    "_set_cached_tensors_enabled": lambda enabled: None,
}
"""Modules that ``torch._dynamo.reset`` imports where ``torch.cuda`` is available, and that a PyTorch without CUDA
lacks. They are only used to reset CUDA graphs, of which there are none."""


def translate_traced(patches: Patches) -> None:
    """Make fake tensors of virtual ones be on ``vgpu``."""
    patches.set(FakeTensor, "__new__", staticmethod(anywhere(FakeTensor.__new__)))
    for name, stand_in in _OF_CUDA_GRAPHS.items():
        if not hasattr(torch._C, name):
            patches.set(torch._C, name, stand_in)
    _active.append(True)
    patches.undoing(_active.pop)
    patches.call(_forget_functions)


def _forget_functions() -> None:
    """Make Dynamo, where it is loaded, identify PyTorch's functions again: it compares them by identity."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.get_torch_obj_rule_map.cache_clear()


def with_script_devices(attribute: Callable[..., Any], build: Callable[..., Any], value: Any) -> Callable[..., Any]:
    """Return Dynamo's implementation of a tensor's ``device`` or ``is_cuda``.

    Args:
        attribute: Dynamo's own method for it.
        build: Creates a Dynamo variable from a value.
        value: Maps a device to the attribute's value.
    """

    @functools.wraps(attribute)
    def answer(self: Any, tx: Any) -> Any:
        if _active and self.device is not None and self.device.type == "vgpu":
            return build(tx, value(to_cuda(self.device)))
        return attribute(self, tx)

    return answer
