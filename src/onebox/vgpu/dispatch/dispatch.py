"""The dispatcher that C++ asks: operators of a kind that is new to it, and those that do not run on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.autograd.graph import increment_version

from onebox.errors import OperatorError, WireError
from onebox.vgpu import native
from onebox.vgpu.core.tensor import (
    Handle,
    command_queue_of,
    handle_of,
    is_virtual,
    key_of,
    layout_of,
    relay,
    view_in_buffer,
    wrap,
)
from onebox.vgpu.dispatch.op_inference import (
    SHAPED_BY_FLOATS,
    InferredOp,
    UnknownResult,
    infer_op,
    learn_op,
    versioned_inputs,
)
from onebox.vgpu.dispatch.registry import run_mixed, specials
from onebox.vgpu.dispatch.synchronous import raise_plain, run_synchronously
from onebox.vgpu.runtime.context import context_of, queue_of
from onebox.vgpu.signals import shielded
from onebox.wire import KernelSpec

aten = torch.ops.aten


def beneath(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that C++ calls, which is no part of the script.

    No handler of a signal runs in it, Dynamo does not trace it, and functions mean PyTorch's own, whatever classes of
    tensors and modes the script has.
    """

    @functools.wraps(function)
    @shielded
    def called(*args: Any) -> Any:
        tracer = set_eval_frame(None)
        try:
            with torch._C.DisableTorchFunction():
                return function(*args)
        finally:
            if tracer is not None:
                set_eval_frame(tracer)

    return called


@beneath
def missed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that the device does not know, or teach it.

    Args:
        func: The overload.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        RuntimeError: What PyTorch raises for such arguments.
        OneboxError: The worker is gone, or an argument is void because an operator before this one failed.
    """
    tensors: list[Tensor] = []
    floats: list[float] = []
    others = _scan((args, kwargs), tensors, floats)
    for queue in {command_queue_of(tensor) for tensor in tensors}:
        if queue.unwaited:
            queue.write_unwaited()
    handler = specials.get(func.name())
    if handler is not None:
        result = handler(args, kwargs)
        if result is not NotImplemented:
            return result
    if others:
        return _decompose(func, args, kwargs) if _is_custom(func) else run_mixed(func, args, kwargs)
    if not tensors:
        return _factory(func, args, kwargs)
    queue = command_queue_of(tensors[0])
    device = kwargs.get("device")
    if device is not None and not (device.type == "vgpu" and queue_of(device) is queue):
        return _decompose(func, args, kwargs) if _is_composite(func) else _elsewhere(func, args, kwargs)
    return _teach(queue, func, args, kwargs, tensors, floats)


def _factory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    queue = queue_of(kwargs.get("device") or torch.device("vgpu"))
    kwargs = {**kwargs, "device": queue.device}
    kwargs.pop("pin_memory", None)
    typed = any(argument.name == "dtype" for argument in func._schema.arguments)
    if typed and kwargs.get("dtype") is None and torch.get_default_dtype() is not torch.float32:
        kwargs["dtype"] = func(*args, **{**kwargs, "device": "meta"}).dtype  # the worker has its own default
    if func is aten._efficientzerotensor.default:
        func = aten.zeros.default
        return func(*args, **kwargs)
    floats: list[float] = []
    _scan((args, kwargs), [], floats)
    return _teach(queue, func, args, kwargs, [], floats)


def _teach(
    queue: Any,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    floats: list[float],
) -> Any:
    if any(command_queue_of(tensor) is not queue for tensor in tensors):
        return _across_devices(func, args, kwargs, tensors)
    if _is_composite(func):
        return _decompose(func, args, kwargs)
    _check_generators(queue, (*args, *kwargs.values()))
    if not native.load().learnable():
        return run(queue, func, args, kwargs, tensors, floats)
    try:
        found = infer_op(func, args, kwargs)
    except UnknownResult:
        floats = [] if func.name() in SHAPED_BY_FLOATS else floats
        result = run_synchronously(queue, func, args, kwargs, tensors, floats)
        learned = learn_op(func, args, kwargs, result)
        if learned is not None:
            several = result if isinstance(result, tuple) else (result,)
            learned.lengths = [len(item) if isinstance(item, list) else -1 for item in several]
            _learn(queue, learned, tensors, ran=True)
        return result
    except WireError as error:
        raise NotImplementedError(str(error)) from None
    if any(sum(tensor is tensors[position] for tensor in tensors) > 1 for position, _ in found.changes):
        return run(queue, func, args, kwargs, tensors, floats)  # as one tensor: PyTorch may refuse it another layout
    return _learn(queue, found, tensors)


def _check_generators(queue: Any, values: tuple[Any, ...]) -> None:
    """Raise an error where a generator is another virtual device's; one of the host has PyTorch's own."""
    for value in values:
        if isinstance(value, torch._C.Generator):
            device, _ = native.load().origin(value)
            if device is not None and device.owner is not queue:
                raise RuntimeError(f"Expected a generator of {queue.device}, but found one of {value.device}")


def _learn(queue: Any, found: InferredOp, tensors: list[Tensor], *, ran: bool = False) -> None:
    """Teach the device an operator."""
    spec = found.kernel
    views = tuple(map(view_in_buffer, tensors))
    outs = tuple(
        None if source >= 0 else out for out, source in zip(spec.outs, found.shared, strict=True)
    )  # a view of an input is made here
    found.kernel = KernelSpec(
        spec.name, spec.args, spec.kwargs, spec.inputs, spec.floats, outs, views if any(views) else ()
    )
    queue.define(found)
    queue.has_learned = True
    returns = [
        (item, None) if isinstance(item, int) else (-1, None) if item is None else (source, key_of(item))
        for item, source in zip(found.returns, found.shared, strict=True)
    ]
    changes = [(position, key_of(layout)) for position, layout in found.changes]
    native.load().learn(found.number, returns, found.lengths, found.allocates, ran, changes)


def run(
    queue: Any,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    floats: list[float],
) -> Any:
    """Run an operator once, without the device in C++ learning it."""
    if func.name() in SHAPED_BY_FLOATS:
        floats = []
    try:
        found = infer_op(func, args, kwargs)
    except UnknownResult:
        return run_synchronously(queue, func, args, kwargs, tensors, floats)
    except WireError as error:
        raise NotImplementedError(str(error)) from None
    handles = {id(tensor): handle_of(tensor) for tensor in tensors}  # one tensor twice is one on the worker, too
    for position, layout in found.changes:
        relay(tensors[position], layout)
    try:
        first = queue.record(found, [handles[id(tensor)].number for tensor in tensors], floats)
    except OperatorError as error:  # from a synchronous queue
        raise_plain(error, str(func))
    queue.ended.append(found.number)
    increment_version([tensors[position] for position in versioned_inputs(found.kernel)])
    values: list[Any] = []
    for item in found.returns:
        if item is None or isinstance(item, int):
            values.append(None if item is None else tensors[item])
            continue
        values.append(wrap(Handle(queue, first), item))
        first += 1
    return values[0] if found.rebuild is None else found.rebuild(values)


def launch(queue: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on a given device, with or without tensor arguments, whatever else it is on this device."""
    tensors: list[Tensor] = []
    floats: list[float] = []
    if _scan((args, kwargs), tensors, floats):
        raise RuntimeError(f"{func} for {queue.device} with tensors of other devices")
    if queue.unwaited:
        queue.write_unwaited()
    if func.name() not in specials:
        return func(*args, **kwargs)
    if any(command_queue_of(tensor) is not queue for tensor in tensors):
        return _across_devices(func, args, kwargs, tensors)
    return run(queue, func, args, kwargs, tensors, floats)


