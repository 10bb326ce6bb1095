"""Autocast on virtual devices: lists of operators for lower precision and for float32.

The lists are those that PyTorch documents for GPUs ("Autocast Op Reference", pytorch.org/docs/stable/amp.html).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LOWER = (
    "matmul", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "gru_cell", "linear", "lstm_cell", "mm", "mv", "prelu",
    "rnn_tanh_cell", "rnn_relu_cell", "scaled_dot_product_attention", "linalg_vecdot",
)  # fmt: skip
"""Run in the type of autocast."""

FLOAT32 = (
    "acos", "asin", "binary_cross_entropy_with_logits", "cosh", "cosine_embedding_loss", "cdist",
    "cosine_similarity", "cross_entropy_loss", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm",
    "hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10", "log2", "log1p", "log_softmax.int",
    "margin_ranking_loss", "mse_loss", "multilabel_margin_loss", "multi_margin_loss", "nll_loss", "nll_loss_nd",
    "norm.Scalar", "norm.ScalarOpt_dim", "nuclear_norm", "pdist", "poisson_nll_loss", "pow.Tensor_Scalar",
    "pow.Tensor_Tensor", "pow.Scalar", "prod", "prod.dim_int", "reciprocal", "renorm", "rsqrt", "sinh",
    "smooth_l1_loss", "soft_margin_loss", "softmax.int", "softplus", "sum", "sum.dim_IntList", "tan",
    "triplet_margin_loss", "huber_loss", "native_layer_norm", "native_group_norm", "linalg_vector_norm",
)  # fmt: skip
"""Run in float32."""

WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot",
    "vdot", "cat", "stack",
)  # fmt: skip
"""Run in the widest type of their arguments."""

BANNED = ("binary_cross_entropy",)
"""Functions whose values do not fit into half precision."""

_LOW = (torch.float16, torch.bfloat16)
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]


def implement(library: torch.library.Library) -> None:
    """Register autocast for the virtual devices."""
    for names, choose in ((LOWER, _asked), (FLOAT32, _float32), (WIDEST, _widest), (BANNED, _banned)):
        for name in names:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if operator is not None:
                library.impl(operator, _caster(operator, choose), "AutocastPrivateUse1")


def implement_others(library: torch.library.Library) -> None:
    """Let all other operators pass autocast; for the library of all namespaces."""
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


def _caster(operator: Any, choose: Callable[[Any, list[Tensor]], torch.dtype | None]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            dtype = choose(operator, _floating((args, kwargs)))
            if dtype is None:
                return operator(*args, **kwargs)
            return operator(*_cast(args, dtype), **_cast(kwargs, dtype))

    return run


def _asked(operator: Any, tensors: list[Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype("vgpu")


def _float32(operator: Any, tensors: list[Tensor]) -> torch.dtype | None:
    return torch.float32 if any(tensor.dtype in _LOW for tensor in tensors) else None


def _widest(operator: Any, tensors: list[Tensor]) -> torch.dtype | None:
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) < 2:
        return None
    return torch.float32 if torch.float32 in kinds else torch.get_autocast_dtype("vgpu")


def _banned(operator: Any, tensors: list[Tensor]) -> torch.dtype | None:
    if any(tensor.dtype in _LOW for tensor in tensors):
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast; use "
            "binary_cross_entropy_with_logits or BCEWithLogitsLoss, which are safe"
        )
    return None


def _floating(value: Any) -> list[Tensor]:
    """Return the tensors among arguments whose type autocast may change."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() and value.dtype != torch.float64 else []
    if isinstance(value, dict):
        return _floating(list(value.values()))
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _floating(item)]
    return []


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if _floating(value) and value.device.type != "cpu" else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value
