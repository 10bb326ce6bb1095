"""``_chunk_cat``, by which FSDP lays out the gradients that it sums: workers have the operators that it consists of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.dispatch.registry import special

aten = torch.ops.aten


@special(aten._chunk_cat.default, aten._chunk_cat.out)
def _chunk_cat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return tensors one beside the other, each in chunks of equal sizes along a dimension, the last with zeros."""
    tensors, dimension, chunks = args
    made: Tensor = torch.cat([_in_chunks(tensor, dimension, chunks) for tensor in tensors], dimension + 1, **kwargs)
    return made


def _in_chunks(tensor: Tensor, dimension: int, chunks: int) -> Tensor:
    """Return a tensor [*outer, size, *inner] as one of shape [*outer, chunks, rest]."""
    missing = -tensor.shape[dimension] % chunks
    if missing:
        tensor = torch.constant_pad_nd(tensor, [0, 0] * (tensor.dim() - dimension - 1) + [0, missing])
    return tensor.reshape(*tensor.shape[:dimension], chunks, -1)


__all__: list[str] = []
