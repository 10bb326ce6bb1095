"""Recurrent layers kept whole while a model is traced: one operator for each layer, not several for each time step.

``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` call an operator for the whole network. Here a network becomes a call of
:data:`onebox.wire.RECURRENT` for each layer, with ordinary dropout between layers, so that dropout uses the run's own
random numbers, and each layer is a part of the graph that a plan may move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from onebox.graph.capture.locate import place_of_call, refusal
from onebox.wire import RECURRENT, RECURRENT_KINDS

_NETWORKS: dict[Any, str] = {getattr(torch._VF, kind): kind for kind in RECURRENT_KINDS}
_PACK = getattr(torch._VF, "_pack_padded_sequence")  # noqa: B009, of a module without declarations
_NAMES = (
    "input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first",
)  # fmt: skip


class WholeRecurrent(TorchFunctionMode):
    """Keeps recurrent layers whole in traces within the context."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = replace_recurrent(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if made is NotImplemented else made


def replace_recurrent(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a call of a recurrent network, computed by an operator for each layer.

    Args:
        func: The called function, any that ``TorchFunctionMode`` intercepts.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        (output, hidden state), for an LSTM (output, hidden state, cell state); ``NotImplemented`` for any other
        function, and inside a transform of ``torch.func``, which decomposes operators.

    Raises:
        CaptureError: The sequences are packed.
    """
    if func is _PACK:
        raise _packed()
    kind = _NETWORKS.get(func)
    if kind is None or torch._C._are_functorch_transforms_active():
        return NotImplemented
    call = dict(zip(_NAMES, args, strict=False)) | dict(kwargs)
    if "batch_sizes" in call or isinstance(call.get("has_biases"), list | tuple):  # the overload for packed sequences
        raise _packed()
    if call.keys() != set(_NAMES):
        return NotImplemented  # PyTorch names the missing argument
    return _network(kind, **call)


def _network(
    kind: str,
    *,
    input: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    states = _in_autocast(list(hx) if kind == "lstm" else [hx])
    weights = _in_autocast(params)
    (value,) = _in_autocast([input.transpose(0, 1) if batch_first else input])
    directions = 2 if bidirectional else 1
    each = len(weights) // num_layers
    behind: list[list[Tensor]] = []
    for layer in range(num_layers):
        if layer and train and dropout:
            value = functional.dropout(value, dropout)
        before = [state.narrow(0, layer * directions, directions) if num_layers > 1 else state for state in states]
        own = list(weights[layer * each : (layer + 1) * each])
        value, *after = RECURRENT(value, before, own, kind, has_biases, bidirectional)
        behind.append(after)
    ends = [torch.cat(parts) if num_layers > 1 else parts[0] for parts in zip(*behind, strict=True)]
    return value.transpose(0, 1) if batch_first else value, *ends


def _in_autocast(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in the type of autocast, if it is on: PyTorch's autocast for GPUs treats recurrent layers so."""
    if not torch.is_autocast_enabled("cpu"):
        return list(tensors)
    dtype = torch.get_autocast_dtype("cpu")
    return [tensor.to(dtype) if tensor.dtype == torch.float32 else tensor for tensor in tensors]


def _packed() -> Exception:
    return refusal(
        "The model",
        place_of_call(),
        "it packs sequences of several lengths (pack_padded_sequence), so that shapes depend on the values of lengths",
        "Pad the sequences to one length and mask what the padding adds to the loss",
    )
