"""Operators of ``nn.SyncBatchNorm``, which PyTorch has for GPUs only, composed of others for other devices.

The formulas are those of batch normalisation (Ioffe and Szegedy, 2015, section 3), with sums split by the ranks'
batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.core.tensor import command_queue_of
from onebox.vgpu.dispatch.registry import special

aten: Any = torch.ops.aten


def _wide(x: Tensor) -> Tensor:
    """Cast a tensor to the type of its statistics."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _over_batch(x: Tensor) -> list[int]:
    """Return the dimensions other than the channels."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _along(values: Tensor, x: Tensor) -> Tensor:
    """Reshape one value per channel to broadcast over a batch."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the mean and the inverse standard deviation of each channel."""
    variance, mean = torch.var_mean(_wide(x), _over_batch(x), correction=0)
    return mean, (variance + eps).rsqrt()


def _gathered(
    x: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the statistics over all ranks from those of each, and update the running ones."""
    share = (counts / counts.sum()).to(means.dtype).unsqueeze(1)
    mean = (share * means).sum(0)
    variance = (share * (invstds.pow(-2) - eps + (means - mean).square())).sum(0)
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        unbiased = variance * (counts.sum() / (counts.sum() - 1)).to(variance.dtype)
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return mean, (variance + eps).rsqrt()


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """Normalise, scale and shift a batch."""
    made = (_wide(x) - _along(mean, x)) * _along(invstd, x)
    if weight is not None:
        made = made * _along(weight, x)
    if bias is not None:
        made = made + _along(bias, x)
    return made.to(x.dtype)


def _backward_sums(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *_: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return this rank's sums for the gradient of the batch, and the gradients of weight and bias."""
    total = _wide(grad).sum(_over_batch(x))
    along_x = (_wide(grad) * (_wide(x) - _along(mean, x))).sum(_over_batch(x))
    like = mean if weight is None else weight
    return total, along_x, (along_x * invstd).to(like.dtype), total.to(like.dtype)


def _backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    total: Tensor,
    along_x: Tensor,
    counts: Tensor,
) -> Tensor:
    """Return the gradient of the batch, from the sums over all ranks."""
    size = counts.sum().to(mean.dtype)
    scale = invstd if weight is None else invstd * weight
    slope = invstd.square() * along_x / size
    made = _wide(grad) - _along(total / size, x) - (_wide(x) - _along(mean, x)) * _along(slope, x)
    return (made * _along(scale, x)).to(grad.dtype)


def _unless_cuda(operator: Any, instead: Callable[..., Any]) -> None:
    """Run an operator itself on GPUs, and a function on other devices."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        queue = command_queue_of(args[0])
        if queue.pool.devices[queue.worker].kind == "cuda":
            return NotImplemented
        return instead(*args, **kwargs)

    special(operator)(run)


_unless_cuda(aten.batch_norm_stats.default, _stats)
_unless_cuda(aten.batch_norm_gather_stats_with_counts.default, _gathered)
_unless_cuda(aten.batch_norm_elemt.default, _normalised)
_unless_cuda(aten.batch_norm_backward_reduce.default, _backward_sums)
_unless_cuda(aten.batch_norm_backward_elemt.default, _backward)
