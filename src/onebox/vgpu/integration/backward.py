"""Backward passes over virtual tensors: in the thread that asks for them, and with the errors that they raise.

Autograd holds a guard of the device while it runs a node, and PyTorch's guard for devices in Python asks Python what
device it is for, also while the error of a node is on its way through C++. A call into Python with an error set fails,
in a place where C++ may not fail: the process would abort. So the guard here takes the error over when it is asked, and
what started the backward pass raises it in the end. (True of torch 2.11 to 2.13; tests/process/vgpu/test_backward.py.)
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from onebox.vgpu import signals

_KIND = torch._C._autograd.DeviceType.PrivateUse1

_probe = ctypes.pythonapi.Py_IsInitialized
"""Any function of Python's own that needs no argument: after each of them, ``ctypes`` raises the error that is set."""


class _Taken(threading.local):
    error: BaseException | None = None


_taken = _Taken()


class _Answer:
    """``type_`` of the guard: looked up first, then called; it takes over the error that is on its way."""

    @signals.shielded
    def __get__(self, guard: Any, kind: type) -> Callable[[], Any]:
        signals.DeviceGuardState.entered = True
        try:
            _probe()
        except BaseException as error:
            _taken.error = error
        return _answer


@signals.shielded
def _answer() -> Any:
    signals.DeviceGuardState.entered = False
    return _KIND


class VirtualDeviceGuard(torch._C._acc.DeviceGuard):
    """The guard of the device; there is nothing to guard, as operators name their device themselves."""

    type_ = _Answer()


def register() -> None:
    """Let backward passes run in the thread that asks for them.

    Autograd has a thread for each device, and the device guard counts one device, so that a backward pass on ``vgpu:1``
    would fail an assertion.
    """
    engine = torch.autograd.graph._engine_run_backward

    @functools.wraps(engine)
    def run(*args: Any, **kwargs: Any) -> Any:
        before, _taken.error = _taken.error, None
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return engine(*args, **kwargs)
        except SystemError:  # the engine failed with no error set: it was taken over
            if _taken.error is None:
                raise
            error = _taken.error
        finally:
            _taken.error = before
        raise error

    torch.autograd.graph._engine_run_backward = run
    torch.autograd._engine_run_backward = run


__all__ = ["VirtualDeviceGuard", "register"]
