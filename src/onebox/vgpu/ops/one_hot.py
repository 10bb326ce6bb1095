"""``one_hot``, whose values PyTorch checks on CPUs alone, and leaves to the kernels of other devices."""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten

_NEGATIVE = "Class values must be non-negative."
_TOO_LARGE = "Class values must be smaller than num_classes."


def implement(library: torch.library.Library) -> None:
    """Register it above autograd, which would decompose the operator, and where there is none."""
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl(aten.one_hot.default, _one_hot, key)


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Return a row for each value; without a number of classes this waits for the largest one, as it must."""
    if tensor.dtype is not torch.int64:
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if not tensor.numel():
        if num_classes <= 0:
            raise RuntimeError("Can not infer total number of classes from empty tensor.")
        return torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
    if num_classes == -1:
        lowest, highest = torch.stack(torch.aminmax(tensor)).tolist()
        if lowest < 0:
            raise RuntimeError(_NEGATIVE)
        num_classes = highest + 1
        inside = tensor
    elif num_classes < 1:
        raise RuntimeError(_TOO_LARGE)
    else:
        inside = aten._functional_assert_async.msg((tensor >= 0).all(), _NEGATIVE, tensor)
        inside = aten._functional_assert_async.msg((tensor < num_classes).all(), _TOO_LARGE, inside)
    rows = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
    made: Tensor = rows.scatter_(-1, inside.unsqueeze(-1), 1)
    return made
