"""Readers of a trained model in this process: what reads its weights by a hook of PyTorch's gets the workers' weights.

While a trainer is open, the modules of its model have hooks before ``state_dict()`` and before forward, its optimizers
one before ``step()``, and ``AveragedModel.update_parameters``, which has no hook, is replaced by one that asks. Each
brings the weights if steps have been made since the last ``pull()``. ``clip_grad_norm_`` finds no gradients, and says
so. ``model.parameters()`` has no hook: what reads tensors themselves has to pull.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from onebox.engine.entry import inside

_LOG = logging.getLogger("onebox")

_AVERAGED = AveragedModel.update_parameters
_CLIP = clip_grad._clip_grads_with_norm_
_READERS: weakref.WeakSet[Readers] = weakref.WeakSet()
"""Readers of all open trainers."""

_FORWARD: weakref.WeakKeyDictionary[nn.Module, tuple[ReadingHook, RemovableHandle]] = weakref.WeakKeyDictionary()
"""The hook before each module's forward, one for all trainers: a capture sees no change when another one is opened."""


class ReadingHook:
    """A hook of a module or an optimizer. Copies and pickles of a module have one in its place that does nothing.

    Args:
        reader: The call that it precedes, for the log.
        readers: What it belongs to.
    """

    def __init__(self, reader: str, *readers: Readers) -> None:
        self.readers = weakref.WeakSet(readers)
        self._reader = reader

    def __call__(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self.read(self._reader)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        self.read("copy.deepcopy()", memo)
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        self.read("pickling")
        return getattr, (contextlib.nullcontext(), "__exit__")  # what reads it needs no onebox

    def read(self, reader: str, copies: Mapping[int, Any] = MappingProxyType({})) -> None:
        """Bring the weights; see :meth:`Readers.read`."""
        for each in list(self.readers):
            each.read(reader, copies)


class StepHook(ReadingHook):
    """A hook before the step of an optimizer by hand, which without gradients changes no weights."""

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:  # type: ignore[override]
        if any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
            super().__call__()


class Readers:
    """The hooks of a trainer's model and optimizers.

    Args:
        modules: The modules, each of whose tensors workers may train.
        optimizers: The optimizers.
        tensors: Tensors of the model, by name.
        bring: Brings the workers' weights, if these are newer; its argument is the call that reads them.
        trained: Returns whether there have been steps.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        tensors: Mapping[str, Tensor],
        bring: Callable[[str], None],
        trained: Callable[[], bool],
    ) -> None:
        self._tensors = tensors
        self._bring = bring
        self._trained = trained
        self._said = False
        self._process = os.getpid()
        self._modules = {each for each in modules if not isinstance(each, torch.jit.ScriptModule)}  # has no such hooks
        state = ReadingHook("state_dict()", self)
        handles = [module.register_state_dict_pre_hook(state) for module in self._modules]
        step = StepHook("optimizer.step()", self)
        handles += [each.register_step_pre_hook(step) for each in optimizers]
        for module in self._modules:
            _forward_hook(module).readers.add(self)
        # of a trainer that nobody closes, too
        self._removal = weakref.finalize(self, _remove, handles, weakref.WeakSet(self._modules))
        _READERS.add(self)
        _watch_calls(_update_parameters, _clip)

    def read(self, reader: str, copies: Mapping[int, Any] = MappingProxyType({})) -> None:
        """Bring the weights for something that reads them.

        Args:
            reader: The call that reads them.
            copies: Copies of tensors that have been made for it, by identity; they are to have them, too.
        """
        if inside() or torch.compiler.is_compiling() or os.getpid() != self._process:
            return
        self._bring(reader)
        made = [(tensor, copies[id(tensor)]) for tensor in self._tensors.values() if id(tensor) in copies]
        with torch.no_grad():
            for tensor, copied in made:
                copied.copy_(tensor)

    def reads(self, model: object) -> bool:
        """Return whether a module is one of this trainer's."""
        return model in self._modules

    def clipped(self, parameters: Sequence[Tensor]) -> None:
        """Say, once, that parameters have no gradients in this process that could be clipped."""
        own = {id(tensor) for tensor in self._tensors.values()}
        if not self._said and self._trained() and all(id(each) in own and each.grad is None for each in parameters):
            self._said = True
            _LOG.warning(
                "gradients are clipped in this process, where there are none: workers have applied them in "
                "trainer.step(). Leave the call out, and give its limit to the trainer, Trainer(clip_grad_norm=...)"
            )

    def close(self) -> None:
        """Remove all hooks."""
        _READERS.discard(self)
        if self._removal.alive:
            for module in self._modules:
                _forward_hook(module).readers.discard(self)
            self._removal()
        if not _READERS:
            _watch_calls(_AVERAGED, _CLIP)


def _forward_hook(module: nn.Module) -> ReadingHook:
    """Return the hook before a module's forward."""
    if module not in _FORWARD:
        hook = ReadingHook("a call of the model")
        _FORWARD[module] = hook, module.register_forward_pre_hook(hook, prepend=True)
    return _FORWARD[module][0]


def _remove(handles: Sequence[RemovableHandle], modules: Iterable[nn.Module]) -> None:
    for handle in handles:
        handle.remove()
    for module in modules:
        hook, handle = _FORWARD[module]
        if not list(hook.readers):  # its length may count one that is just going
            del _FORWARD[module]
            handle.remove()


def _watch_calls(update_parameters: Callable[..., Any], clip: Callable[..., Any]) -> None:
    """Set the functions of PyTorch's that stand for those without a hook."""
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]
    clip_grad._clip_grads_with_norm_ = clip


def _clip(parameters: Any, *args: Any, **kwargs: Any) -> None:
    """Say once where gradients are clipped."""
    clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for readers in list(_READERS):
        readers.clipped(clipped)
    _CLIP(clipped, *args, **kwargs)


def _update_parameters(averaged: AveragedModel, model: nn.Module) -> None:
    for readers in list(_READERS):
        if readers.reads(model):
            readers.read("AveragedModel.update_parameters()")
    _AVERAGED(averaged, model)
