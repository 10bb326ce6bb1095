"""Operators with ``out=`` whose results PyTorch does not write for tensor subclasses.

``torch.linalg.matrix_rank`` has another code path for such tensors, which ignores ``out``. It is written here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from onebox.vgpu.dispatch.registry import special

_rank = torch.ops.aten.linalg_matrix_rank

_FORGETFUL: dict[OpOverload, OpOverload] = {
    _rank.out: _rank.default,
    _rank.out_tol_tensor: _rank.tol_tensor,
    _rank.atol_rtol_float_out: _rank.atol_rtol_float,
    _rank.atol_rtol_tensor_out: _rank.atol_rtol_tensor,
}
"""Overloads with ``out``, each with the one that returns a new tensor."""


def implement(library: torch.library.Library) -> None:
    """Register them above autograd, which would decompose the operators."""
    for function, plain in _FORGETFUL.items():
        library.impl(function, _into(plain), "AutogradPrivateUse1")
        special(function)(_whole(_into(plain)))


def _whole(function: Callable[..., Tensor]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Return the implementation where autograd is off, and operators arrive whole."""
    return lambda args, kwargs: function(*args, **kwargs)


def _into(plain: OpOverload) -> Callable[..., Tensor]:
    def run(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        made = plain(*args, **kwargs)
        if out.shape != made.shape:
            out.resize_(made.shape)
        return out.copy_(made)

    return run
