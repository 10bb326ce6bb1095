"""Modules: moved to and from a device by swapping their parameters, and loaded by copying into them.

``module.to`` cannot set the data of a tensor of another device, and new parameters would separate tied ones and be
unknown to an optimizer; so PyTorch is set to swap tensors where a virtual device is involved, and only there. It would
then swap in ``load_state_dict``, too, which fails where other objects than the module reference the parameters, as
DistributedDataParallel does. The parameters of a scripted module always have such references: it gets new parameters.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onebox.vgpu.core.tensor import is_virtual

_state = threading.local()

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def swapping(original: Callable[[], bool]) -> Callable[[], bool]:
    """Wrap the query of PyTorch's setting that tensors are swapped: where a virtual device is involved, they are."""

    @functools.wraps(original)
    def get_swap_module_params_on_conversion() -> bool:
        if getattr(_state, "loading", False):
            return False
        return getattr(_state, "moving", False) or original()

    return get_swap_module_params_on_conversion


def loading(load: Callable[..., None]) -> Callable[..., None]:
    """Wrap the loading of a module's own parameters, to copy into virtual ones."""

    @functools.wraps(load)
    def _load_from_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        with _set("loading", any(map(is_virtual, self._parameters.values()))):
            load(self, *args, **kwargs)

    return _load_from_state_dict


def moving(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the conversion of a module, to swap parameters that go to or from a virtual device."""

    @functools.wraps(apply)
    def _apply(self: Any, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        if not _moves(self, fn):
            with _set("moving", False):
                return apply(self, fn, *args, **kwargs)
        scripted = isinstance(self, torch.jit.ScriptModule)  # whose parameters have other references
        with _set("moving", not scripted), _hooks_kept(self):
            _let_go(self)
            return apply(self, fn, *args, **kwargs)

    return _apply


@contextmanager
def _set(name: str, value: bool) -> Iterator[None]:
    before = getattr(_state, name, False)
    setattr(_state, name, value)
    try:
        yield
    finally:
        setattr(_state, name, before)


def _moves(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a conversion moves a module's own parameters to or from a virtual device."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not own or any(map(is_virtual, own)):
        return bool(own)
    try:
        with torch.no_grad():
            return is_virtual(fn(torch.empty(0, dtype=own[0].dtype)))
    except Exception:  # the conversion itself raises the error
        return False


@contextmanager
def _hooks_kept(module: nn.Module) -> Iterator[None]:
    """Keep the hooks of parameters, which belong to the tensors that are swapped."""
    own = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
    before = [(key, name, getattr(tensor, name, None)) for key, tensor in own.items() for name in _HOOKS]
    yield
    for key, name, hooks in before:
        if hooks:
            setattr(module._parameters[key], name, hooks)


def _let_go(module: nn.Module) -> None:
    """Detach values that a module has computed from its parameters, such as a weight norm by a hook: their graph
    references them."""
    own = vars(module)
    own.update({name: value.detach() for name, value in own.items() if isinstance(value, Tensor) and value.grad_fn})