def _scan(value: Any, tensors: list[Tensor], floats: list[float]) -> bool:
    """Collect the virtual tensors and the numbers among arguments; return whether there are other tensors."""
    if isinstance(value, Tensor):
        if is_virtual(value):
            tensors.append(value)
            return False
        return True
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        found = [_scan(item, tensors, floats) for item in value]
        return any(found)
    if isinstance(value, float):
        floats.append(value)
    return False


def _is_composite(func: Any) -> bool:
    return _composite_key(func) is not None


def _is_custom(func: Any) -> bool:
    return func.namespace != "aten" and _is_composite(func)


def _composite_key(func: Any) -> str | None:
    kinds = ["CompositeImplicitAutograd"]
    if func.namespace != "aten":
        kinds.append("CompositeExplicitAutograd")
    name = func.name()
    return next((kind for kind in kinds if torch._C._dispatch_has_kernel_for_dispatch_key(name, kind)), None)


def _decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func._op_dk(getattr(torch._C.DispatchKey, _composite_key(func) or ""), *args, **kwargs)


def _elsewhere(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def looks(value: Any) -> Any:
        return layout_of(value).on_meta() if is_virtual(value) else value

    return func(*map(looks, args), **{key: looks(value) for key, value in kwargs.items()})


def _across_devices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    for tensor in tensors:
        context_of(command_queue_of(tensor))
        command_queue_of(tensor).require_own()
    if _is_custom(func):
        return _decompose(func, args, kwargs)
    raise mixed_devices(tensors)


def mixed_devices(tensors: list[Any]) -> RuntimeError:
    """Return the error that PyTorch raises when an operator's tensors are on several devices."""
    places = list(dict.fromkeys(str(tensor.device) for tensor in tensors))
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(places[:2])}!"
    )


@beneath
def write_due(queue: Any) -> None:
    """Write the results of collectives that nobody has waited for, before another call on their device."""
    queue.owner.write_unwaited()


@beneath
def send_full(queue: Any) -> None:
    """Send the calls of a queue in C++ that are enough for a batch."""
    try:
        queue.owner.send_full()
    except OperatorError as error:  # of a synchronous queue, whose only call this is
        raise_plain(error, error.operator)


__all__ = ["launch", "missed", "mixed_devices", "run", "send_full", "write_due"]
