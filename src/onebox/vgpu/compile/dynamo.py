"""Registration of virtual devices with Dynamo, the tracer of ``torch.compile``; the one place with its internals.

A virtual tensor is traced like a tensor of any device, by element type, shape, strides and device. Programs have fixed
shapes, so that each shape is traced by itself; under the alias, devices are what the script calls them.

Internals used, in torch 2.11 to 2.13: ``VariableBuilder._wrap`` of ``torch._dynamo.variables.builder``,
``TensorVariable``, ``trace_rules.add`` and ``FakeTensorMode.avoid_device_init``; tests/process/vgpu/test_compile.py
fails without them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config, trace_rules
from torch._dynamo.variables import builder
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

from onebox.vgpu.core.tensor import is_virtual
from onebox.vgpu.patches import Patch, Patches
from onebox.vgpu.runtime import context

BACKEND = "onebox"
"""The name of the backend: ``torch.compile(model, backend="onebox")``."""


def _wrapping(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Dynamo's creation of a variable, to take its sizes for fixed."""

    def wrapped(self: Any, value: Any) -> Any:
        # an integer may be a size in a function that other backends forward
        number = type(value) is int and context.device_count() > 0
        if not (number or is_virtual(value) or _is_ours(self.tx.output.compiler_fn)):
            return wrap(self, value)
        with config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True):
            return wrap(self, value)

    return wrapped


def _device(attribute: Callable[..., Any]) -> Callable[..., Any]:
    return _with_script_devices(attribute, lambda place: place)


def _is_cuda(attribute: Callable[..., Any]) -> Callable[..., Any]:
    return _with_script_devices(attribute, lambda place: place.type == "cuda")


def _with_script_devices(attribute: Callable[..., Any], value: Any) -> Callable[..., Any]:
    """Return Dynamo's implementation of a tensor's ``device`` or ``is_cuda``, by the script's name for the device,
    which may be ``cuda``.

    Args:
        attribute: Dynamo's own method for it.
        value: Maps a device to the attribute's value.
    """

    @functools.wraps(attribute)
    def answer(self: Any, tx: Any) -> Any:
        if context.called != "vgpu" and self.device is not None and self.device.type == "vgpu":
            return VariableTracker.build(tx, value(context.displayed(self.device)))
        return attribute(self, tx)

    return answer


def _leave_operators_alone(patches: Patches) -> None:
    """Keep Dynamo from tracing below an operator, which is not part of the script."""
    skipped = list(trace_rules.SKIP_DIRS)

    def trace_again() -> None:
        trace_rules.SKIP_DIRS[:] = skipped
        trace_rules._recompile_re()

    patches.on_removal(trace_again)
    for name in ("onebox.vgpu", "onebox.pool", "onebox.wire"):
        trace_rules.add(name)


def _memory_format(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Give traced convolutions the memory format of CPUs and GPUs; PyTorch has none for PrivateUse1 devices."""

    def determine(rows: Tensor, weight: Tensor, backend: Any) -> Any:
        if rows.device.type != "vgpu":
            return plain(rows, weight, backend)
        formats = {suggest_memory_format(rows), suggest_memory_format(weight)} - {torch.contiguous_format}
        return formats.pop() if formats else torch.contiguous_format

    return determine


def _is_ours(compiler: Any) -> bool:
    return getattr(compiler, "compiler_name", None) == BACKEND or getattr(compiler, "__name__", None) == BACKEND


DYNAMO = Patches(
    (
        Patch(builder.VariableBuilder, "_wrap", _wrapping),
        Patch(TensorVariable, "method_attr_device", _device),
        Patch(TensorVariable, "method_attr_is_cuda", _is_cuda),
        Patch(torch._C, "_conv_determine_backend_memory_format", _memory_format),
        Patch(FakeTensorMode, "avoid_device_init", lambda _: True),  # constants stay on the host
        _leave_operators_alone,
    )
)
"""Make Dynamo trace for virtual devices; applied before the first compilation."""
