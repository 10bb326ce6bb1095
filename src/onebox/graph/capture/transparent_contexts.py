"""Contexts that affect how PyTorch runs something and not its result: a trace ignores them.

Activation checkpoints save memory, which a plan decides about; ``torch.compile`` saves time; ``inference_mode`` is
``no_grad`` with less bookkeeping; ``save_on_cpu`` keeps what backward needs elsewhere. Other hooks on what backward
needs may change it, and are refused. Libraries that branch on values except under a compiler see one:
``torch.compiler.is_compiling()`` is true. This file alone touches the internals of all these.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import graph
from torch.autograd.grad_mode import inference_mode
from torch.utils import checkpoint

from onebox.errors import UsageError
from onebox.graph.capture.locate import place_of_call, refusal


@contextlib.contextmanager
def transparent() -> Iterator[None]:
    """Ignore checkpoints, ``torch.compile`` and ``inference_mode`` in this thread."""
    grad_before: WeakKeyDictionary[inference_mode, bool] = WeakKeyDictionary()

    def enter(context: inference_mode) -> None:
        grad_before[context] = torch.is_grad_enabled()
        torch.set_grad_enabled(not context.mode)

    def leave(context: inference_mode, *error: Any) -> None:
        torch.set_grad_enabled(grad_before[context])

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for flag in ("_is_compiling_flag", "_is_exporting_flag"):
            stack.callback(setattr, torch.compiler, flag, getattr(torch.compiler, flag))
            setattr(torch.compiler, flag, True)
        stack.enter_context(_replaced(checkpoint, "_checkpoint_without_reentrant_generator", _nothing_kept))
        stack.enter_context(_replaced(checkpoint.CheckpointFunction, "apply", _reentrant))
        stack.enter_context(_replaced(inference_mode, "__enter__", enter))
        stack.enter_context(_replaced(inference_mode, "__exit__", leave))
        stack.enter_context(_replaced(graph.saved_tensors_hooks, "__enter__", _not_entered))
        stack.enter_context(_replaced(graph.saved_tensors_hooks, "__exit__", _nothing))
        yield


def refuse_saved_tensors_hooks() -> None:
    """Refuse a step within hooks on what backward needs: workers do not call them.

    Raises:
        UsageError: There are such hooks.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and not (getattr(hooks[0], "__module__", None) or "").startswith("torch."):
        raise UsageError(
            f"the step is within torch.autograd.graph.saved_tensors_hooks({getattr(hooks[0], '__qualname__', hooks[0])}"
            f", ...), which workers do not call: {_HOOKS_ADVICE}"
        )


_HOOKS_ADVICE = (
    "Leave them out: where they save memory, a plan does that instead (its policies recompute, offload and swap); what "
    "changes values runs on a virtual device (vgpu)"
)


def _not_entered(context: graph.saved_tensors_hooks) -> None:
    if not type(context).__module__.startswith("torch.") or type(context) is graph.saved_tensors_hooks:
        raise refusal(
            "The model",
            place_of_call(),
            "forward has hooks on the tensors that backward needs (torch.autograd.graph.saved_tensors_hooks), which "
            "workers do not call",
            _HOOKS_ADVICE,
        )


def _nothing(*_: object) -> None:
    pass


@contextlib.contextmanager
def _replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """Replace an attribute by another function, for this thread."""
    mine, own, before = threading.get_ident(), name in vars(owner), getattr(owner, name)

    def either(*args: Any, **kwargs: Any) -> Any:
        return (by if threading.get_ident() == mine else before)(*args, **kwargs)

    setattr(owner, name, either)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _nothing_kept(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _reentrant(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Compute the result of a reentrant checkpoint: without a gradient where no argument requires one."""
    if any(isinstance(value, Tensor) and value.requires_grad for value in args):
        return function(*args)
    with torch.no_grad():
        return function(*args)
