"""Operators that take the lengths of sequences, which stay on the host: PyTorch requires them there, even for a GPU.

Packed sequences (``torch.nn.utils.rnn``) concatenate the steps of all sequences, sorted by time. The order depends on
the lengths alone, so the client computes it, and the worker gathers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.core.tensor import command_queue_of, is_virtual
from onebox.vgpu.dispatch.copies import upload
from onebox.vgpu.dispatch.registry import special

aten = torch.ops.aten


@special(aten._pack_padded_sequence.default)
def _pack(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Pack padded sequences; return the elements, and the number at each time, on the host."""
    padded, lengths, batch_first = args
    if is_virtual(lengths):
        raise RuntimeError(
            "'lengths' argument should be a 1D CPU int64 tensor, but got "
            f"{lengths.dim()}D {lengths.device} {str(lengths.dtype).removeprefix('torch.').capitalize()} tensor"
        )
    first, second = padded.shape[:2]
    numbers = torch.arange(first * second).view(first, second, 1)
    order, batch_sizes = aten._pack_padded_sequence.default(numbers, lengths, batch_first)
    places = upload(order.view(-1), command_queue_of(padded))
    return padded.reshape(first * second, *padded.shape[2:]).index_select(0, places), batch_sizes


__all__: list[str] = []
