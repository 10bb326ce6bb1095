"""Attention kept whole while a model is traced for GPUs: one operator forward and one backward, on every device.

On a CPU the tracer would choose the kernel for CPUs, or the plain operators, which keep all scores; here
``scaled_dot_product_attention`` becomes a call of :data:`onebox.wire.ATTENTION`, for which each worker has a fused
kernel. Where some device has none for the arguments, PyTorch's plain operators stay.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from onebox.wire import ATTENTION, fits_fused

_ATTENTION = functional.scaled_dot_product_attention


class WholeAttention(TorchFunctionMode):
    """Keeps attention whole in traces within the context."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch._C._are_functorch_transforms_active():
            return func(*args, **(kwargs or {}))
        if func is functional.multi_head_attention_forward:
            return _multi_head(*args, **(kwargs or {}))
        if func is _ATTENTION:
            return _attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the result of ``scaled_dot_product_attention``, by one operator if it can be."""
    given = [query, key, value]
    mask = attn_mask
    if torch.is_autocast_enabled("cpu"):
        narrow = torch.get_autocast_dtype("cpu")
        given = [tensor.to(narrow) if tensor.dtype is torch.float32 else tensor for tensor in given]
    if enable_gqa and all(tensor.dim() == 4 for tensor in given):
        given[1:] = [_each_head(tensor, query.shape[1]) for tensor in given[1:]]
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=given[0].dtype).masked_fill(mask.logical_not(), -math.inf)
    fits = fits_fused(given[0], given[1], given[2], mask) and not (is_causal and mask is not None)
    if not fits:
        plain: Tensor = _ATTENTION(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return plain
    mask = None if mask is None else mask.to(given[0].dtype)
    made: Tensor = ATTENTION(*given, dropout_p, is_causal, mask, scale)[0]
    return made


def _each_head(tensor: Tensor, heads: int) -> Tensor:
    """Return keys or values, of which several heads of queries share each, for each of these."""
    own = tensor.shape[1]
    return tensor if own == heads or heads % own else tensor.repeat_interleave(heads // own, 1)


def _inside(function: Any, **names: Any) -> Any:
    """Return a function of Python with other globals under some names."""
    made = types.FunctionType(function.__code__, {**function.__globals__, **names}, argdefs=function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_multi_head = _inside(
    functional.multi_head_attention_forward,
    scaled_dot_product_attention=_attend,
    has_torch_function=lambda _: False,
)
"""The function of ``nn.MultiheadAttention`` with this attention; what a mode is called for runs without the mode."""
