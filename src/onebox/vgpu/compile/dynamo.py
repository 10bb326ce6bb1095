"""Registration of virtual tensors with Dynamo, the tracer of ``torch.compile``; the one place that touches its
internals.

Dynamo traces plain tensors, and subclasses that can be flattened (``__tensor_flatten__``). A virtual tensor has no
parts: it is traced like a tensor of any device, by element type, shape, strides and device. So Dynamo's variable
builder is patched to treat it as a plain tensor; its guards, which compare types, and all later stages (fake tensors on
``vgpu:i``, AOTAutograd) need no change.

Internals used, in torch 2.11 to 2.13: ``VariableBuilder._wrap``, ``VariableBuilder.wrap_tensor`` and
``infer_subclass_type`` of ``torch._dynamo.variables.builder``, ``set_eval_frame``, ``trace_rules.add``, and
``FakeTensorMode.avoid_device_init``; tests/process/vgpu/test_compile.py fails without them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo import config, trace_rules
from torch._dynamo.variables import builder
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

from onebox.vgpu.core.tensor import VirtualTensor
from onebox.vgpu.runtime import context

BACKEND = "onebox"
"""The name of the backend: ``torch.compile(model, backend="onebox")``."""

_lock = threading.Lock()
_done: list[bool] = []


def teach_dynamo() -> None:
    """Make Dynamo trace virtual tensors. Idempotent."""
    with _lock:
        if _done:
            return
        _take_for_plain()
        _leave_operators_alone()
        _name_devices()
        _let_convolutions_lie()
        FakeTensorMode.avoid_device_init = True  # type: ignore[assignment,method-assign]  # constants stay on the host
        _done.append(True)


def _take_for_plain() -> None:
    wrap: Any = builder.VariableBuilder._wrap
    infer: Any = builder.infer_subclass_type

    def wrapped(self: Any, value: Any) -> Any:
        virtual = type(value) is VirtualTensor
        # an integer may be a size in a function that other backends forward
        number = type(value) is int and context.device_count() > 0
        if not (virtual or number or _is_ours(self.tx.output.compiler_fn)):
            return wrap(self, value)
        # Programs have fixed shapes: each shape gets its own graph, without symbols.
        with config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True):
            return self.wrap_tensor(value) if virtual else wrap(self, value)

    def inferred(value: Any) -> Any:
        return None if type(value) is VirtualTensor else infer(value)

    builder.VariableBuilder._wrap = wrapped  # type: ignore[method-assign]
    builder.infer_subclass_type = inferred
    VirtualTensor.__coerce_same_metadata_as_tangent__ = _as_it_is  # type: ignore[attr-defined]


def _name_devices() -> None:
    """Make compiled functions see devices by the script's name for them, which may be ``cuda``."""
    build, variable = VariableTracker.build, TensorVariable
    device = _with_script_devices(variable.method_attr_device, build, lambda place: place)
    is_cuda = _with_script_devices(variable.method_attr_is_cuda, build, lambda place: place.type == "cuda")
    variable.method_attr_device = device  # type: ignore[method-assign]
    variable.method_attr_is_cuda = is_cuda  # type: ignore[method-assign]


def _with_script_devices(attribute: Callable[..., Any], build: Callable[..., Any], value: Any) -> Callable[..., Any]:
    """Return Dynamo's implementation of a tensor's ``device`` or ``is_cuda``.

    Args:
        attribute: Dynamo's own method for it.
        build: Creates a Dynamo variable from a value.
        value: Maps a device to the attribute's value.
    """

    @functools.wraps(attribute)
    def answer(self: Any, tx: Any) -> Any:
        if context.called != "vgpu" and self.device is not None and self.device.type == "vgpu":
            return build(tx, value(context.displayed(self.device)))
        return attribute(self, tx)

    return answer


def _as_it_is(tensor: VirtualTensor, expected_metadata: Any, expected_type: Any = None) -> VirtualTensor:
    """Return a gradient as it was traced, where AOTAutograd expects a plain tensor."""
    return tensor


def _leave_operators_alone() -> None:
    """Keep Dynamo from tracing below an operator, which is not part of the script."""
    for name in ("onebox.vgpu", "onebox.pool", "onebox.wire"):
        trace_rules.add(name)
    dispatcher = VirtualTensor.dispatcher

    def untraced(func: Any, args: Any, kwargs: Any) -> Any:
        tracer = set_eval_frame(None)
        try:
            return dispatcher(func, args, kwargs)
        finally:
            if tracer is not None:
                set_eval_frame(tracer)

    VirtualTensor.dispatcher = staticmethod(untraced)


def _let_convolutions_lie() -> None:
    """Give traced convolutions the memory format of CPUs and GPUs; PyTorch has none for PrivateUse1 devices."""
    plain: Any = torch._C._conv_determine_backend_memory_format

    def determine(rows: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
        if rows.device.type != "vgpu":
            found: torch.memory_format = plain(rows, weight, backend)
            return found
        formats = {suggest_memory_format(rows), suggest_memory_format(weight)} - {torch.contiguous_format}
        return formats.pop() if formats else torch.contiguous_format

    torch._C._conv_determine_backend_memory_format = determine  # type: ignore[assignment]


def _is_ours(compiler: Any) -> bool:
    return getattr(compiler, "compiler_name", None) == BACKEND or getattr(compiler, "__name__", None) == BACKEND
