"""The cells of LSTMs and GRUs, which PyTorch runs as one fused operator on devices like a GPU.

Workers on a GPU have it; for all others it is decomposed here, below autograd. Formulas: the documentation of
``torch.nn.LSTM`` and ``torch.nn.GRU``; the order of the gates is that of their weights. The values that forward saves
for backward (``workspace``) have the layout of PyTorch's kernels for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.core.tensor import command_queue_of, is_virtual
from onebox.vgpu.dispatch.registry import special

aten = torch.ops.aten


def _taken_apart(func: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that makes a function replace an operator on workers without a GPU."""

    def register(cell: Callable[..., Any]) -> Callable[..., Any]:
        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = (*args, *kwargs.values())
            queue = next(command_queue_of(value) for value in given if is_virtual(value))
            if queue.pool.devices[queue.worker].kind == "cuda":
                return NotImplemented
            return cell(*args, **kwargs)

        special(func)(run)
        return cell

    return register


@_taken_apart(aten._thnn_fused_lstm_cell.default)
def _lstm(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden state, cell state and the activated gates (input, forget, cell, output) side by side."""
    gates = _biased(hidden_gates, hidden_bias) + _biased(input_gates, input_bias)
    ingate, forget, cell, outgate = gates.chunk(4, 1)
    ingate.sigmoid_()
    forget.sigmoid_()
    cell.tanh_()
    outgate.sigmoid_()
    cy = (forget * cx).add_(ingate * cell)
    return outgate * cy.tanh(), cy, gates


@_taken_apart(aten._thnn_fused_lstm_cell_backward_impl.default)
def _lstm_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the gates before activation, of the previous cell state, and of a bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    ingate, forget, cell, outgate = workspace.chunk(4, 1)
    grad_outgate = torch.zeros_like(cx)
    if grad_hy is not None:
        squashed = cy.tanh()
        grad_outgate = aten.sigmoid_backward(grad_hy * squashed, outgate)
        through = aten.tanh_backward(grad_hy * outgate, squashed)
        grad_cy = through if grad_cy is None else grad_cy + through
    assert grad_cy is not None
    grad_gates = torch.cat(
        [
            aten.sigmoid_backward(grad_cy * cell, ingate),
            aten.sigmoid_backward(grad_cy * cx, forget),
            aten.tanh_backward(grad_cy * ingate, cell),
            grad_outgate,
        ],
        1,
    )
    return grad_gates, grad_cy * forget, grad_gates.sum(0) if has_bias else None


@_taken_apart(aten._thnn_fused_gru_cell.default)
def _gru(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the hidden state, and side by side: reset, update and new gate, previous hidden state, its share of
    new."""
    reset_in, update_in, new_in = _biased(input_gates, input_bias).chunk(3, 1)
    reset_hidden, update_hidden, new_hidden = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    reset = (reset_in + reset_hidden).sigmoid_()
    update = (update_in + update_hidden).sigmoid_()
    new = (new_in + new_hidden * reset).tanh_()
    return (hx - new).mul_(update).add_(new), torch.cat([reset, update, new, hx, new_hidden], 1)


@_taken_apart(aten._thnn_fused_gru_cell_backward.default)
def _gru_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of both kinds of gates before activation, of the hidden state, and of both biases."""
    reset, update, new, hx, new_hidden = workspace.chunk(5, 1)
    grad_update = aten.sigmoid_backward(grad_hy * (hx - new), update)
    grad_new = aten.tanh_backward(grad_hy * (1 - update), new)
    grad_reset = aten.sigmoid_backward(grad_new * new_hidden, reset)
    grad_input = torch.cat([grad_reset, grad_update, grad_new], 1)
    grad_hidden = torch.cat([grad_reset, grad_update, grad_new * reset], 1)
    biases = (grad_input.sum(0), grad_hidden.sum(0)) if has_bias else (None, None)
    return grad_input, grad_hidden, grad_hy * update, *biases


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


__all__: list[str] = []
