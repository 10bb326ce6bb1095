"""Tracing under the alias: fake tensors stay on ``vgpu``, compiled functions see the script's device names.

A fake tensor that reported ``cuda`` would abort a process whose PyTorch has no CUDA: autograd looks that device up in
C++.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from onebox.vgpu.cuda_alias.device_arguments import anywhere
from onebox.vgpu.cuda_alias.device_names import to_vgpu
from onebox.vgpu.cuda_alias.functions import yes
from onebox.vgpu.patches import Patches

_OF_CUDA_GRAPHS: dict[str, Any] = {
    "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),
    "_cuda_cudaCachingAllocator_is_enabled": yes,
    "_set_cached_tensors_enabled": lambda enabled: None,
}
"""What ``torch.compile`` and ``torch._dynamo.reset`` look up where ``torch.cuda`` is available, and what a PyTorch
without CUDA lacks. It only serves CUDA graphs, of which there are none."""


def translate_traced(patches: Patches) -> None:
    """Make fake tensors of virtual ones be on ``vgpu``."""
    patches.set(FakeTensor, "__new__", staticmethod(anywhere(FakeTensor.__new__)))
    for name, stand_in in _OF_CUDA_GRAPHS.items():
        if not hasattr(torch._C, name):
            patches.set(torch._C, name, stand_in)
    # the attribute that torch.compiler.assume_constant_result sets, whose import would be slow
    patches.set(to_vgpu, "_dynamo_marked_constant", True)
