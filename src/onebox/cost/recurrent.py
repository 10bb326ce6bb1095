"""Recurrent layers, which are one operator of many kernels: their operations, kernel launches and workspace. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from onebox.errors import WireError
from onebox.wire import RECURRENT, RECURRENT_BACKWARD, Many, Operator, SlotArgument, TensorSpec

_SEQUENCES = {"lstm": (5, 12), "gru": (4, 11), "rnn_tanh": (3, 4), "rnn_relu": (3, 4)}
"""For each kind the workspace of forward and backward, as a multiple of the hidden states of all steps. Measured with
PyTorch's kernels for CPUs: values before and after the gates, and in backward the tensors that autograd keeps."""

_KERNELS = {"lstm": 12, "gru": 12, "rnn_tanh": 4, "rnn_relu": 4}
"""Number of kernels that forward starts for each time step and direction."""

_BACKWARD = 3
"""Backward computes the layer again, then the gradients of both factors of each product."""


_NAMES = {str(RECURRENT): False, str(RECURRENT_BACKWARD): True}
"""The operators, and whether each is backward."""

_DIMS = 3


class Recurrent(NamedTuple):
    """The cost of a recurrent layer, forward or backward.

    Args:
        flops: Floating-point operations of its products.
        kernels: Number of kernels that it starts.
        passing_bytes: Workspace that it needs while it runs, beside its arguments and outputs.
    """

    flops: float
    kernels: int
    passing_bytes: int


def recurrent(operator: Operator, specs: Mapping[int, TensorSpec]) -> Recurrent | None:
    """Return the cost of an operator; ``None`` if it is not a recurrent layer.

    Args:
        operator: The operator.
        specs: Specs of the program's slots.

    Raises:
        WireError: Its arguments do not fit such a layer.
    """
    if operator.name not in _NAMES:
        return None
    backward = _NAMES[operator.name]
    source, states, weights, kind, *_ = *operator.args[backward:], *(None,) * 4
    if not (isinstance(source, SlotArgument) and isinstance(states, Many) and isinstance(weights, Many)) or (
        not isinstance(kind, str) or kind not in _SEQUENCES
    ):
        raise WireError(f"{operator.name} takes {operator.args}, which are no arguments of a recurrent layer")
    sequence, before = specs[source.index].shape, _specs(states, specs)
    if len(sequence) != _DIMS or not before or any(len(state.shape) != _DIMS for state in before):
        raise WireError(f"{operator.name} takes a sequence {list(sequence)} and states {list(map(str, before))}")
    last, times = before[-1], _BACKWARD if backward else 1
    matrices = sum(prod(weight.shape) for weight in _specs(weights, specs) if len(weight.shape) > 1)
    return Recurrent(
        flops=2.0 * sequence[0] * sequence[1] * matrices * times,
        kernels=sequence[0] * last.shape[0] * _KERNELS[kind] * times,
        passing_bytes=_SEQUENCES[kind][backward] * sequence[0] * last.size_bytes,
    )


def _specs(tensors: Many, specs: Mapping[int, TensorSpec]) -> list[TensorSpec]:
    return [specs[item.index] for item in tensors.items if isinstance(item, SlotArgument)]
