"""Operators by name, and properties derived from their schemas."""

from __future__ import annotations

import functools

import torch
from torch._ops import OpOverload

from onebox.errors import WireError
from onebox.wire.attention import ATTENTION, ATTENTION_BACKWARD
from onebox.wire.recurrent import RECURRENT, RECURRENT_BACKWARD

_OWN = {str(operator): operator for operator in (ATTENTION, ATTENTION_BACKWARD, RECURRENT, RECURRENT_BACKWARD)}
"""Operators that are not PyTorch's."""


@functools.cache
def overload(name: str) -> OpOverload:
    """Return an operator of ``torch.ops.aten``, or one of onebox's own, by its full name: ``aten.addmm.default``.

    Raises:
        WireError: The operator does not exist in this torch.
    """
    if name in _OWN:
        return _OWN[name]
    parts = name.split(".")
    if len(parts) == 3 and parts[0] == "aten":
        found = getattr(getattr(torch.ops.aten, parts[1], None), parts[2], None)
        if isinstance(found, OpOverload):
            return found
    raise WireError(f"torch {torch.__version__} has no operator {name!r}")


def is_known(operator: object) -> bool:
    """Return whether programs may name an operator: one of ``torch.ops.aten``, or one of onebox's own."""
    return isinstance(operator, OpOverload) and (operator.namespace == "aten" or str(operator) in _OWN)


def shares_memory(operator: OpOverload) -> bool:
    """Return whether the single output of an operator is a view of its argument."""
    if operator is torch.ops.aten._unsafe_view.default:
        return True
    returns = operator._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def is_random(operator: OpOverload) -> bool:
    """Return whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags
