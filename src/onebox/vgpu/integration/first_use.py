"""Entries of PyTorch that need the device in C++ before the first tensor, at which it is loaded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.integration import device_module


def beginning(plain: Any) -> Any:
    """Return a class in place of ``torch.Generator`` and its like, that begins to use the devices before it makes an
    object of one.

    Args:
        plain: PyTorch's class, of which the objects are.
    """

    class Kind(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            place = kwargs.get("device", args[0] if args else None)
            if isinstance(place, str | torch.device) and torch.device(place).type == "vgpu":
                device_module._lazy_init()
            return plain(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, plain)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, plain)

    return Kind(plain.__name__, (), {"__doc__": plain.__doc__, "__module__": plain.__module__})


def accelerator_of(core: Any) -> Callable[[Any], Callable[..., torch.device]]:
    """Return a wrapper of ``_get_accelerator``, which asks the device in C++, by a function that does not.

    Args:
        core: ``torch._C``.
    """
    found = core._accelerator_getAccelerator
    return lambda plain: lambda checked=None: found()


def not_pinned(pin: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``Tensor.pin_memory``, to return an ordinary copy: tensors for a worker are copied in any case."""

    @functools.wraps(pin)
    def pin_memory(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.clone() if self.is_cpu and self.layout is torch.strided else pin(self, *args, **kwargs)

    return pin_memory
