"""``EmbeddingBag``, whose sparse gradient PyTorch computes by a function that makes no such tensor on a device."""

from __future__ import annotations

from typing import Any

import torch

from onebox.vgpu.dispatch.registry import special

aten = torch.ops.aten


@special(aten._embedding_bag_backward.default)
def _of_bags(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient of the weight of an ``EmbeddingBag``, sparse if requested."""
    grad, indices, offsets, bags, sizes, _maxima, count, by_frequency, mode, sparse, weights, *padding = args
    if not sparse:
        return NotImplemented
    if not bags.numel():  # as PyTorch computes it: the bag of each index
        starts = torch.zeros(len(indices) + 1, dtype=indices.dtype, device=indices.device)
        bags = starts.index_add_(0, offsets, torch.ones_like(offsets))[:-1].cumsum(0) - 1
    return aten._embedding_bag_sparse_backward.default(
        grad, indices, offsets, bags, sizes, count, by_frequency, mode, weights, *padding, **kwargs
    )
