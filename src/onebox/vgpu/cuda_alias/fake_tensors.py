"""Tracing: fake tensors are where PyTorch says, compiled functions see devices as the script calls them.

A fake tensor that said ``cuda`` would end a process whose PyTorch has no CUDA: autograd asks C++ for that device.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from onebox.vgpu.cuda_alias.device_arguments import anywhere
from onebox.vgpu.cuda_alias.patches import Patches

_OF_CUDA_GRAPHS: dict[str, Any] = {
    "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),
    "_set_cached_tensors_enabled": lambda enabled: None,
}
"""What ``torch._dynamo.reset`` imports where ``torch.cuda`` is available, and a PyTorch without CUDA has not. It only
forgets CUDA graphs with them, of which there are none."""


def translate_traced(patches: Patches) -> None:
    """Let fake tensors of virtual ones be on ``vgpu``."""
    patches.set(FakeTensor, "__new__", staticmethod(anywhere(FakeTensor.__new__)))
    for name, stand_in in _OF_CUDA_GRAPHS.items():
        if not hasattr(torch._C, name):
            patches.set(torch._C, name, stand_in)
    patches.call(_forget_functions)


def _forget_functions() -> None:
    """Let Dynamo, where it is loaded, find out anew which functions are PyTorch's: it knows them by identity."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.get_torch_obj_rule_map.cache_clear()
