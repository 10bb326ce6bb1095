"""Padded batches in ``nn.TransformerEncoder``, which in eval mode converts them to nested tensors.

Workers do not support nested tensors: the padded batch passes through the layers with its mask, and the output has
zeros in the padding, as in PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from onebox.vgpu.core.tensor import command_queue_of
from onebox.vgpu.dispatch.dispatch import launch
from onebox.vgpu.dispatch.registry import special

aten = torch.ops.aten

_paddings: Any = WeakTensorKeyDictionary()
"""The masks of padded batches: true where a batch has padding."""


@special(aten._nested_tensor_from_mask_left_aligned.default)
def _is_left_aligned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether all elements precede all padding in each row of a mask; waits for the mask's values."""
    _, mask = args
    return bool((mask[:, 1:] <= mask[:, :-1]).all())


@special(aten._nested_tensor_from_mask.default)
def _with_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return a padded batch with its mask attached, in place of a nested tensor."""
    rows, mask = args[:2]
    return _knowing(rows.clone(), mask.logical_not())


@special(aten._transformer_encoder_layer_fwd.default)
def _through_layer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run a layer; a batch with an attached mask is masked by it."""
    rows = args[0]
    queue = command_queue_of(rows)
    padding = _paddings.get(rows)
    if padding is None:
        # not to be learned: a batch like it may have a mask
        plain: Tensor = launch(queue, aten._transformer_encoder_layer_fwd.default, *args, **kwargs)
        return plain
    by_key = 1  # the kind of mask that PyTorch names src_key_padding_mask
    return _knowing(launch(queue, aten._transformer_encoder_layer_fwd.default, *args[:18], padding, by_key), padding)


@special(aten.to_padded_tensor.default)
def _padded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return a batch with its padding filled."""
    rows, value = args[:2]
    padding = _paddings.get(rows)
    if padding is None:
        raise NotImplementedError(
            "virtual devices have no nested tensors, which nn.TransformerEncoder makes of padded batches in eval mode "
            "where its layers have hooks or are not plain ones; make it with enable_nested_tensor=False"
        )
    made: Tensor = rows.masked_fill(padding.unsqueeze(-1), value)
    return made


def _knowing(rows: Tensor, padding: Tensor) -> Tensor:
    """Attach a mask to a batch."""
    _paddings[rows] = padding
    return rows


__all__: list[str] = []
