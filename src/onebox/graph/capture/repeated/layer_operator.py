"""A call of a repeated layer as one operator in a trace, forward and backward; it never runs.

``onebox::repeated_layer`` maps the tensors of a call (arguments, parameters, buffers) to its results, and
``onebox::repeated_layer_backward`` the gradients of its results to those of its tensors that require one. The nodes of
these operators are replaced by those of the layer once the trace is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_library = torch.library.Library("onebox", "FRAGMENT")
_library.define("repeated_layer(Tensor[] given, int call) -> Tensor[]")
_library.define("repeated_layer_backward(Tensor[] gradients, int call) -> Tensor[]")

FORWARD: OpOverload = torch.ops.onebox.repeated_layer.default
BACKWARD: OpOverload = torch.ops.onebox.repeated_layer_backward.default


class Unrepeatable(Exception):
    """A layer is used in a way that its one trace does not cover: the model has to be traced as a whole."""


@dataclass(frozen=True, kw_only=True)
class CallSpecs:
    """The tensors of a call, as tensors without values.

    Args:
        results: Its results.
        gradients: The gradients of its tensors that require one, in order.
        relaid: The calls with the same trace whose results' gradients have another layout than in it.
    """

    results: Sequence[Tensor]
    gradients: Sequence[Tensor]
    relaid: set[int]


_numbers = itertools.count()
_specs: dict[int, CallSpecs] = {}


def add_call(specs: CallSpecs) -> int:
    """Return a number for a call; valid until :func:`remove_call`."""
    number = next(_numbers)
    _specs[number] = specs
    return number


def remove_call(number: int) -> None:
    """Forget a call."""
    del _specs[number]


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]


@torch.library.register_fake("onebox::repeated_layer", lib=_library)
def _results(given: Sequence[Tensor], call: int) -> list[Tensor]:
    return _like(_specs[call].results)


@torch.library.register_fake("onebox::repeated_layer_backward", lib=_library)
def _gradients(gradients: Sequence[Tensor], call: int) -> list[Tensor]:
    return _like(_specs[call].gradients)


class _RepeatedLayer(torch.autograd.Function):
    """The operator with its gradient."""

    @staticmethod
    def forward(ctx: Any, call: int, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        made = FORWARD(list(given), call)
        specs = _specs[call].results
        ctx.mark_non_differentiable(*(one for one, like in zip(made, specs, strict=True) if not like.requires_grad))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise Unrepeatable("a gradient of a gradient")
        needed = []
        specs = _specs[ctx.call]
        for gradient, like in zip(gradients, specs.results, strict=True):
            if like.requires_grad:
                if gradient is None:
                    raise Unrepeatable("a result without a gradient")
                if gradient.stride() != like.stride():
                    specs.relaid.add(ctx.call)
                needed.append(_laid_out(gradient, like))
        if len(specs.relaid) > 1:  # a trace of the model would have this layout in all of them
            raise Unrepeatable("gradients with elements in another order")
        made = iter(BACKWARD(needed, ctx.call))
        return None, *(next(made) if wanted else None for wanted in ctx.needs_input_grad[1:])


def _laid_out(gradient: Tensor, like: Tensor) -> Tensor:
    """Return a gradient with its elements in memory as the layer's trace has them.

    Raises:
        Unrepeatable: A trace of the model might have its layout in the layer, and in those before it.
    """
    if gradient.stride() == like.stride():
        return gradient
    expanded = any(not stride and size != 1 for size, stride in zip(gradient.shape, gradient.stride(), strict=True))
    if not like.is_contiguous() or not expanded:
        raise Unrepeatable("a gradient with elements in another order")
    return gradient.contiguous()


def call_layer(call: int, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the results of a call of a layer, in a trace.

    Args:
        call: The number of :func:`add_call`.
        given: Its tensors.

    Raises:
        Unrepeatable: Later, in the trace's backward: a gradient that the layer's trace does not have is needed.
    """
    made: tuple[Tensor, ...] = _RepeatedLayer.apply(call, *given)
    return made
