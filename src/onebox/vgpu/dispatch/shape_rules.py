"""Shape rules: operators whose result layouts come from the worker, for the first call of a kind or for every call."""

from __future__ import annotations

from typing import Any

import torch

from onebox.vgpu.core.tensor import is_virtual, layout_of

aten = torch.ops.aten

LEARNED = frozenset(
    getattr(packet, name)
    for packet in (
        aten.native_batch_norm,
        aten.native_batch_norm_backward,
        aten._native_batch_norm_legit,
        aten._native_batch_norm_legit_no_training,
        aten._batch_norm_with_update,
        aten._batch_norm_no_update,
        aten._embedding_bag,
        aten._embedding_bag_forward_only,
        aten.multilabel_margin_loss_forward,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._native_multi_head_attention,
        aten._thnn_fused_gru_cell,
        aten._thnn_fused_gru_cell_backward,
    )
    for name in packet.overloads()
)
"""Operators whose results have other shapes on ``meta`` than on a device: learned from the worker's first result."""

CONVOLUTIONS = frozenset({aten.convolution.default, aten.convolution_backward.default})
"""Operators whose result layouts are the device's choice where their tensors are not simply contiguous."""

HALVES = (torch.float16, torch.bfloat16)
"""Types for which statistics of layer norm have another type on ``meta`` than on some devices."""

_BY_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def is_learned(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operator's result layout is learned from the worker's first result.

    Args:
        func: The overload.
        args: Its positional arguments.
    """
    if func in CONVOLUTIONS:
        return not all(layout_of(value).contiguous for value in args if is_virtual(value))
    if func is aten.native_layer_norm.default:
        return args[0].dtype in HALVES
    return func in LEARNED


def depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the size of an operator's result depends on tensor values; for indexing only with masks.

    Args:
        func: The overload.
        args: Its positional arguments.
    """
    if func is aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool(_BY_VALUES & set(func.tags))


def only_checks(func: Any) -> bool:
    """Return whether an operator returns nothing and writes nothing: it can only fail, so its error needs a wait; that
    of an asynchronous assertion comes late everywhere.
    """
    return not func._schema.returns and not func._schema.is_mutable and "async" not in func.name()
