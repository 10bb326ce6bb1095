"""Attention as operators: ``onebox::attention`` and ``onebox::attention_backward``, for programs that GPUs run.

PyTorch's fused kernels of attention are other operators on other devices, with other outputs: on CPUs
``_scaled_dot_product_flash_attention_for_cpu``, on GPUs one of several by element type, head size and capability. A
program names neither: these two operators have the same arguments and outputs on every device, and the device that runs
them chooses the kernel. Forward and backward choose alike, as both depend on shapes, types and device alone.

Queries are [B, H, T, D], keys [B, H, S, D], values [B, H, S, E], outputs [B, H, T, E] and logarithms of the softmax's
sums [B, H, T]. A mask is additive. Random numbers of dropout are those of the device's generator; backward is
seeded as forward was, and draws them again.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

MATH, FLASH, EFFICIENT = 0, 1, 2
"""Plain operators, and two fused kernels, as PyTorch numbers them (``torch.nn.attention.SDPBackend``)."""

_aten = torch.ops.aten

_library = torch.library.Library("onebox", "FRAGMENT")
_options = "float dropout, bool causal, Tensor? mask=None, float? scale=None"
_library.define(
    f"attention(Tensor query, Tensor key, Tensor value, {_options}) -> (Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_library.define(
    "attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    f"{_options}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)

ATTENTION: OpOverload = torch.ops.onebox.attention.default
"""Returns the outputs and the logarithms of the softmax's sums."""

ATTENTION_BACKWARD: OpOverload = torch.ops.onebox.attention_backward.default
"""Returns the gradients of query, key and value from that of the outputs."""

_LSE_ROWS = 32
"""The efficient kernel pads the logarithms of sums to a multiple of this number of rows."""

_MASK_COLUMNS = 16
"""The same kernel reads masks whose rows are this number of elements apart, or a multiple."""

_FLASH_SIZE = 192
"""Largest heads for which every GPU's flash kernel has a backward."""


def fits_fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether every kind of device has a fused kernel for such arguments."""
    tensors = (query, key, value)
    if any(t.dim() != 4 or t.dtype is not query.dtype or t.shape[:2] != query.shape[:2] for t in tensors):
        return False
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16) or key.shape[2] != value.shape[2]:
        return False
    if mask is not None and (mask.requires_grad or mask.dim() > 4 or not mask.dtype.is_floating_point):
        return False
    return query.shape[3] == key.shape[3] == value.shape[3] and query.shape[3] % 8 == 0


# ---- CPUs


def _forward_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    causal: bool,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    if dropout or not fits_fused(query, key, value, mask):
        return _forward_math(query, key, value, dropout, causal, mask, scale)
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu.default
    out, logsumexp = kernel(*map(_rows_dense, (query, key, value)), 0.0, causal, attn_mask=_four(mask), scale=scale)
    return _by_rows(out), logsumexp.contiguous()


def _backward_cpu(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout: float,
    causal: bool,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if dropout or not fits_fused(query, key, value, mask):
        return _backward_math(gradient, query, key, value, out, logsumexp, dropout, causal, mask, scale)
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    given = map(_rows_dense, (gradient, query, key, value, out))
    made = kernel(*given, logsumexp, 0.0, causal, attn_mask=_four(mask), scale=scale)
    return _by_rows(made[0]), _by_rows(made[1]), _by_rows(made[2])


def _four(mask: Tensor | None) -> Tensor | None:
    """Return a mask with the four dimensions, or two, that the kernel for CPUs takes."""
    return mask if mask is None or mask.dim() in (2, 4) else mask[(None,) * (4 - mask.dim())]


def _by_rows(tensor: Tensor) -> Tensor:
    """Return a tensor in the layout of all results, [B, T, H, D], which is the kernels' own; mostly itself."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _rows_dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


# ---- GPUs


