"""Backward passes over virtual tensors: in the calling thread, and with the errors that they raise.

Autograd holds a device guard while it runs a node, and PyTorch's guard for devices in Python queries its device type
from Python, also while an error of a node propagates through C++. A call into Python with an error set fails where C++
must not throw: the process would abort. So the guard here stores the pending error when it is queried, and the caller
of the backward pass raises it. (True of torch 2.11 to 2.13; tests/process/vgpu/test_backward.py.)
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onebox.errors import OneboxError
from onebox.vgpu import signals
from onebox.vgpu.core.tensor import Handle, all_tensors, command_queue_of, handle_of, is_virtual
from onebox.vgpu.runtime.command_queue import CommandQueue

_KIND = torch._C._autograd.DeviceType.PrivateUse1

_probe = ctypes.pythonapi.Py_IsInitialized
"""Any function of Python's C API without arguments: after the call, ``ctypes`` raises the pending error."""


class _Taken(threading.local):
    error: BaseException | None = None


_taken = _Taken()
_state = signals.device_guard_state


class _Answer:
    """``type_`` of the guard: looked up first, then called; it stores the pending error.

    The probe comes before all else: a lookup that misses Python's cache of attributes drops the pending error.
    """

    @signals.shielded
    def __get__(self, guard: Any, kind: type) -> Callable[[], Any]:
        try:
            _probe()
        except BaseException as error:
            _taken.error = error
        _state.entered = True
        return _answer


@signals.shielded
def _answer() -> Any:
    _state.entered = False
    return _KIND


class VirtualDeviceGuard(torch._C._acc.DeviceGuard):
    """The device guard; it guards nothing, because operators name their device themselves."""

    type_ = _Answer()


def in_calling_thread(engine: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that runs a backward pass, to run it in the calling thread.

    Autograd starts a thread for each device, and the device guard reports one device, so a backward pass on ``vgpu:1``
    would fail an assertion.
    """

    @functools.wraps(engine)
    def run(*args: Any, **kwargs: Any) -> Any:
        before, _taken.error = _taken.error, None
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return engine(*args, **kwargs)
        except SystemError:  # the engine failed with no error set: the guard has stored it
            if _taken.error is None:
                raise
            error = _taken.error
        finally:
            _taken.error = before
        raise error

    return run


def drop_void_gradients(queues: Sequence[CommandQueue]) -> None:
    """Drop the gradients that are void because of a failure, as it would have prevented the backward pass.

    They are searched for among all objects of the process: an error is rare, and where it is raised, nothing else tells
    the parameters that a backward pass has reached.

    Args:
        queues: The command queues of the devices.
    """
    found: dict[CommandQueue, list[tuple[Tensor, Handle]]] = {queue: [] for queue in queues}
    for each in all_tensors():
        queue = command_queue_of(each)
        # a gradient is where its leaf is; those of other devices may be set by another rank's thread meanwhile
        if queue in found and _is_leaf(each):
            gradient = each.grad
            if is_virtual(gradient):
                found[queue].append((each, handle_of(gradient)))
    for queue, leaves in found.items():
        if leaves:
            with contextlib.suppress(OneboxError, torch.OutOfMemoryError):  # the failure that is raised comes first
                filled = queue.filled([handle.number for _, handle in leaves])
                for leaf, handle in leaves:
                    if handle.number not in filled:
                        leaf.grad = None


def _is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.requires_grad and tensor.is_leaf
    except RuntimeError:  # a view of a tensor that has other memory now: PyTorch cannot say how it came to be
        return False


__all__ = ["VirtualDeviceGuard", "drop_void_gradients", "in_calling_thread"]
