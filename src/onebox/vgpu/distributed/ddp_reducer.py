"""Support for DistributedDataParallel, whose gradient reducer in C++ assumes GPUs.

The reducer marks used parameters in pinned memory, which this device does not offer, and it keeps the handle
of a collective without the Python object that the handle needs.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onebox.vgpu.distributed.process_group import VirtualProcessGroup

_here = threading.local()
_works: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class Unpinned(TorchDispatchMode):
    """Replaces pinned memory by ordinary memory, which behaves the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.is_pinned.default:
            return True
        if kwargs and kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **(kwargs or {}))


def noting(original: Callable[..., None]) -> Callable[..., None]:
    """Record a model whose reducer searches for unused parameters."""

    @functools.wraps(original)
    def call(model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        looks = model.find_unused_parameters or model.static_graph
        if looks and isinstance(model.process_group, VirtualProcessGroup):
            _here.unpinned = True

    return call


def unpinned(engine: Callable[..., Any]) -> Callable[..., Any]:
    """Make backward passes of a thread with such a model use ordinary memory for pinned memory."""

    @functools.wraps(engine)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not getattr(_here, "unpinned", False):
            return engine(*args, **kwargs)
        with Unpinned():
            return engine(*args, **kwargs)

    return run


def keeping(original: Callable[..., None]) -> Callable[..., None]:
    """Keep the object of a handle alive as long as the reducer may use it."""

    @functools.wraps(original)
    def call(reducer: Any, work: Any, *args: Any) -> None:
        _works[reducer] = work
        original(reducer, work, *args)

    return call
