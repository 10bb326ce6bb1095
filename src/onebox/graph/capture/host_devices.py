"""Capture of a model on other devices as if it were on the host: the device of a graph is decided later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_HOST = torch.device("cpu")


@contextlib.contextmanager
def on_host(module: nn.Module) -> Iterator[bool]:
    """Replace a model's tensors on other devices by tensors on the host, within the context.

    Parameters and buffers are replaced by tensors without values, which a capture does not read (they are never written
    to, so that they take no memory); tensors that are plain attributes, which become constants of a graph, by copies. A
    tensor that has several names has one replacement.

    Args:
        module: The model; restored afterwards.

    Yields:
        Whether there are any.
    """
    found = list(_tensors(module))
    standing: dict[int, Tensor] = {}
    try:
        for part, name, tensor, constant in found:
            if id(tensor) not in standing:
                standing[id(tensor)] = tensor.detach().cpu() if constant else _stand_in(tensor)
            setattr(part, name, standing[id(tensor)])
        yield bool(found)
    finally:
        for part, name, tensor, _ in found:
            setattr(part, name, tensor)


def _tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor, bool]]:
    """Yield each tensor on another device: its module, its name there, and whether it is a plain attribute."""
    for part in module.modules():
        for held, constant in ((part._parameters, False), (part._buffers, False), (vars(part), True)):
            for name, tensor in held.items():
                if isinstance(tensor, Tensor) and tensor.device != _HOST:
                    yield part, name, tensor, constant


def _stand_in(tensor: Tensor) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


class HostDevices(TorchFunctionMode):
    """Replaces every device in the calls of forward by the host: a graph runs where a plan places it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        named = dict(kwargs or {})
        if named.get("device") is not None and func is not torch.device:
            named["device"] = _HOST
        names = str | int if func is torch.Tensor.to else ()  # where a device may be a name or a number
        moved = (_HOST if isinstance(value, torch.device) or _is(value, names) else value for value in args)
        return func(*moved, **named)


def _is(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
