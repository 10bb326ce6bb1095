"""Which kernel PyTorch takes for ``scaled_dot_product_attention``: the one that the worker's own would choose."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.asking import perform
from onebox.vgpu.dispatch import special
from onebox.vgpu.stream import Stream
from onebox.vgpu.tensor import VirtualTensor

aten = torch.ops.aten

MATH, FLASH, EFFICIENT = 0, 1, 2
"""Plain operators, and two fused kernels, as PyTorch numbers them (``torch.nn.attention.SDPBackend``)."""

_choices: weakref.WeakKeyDictionary[Stream, dict[Any, int]] = weakref.WeakKeyDictionary()


@special(aten._fused_sdp_choice.default)
def choose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of the kernel for such queries, keys and values; the worker is asked the first time."""
    given = (*args, *kwargs.values())
    tensors = [value for value in given if isinstance(value, Tensor)]
    virtual = [tensor for tensor in tensors if isinstance(tensor, VirtualTensor)]
    if len(virtual) != len(tensors) or any(mask.requires_grad for mask in virtual[3:]):
        return MATH
    stream = virtual[0]._handle.stream
    known = _choices.setdefault(stream, {})
    layouts = (value._metadata if isinstance(value, VirtualTensor) else value for value in given)
    key = (len(args), *kwargs, *layouts)
    if key not in known:
        floats = [value for value in given if isinstance(value, float)]
        choice = perform(stream, aten._fused_sdp_choice.default, args, kwargs, virtual, floats)
        known[key] = _usable(choice, stream, virtual)
    choice = known[key]
    if choice == FLASH and not torch.backends.cuda.flash_sdp_enabled():
        return MATH
    return MATH if choice == EFFICIENT and not torch.backends.cuda.mem_efficient_sdp_enabled() else choice


def _usable(choice: int, stream: Stream, tensors: list[VirtualTensor]) -> int:
    """Return a choice that PyTorch can make here: for devices that are no GPU to it, flash attention is the CPU's."""
    if stream.pool.devices[stream.worker].kind != "cuda":
        return choice if choice == FLASH else MATH
    even = all(tensor.shape[-1] % 8 == 0 for tensor in tensors[:3])  # what the other fused kernel asks for
    return EFFICIENT if choice != MATH and even else MATH