def forward_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    causal: bool,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    kernel = kernel_of(query, key, value, mask, dropout, causal)
    if kernel == MATH:
        return _forward_math(query, key, value, dropout, causal, mask, scale)
    made = _fused(kernel, _aligned(query), _aligned(key), _aligned(value), dropout, causal, mask, scale)
    return _by_rows(made[0]), made[1].narrow(2, 0, query.shape[2]).contiguous()


def _fused(
    kernel: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Any, ...]:
    """Return the results of a fused kernel's forward."""
    if kernel == FLASH:
        made: tuple[Any, ...] = _aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout, causal, False, scale=scale
        )
        return made
    bias = _bias(mask, query, key)
    made = _aten._scaled_dot_product_efficient_attention.default(
        query, key, value, bias, True, dropout, causal, scale=scale
    )
    return made


def backward_cuda(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout: float,
    causal: bool,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = kernel_of(query, key, value, mask, dropout, causal)
    if kernel == MATH:
        return _backward_math(gradient, query, key, value, out, logsumexp, dropout, causal, mask, scale)
    gradient, query, key, value, out = map(_aligned, (gradient, query, key, value, out))
    state = _random_state(kernel, query)
    if dropout:  # the state that backward takes lies elsewhere in each release, and in a CUDA graph: forward makes it
        again = _fused(kernel, query, key, value, dropout, causal, mask, scale)
        state = (again[6], again[7]) if kernel == FLASH else (again[2], again[3])
    made: tuple[Any, ...]
    if kernel == FLASH:
        sizes = query.shape[2], key.shape[2]
        made = _aten._scaled_dot_product_flash_attention_backward.default(
            gradient, query, key, value, out, logsumexp, None, None, *sizes, dropout, causal, *state,
            scale=scale,
        )  # fmt: skip
        return _by_rows(made[0]), _by_rows(made[1]), _by_rows(made[2])
    rows = -logsumexp.shape[2] % _LSE_ROWS
    padded = functional.pad(logsumexp, (0, rows), value=math.inf) if rows else logsumexp
    bias = _bias(mask, query, key)
    wanted = [True, True, True, False]
    made = _aten._scaled_dot_product_efficient_attention_backward.default(
        gradient, query, key, value, bias, out, padded, *state, dropout, wanted, causal, scale=scale
    )
    return _by_rows(made[0]), _by_rows(made[1]), _by_rows(made[2])


def _random_state(kernel: int, query: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a kernel takes for the state of its random numbers where it draws none."""
    if kernel == FLASH:
        return query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
    return query.new_empty((), dtype=torch.int64), query.new_empty((), dtype=torch.int64)


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a mask as the efficient kernel reads it: whole, with its rows so far apart."""
    if mask is None:
        return None
    columns = key.shape[2]
    mask = mask.to(query.dtype)
    mask = mask.expand(*mask.shape[:-1], columns) if mask.dim() else mask.expand(columns)
    more = -columns % _MASK_COLUMNS
    dense = functional.pad(mask, (0, more)).narrow(-1, 0, columns) if more else mask.contiguous()
    return dense.expand(*query.shape[:3], columns)


def _aligned(tensor: Tensor) -> Tensor:
    """Return a tensor whose heads begin where the kernels for GPUs read whole vectors."""
    *outer, rows, last = tensor.stride()
    return tensor if last == 1 and not any(step % 8 for step in (*outer, rows)) else tensor.contiguous()


def kernel_of(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> int:
    """Return the kernel that a GPU has for such arguments: the fastest, and plain operators if it has no other."""
    if not fits_fused(query, key, value, mask):
        return MATH
    shape = None if mask is None else tuple(mask.shape)
    return _kernel(query.device, query.dtype, tuple(query.shape), tuple(key.shape), shape, dropout > 0, causal)


@functools.lru_cache(maxsize=4096)
def _kernel(
    device: torch.device,
    dtype: torch.dtype,
    query_shape: tuple[int, ...],
    key_shape: tuple[int, ...],
    mask_shape: tuple[int, ...] | None,
    drops: bool,
    causal: bool,
) -> int:
    query, key = (torch.empty(shape, dtype=dtype, device=device) for shape in (query_shape, key_shape))
    mask = None if mask_shape is None else _bias(query.new_zeros(mask_shape), query, key)
    given = torch.backends.cuda.SDPAParams(query, key, key, mask, 0.5 * drops, causal, False)
    if mask is None and query_shape[3] <= _FLASH_SIZE and torch.backends.cuda.can_use_flash_attention(given):
        return FLASH
    return EFFICIENT if torch.backends.cuda.can_use_efficient_attention(given) else MATH


# ---- plain operators


def _scores(query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return the softmax's input [B, H, T, S], in float32 at least."""
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query.to(wide) * factor) @ key.to(wide).transpose(-1, -2)
    if mask is not None:
        scores = scores + mask.to(wide)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _shares(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """Return the softmax; rows that are masked whole are 0, as PyTorch has it."""
    return (scores - logsumexp.masked_fill(logsumexp == -math.inf, 0.0).unsqueeze(-1)).exp()


def _kept(shares: Tensor, dropout: float) -> Tensor:
    """Return the factors of dropout."""
    return functional.dropout(torch.ones_like(shares), dropout)


def _forward_math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, causal, mask, scale)
    logsumexp = scores.logsumexp(-1)
    shares = _shares(scores, logsumexp)
    if dropout:
        shares = shares * _kept(shares, dropout)
    return _by_rows((shares @ value.to(shares.dtype)).to(query.dtype)), logsumexp


def _backward_math(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout: float,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    shares = _shares(_scores(query, key, causal, mask, scale), logsumexp)
    wide = shares.dtype
    of_out = gradient.to(wide)
    of_shares = of_out @ value.to(wide).transpose(-1, -2)
    dropped = shares
    if dropout:
        kept = _kept(shares, dropout)
        of_shares, dropped = of_shares * kept, shares * kept
    of_scores = shares * (of_shares - (of_out * out.to(wide)).sum(-1, keepdim=True)) * factor
    of_query, of_key = of_scores @ key.to(wide), of_scores.transpose(-1, -2) @ query.to(wide)
    of_value = dropped.transpose(-1, -2) @ of_out
    return _by_rows(of_query.to(query.dtype)), _by_rows(of_key.to(key.dtype)), _by_rows(of_value.to(value.dtype))


# ---- shapes and gradients


def _forward_shapes(query: Tensor, key: Tensor, value: Tensor, *options: Any, **more: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    return _new(query, value.shape[3]), query.new_empty(query.shape[:3], dtype=wide)


def _backward_shapes(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: Any, **more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _new(query), _new(key), _new(value)


def _new(like: Tensor, size: Any = None) -> Tensor:
    """Return an empty tensor in the layout of all results."""
    batch, heads, rows, last = like.shape
    return like.new_empty((batch, rows, heads, last if size is None else size)).transpose(1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.dropout, ctx.causal, mask, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, mask)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, out, logsumexp, mask = ctx.saved_tensors
    options = ctx.dropout, ctx.causal, mask, ctx.scale
    if not torch.is_grad_enabled():
        given = gradient, query, key, value, out, logsumexp
        return *ATTENTION_BACKWARD(*given, *options), None, None, None, None
    if ctx.dropout:  # create_graph=True: a second derivative is requested
        raise NotImplementedError("second derivatives of attention with dropout")
    leaves = query.view_as(query), key.view_as(key), value.view_as(value)
    again, _ = _forward_math(*leaves, *options)
    return *torch.autograd.grad(again, leaves, gradient, create_graph=True), None, None, None, None


def _register() -> None:
    for name, on_cpu, on_cuda, shapes in (
        ("attention", _forward_cpu, forward_cuda, _forward_shapes),
        ("attention_backward", _backward_cpu, backward_cuda, _backward_shapes),
    ):
        _library.impl(name, on_cpu, "CPU")
        _library.impl(name, on_cuda, "CUDA")
        torch.library.register_fake(f"onebox::{name}", shapes, lib=_library)
    torch.library.register_autograd("onebox::attention", _differentiate, setup_context=_save, lib=_library)


_register()
