"""``torch.histc`` of integers: scripts use it on GPUs, where PyTorch has it; its kernel for CPUs takes floats only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.core.tensor import command_queue_of
from onebox.vgpu.dispatch.registry import special

aten = torch.ops.aten


@special(aten.histc.default)
def _histc(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    queue = command_queue_of(tensor)
    floating = tensor.is_floating_point() or tensor.dtype == torch.bool  # no device accepts bool
    if floating or queue.pool.devices[queue.worker].kind == "cuda":
        return NotImplemented
    return _of_integers(*args, **kwargs)


def _of_integers(tensor: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Count integers in bins of equal width, as PyTorch's kernel for GPUs does: exactly, in integers.

    Args:
        tensor: Integers of any shape.
        bins: Number of bins.
        min: Lower end of the first bin; if equal to ``max``, the range of the elements is used.
        max: Upper end of the last bin, inclusive.
    """
    if bins <= 0:
        raise RuntimeError("bins must be > 0")
    if min > max:
        raise RuntimeError("max must be larger than min")
    wide = tensor.flatten().to(torch.int64)
    low, high = int(min), int(max)
    if low == high and wide.numel():
        low, high = int(wide.min()), int(wide.max())
    if low == high:
        low, high = low - 1, high + 1
    places = ((wide - low) * bins).div(high - low, rounding_mode="floor").clamp(max=bins - 1)
    places = torch.where((wide < low) | (wide > high), bins, places)
    counts = torch.zeros(bins + 1, dtype=tensor.dtype, device=tensor.device)
    return counts.index_add_(0, places, torch.ones_like(places, dtype=tensor.dtype))[:bins].clone()


__all__: list[str] = []
