"""Recurrent layers as operators: ``onebox::recurrent`` and ``onebox::recurrent_backward``, each one layer of a network.

PyTorch's own operators (such as ``aten::lstm``) have no gradient formula in most cases: autograd decomposes them into
several operators for each time step, thousands in one graph. These two operators are the whole layer, forward and
backward, in one or both directions. They use PyTorch's own kernels: backward recomputes the layer with autograd instead
of keeping autograd's state of every time step. A layer is decomposed for second derivatives only.

Sequences are time-major: input [T, B, F], states [directions, B, H], output [T, B, directions x H].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Kinds of layers: operators of ``torch.ops.aten`` with an overload ``input``."""

_library = torch.library.Library("onebox", "DEF")
_library.define(
    "recurrent(Tensor input, Tensor[] states, Tensor[] weights, str kind, bool biases, bool bidirectional) -> Tensor[]"
)
_library.define(
    "recurrent_backward(Tensor?[] gradients, Tensor input, Tensor[] states, Tensor[] weights, str kind, bool biases, "
    "bool bidirectional, bool[] wanted) -> Tensor[]"
)

RECURRENT: OpOverload = torch.ops.onebox.recurrent.default
"""Maps a sequence, the initial states and the parameters of a layer to [output, *final states]."""

RECURRENT_BACKWARD: OpOverload = torch.ops.onebox.recurrent_backward.default
"""Returns the required gradients of [input, *states, *weights] from those of forward's results."""


def _forward(
    input: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], kind: str, biases: bool, bidirectional: bool
) -> list[Tensor]:
    return _layer(input, states, weights, kind, biases, bidirectional, train=False)


def _backward(
    gradients: Sequence[Tensor | None],
    input: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    kind: str,
    biases: bool,
    bidirectional: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:
    given = [input, *states, *weights]
    if len(wanted) != len(given):
        raise ValueError(f"{len(wanted)} marks of wanted gradients for {len(given)} tensors")
    with torch.inference_mode(False), _views_tracked(), torch.enable_grad():
        leaves = [_leaf(tensor, marked) for tensor, marked in zip(given, wanted, strict=True)]
        split = 1 + len(states)
        made = _layer(leaves[0], leaves[1:split], leaves[split:], kind, biases, bidirectional, train=True)
        pairs = [(value, _leaf(g, False)) for value, g in zip(made, gradients, strict=True) if g is not None]
        sources = [leaf for leaf, marked in zip(leaves, wanted, strict=True) if marked]
        found = torch.autograd.grad(
            [value for value, _ in pairs], sources, [gradient for _, gradient in pairs], materialize_grads=True
        )
    return [gradient.contiguous() for gradient in found]


def _views_tracked() -> Any:
    """Let autograd track views although it has called the operator, whose operations it does not record."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def _leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Return a tensor with the same memory that autograd may save, which excludes those made in inference mode."""
    anew = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        anew.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return anew.requires_grad_(requires_grad)


def _layer(
    input: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    kind: str,
    biases: bool,
    bidirectional: bool,
    *,
    train: bool,
) -> list[Tensor]:
    """Run PyTorch's operator for one layer; return the output and the states, each in separate memory."""
    if kind not in KINDS:
        raise ValueError(f"a recurrent layer of kind {kind!r}; allowed: {', '.join(KINDS)}")
    call = getattr(torch.ops.aten, kind).input
    hx = list(states) if kind == "lstm" else states[0]
    made = call(input, hx, list(weights), biases, 1, 0.0, train, bidirectional, False)
    return [value.contiguous() for value in made]


def _forward_shapes(
    input: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], kind: str, biases: bool, bidirectional: bool
) -> list[Tensor]:
    types = sorted({str(tensor.dtype) for tensor in (input, *states, *weights)})
    if len(types) > 1:
        raise ValueError(
            f"a recurrent layer whose input, states and weights are of {' and '.join(types)}: one is allowed"
        )
    if input.dim() != states[0].dim() or input.shape[-1] != weights[0].shape[-1]:
        raise ValueError(
            f"a recurrent layer over an input {list(input.shape)} with states {list(states[0].shape)} and weights "
            f"{list(weights[0].shape)}: an input of 3 dimensions, the last as large as that of the weights, is allowed"
        )
    features = states[0].shape[2] * (2 if bidirectional else 1)
    return [input.new_empty((*input.shape[:2], features)), *(state.new_empty(state.shape) for state in states)]


def _backward_shapes(
    gradients: Sequence[Tensor | None],
    input: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    kind: str,
    biases: bool,
    bidirectional: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:
    given = zip([input, *states, *weights], wanted, strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, marked in given if marked]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, states, weights = inputs[:3]
    ctx.options = inputs[3:]
    ctx.states = len(states)
    ctx.save_for_backward(input, *states, *weights)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    saved, split = ctx.saved_tensors, 1 + ctx.states
    needs = ctx.needs_input_grad
    wanted = [needs[0], *needs[1], *needs[2]]
    if torch.is_grad_enabled():  # create_graph=True: a second derivative is requested
        made = iter(_unrolled(gradients, saved, ctx.states, ctx.options, wanted))
    else:
        made = iter(RECURRENT_BACKWARD(list(gradients), saved[0], saved[1:split], saved[split:], *ctx.options, wanted))
    found = [next(made) if marked else None for marked in wanted]
    return found[0], found[1:split], found[split:], None, None, None


def _unrolled(
    gradients: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    states: int,
    options: tuple[str, bool, bool],
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Return the required gradients in a form that autograd can differentiate again."""
    given = [tensor.view_as(tensor) for tensor in saved]  # distinct objects, if one tensor is passed twice
    split = 1 + states
    made = _layer(given[0], given[1:split], given[split:], *options, train=True)
    pairs = [(value, gradient) for value, gradient in zip(made, gradients, strict=True) if gradient is not None]
    return torch.autograd.grad(
        [value for value, _ in pairs],
        [tensor for tensor, marked in zip(given, wanted, strict=True) if marked],
        [gradient for _, gradient in pairs],
        create_graph=True,
        materialize_grads=True,
    )


def _register() -> None:
    for name, run, shapes in (
        ("recurrent", _forward, _forward_shapes),
        ("recurrent_backward", _backward, _backward_shapes),
    ):
        for key in ("CPU", "CUDA"):
            _library.impl(name, run, key)
        torch.library.register_fake(f"onebox::{name}", shapes, lib=_library)
    torch.library.register_autograd("onebox::recurrent", _differentiate, setup_context=_save, lib=_library)


_register()
