"""The dispatcher, which receives every operator on a virtual tensor, below autograd.

Nearly all operators take the fast path in :func:`dispatch`: a key is made of the operator, the layouts of its tensors
and its other arguments; its cached op is found; the call is recorded; new tensors represent its results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from onebox.errors import OperatorError, WireError
from onebox.vgpu import native
from onebox.vgpu.core.tensor import (
    Handle,
    VirtualTensor,
    command_queue_of,
    handle_of,
    is_virtual,
    layout_of,
    rebind,
    relay,
    wrap,
    wrap_view,
)
from onebox.vgpu.dispatch.op_cache import SHAPED_BY_FLOATS, CachedOp, UnknownResult, describe, infer_op, learn_op
from onebox.vgpu.dispatch.registry import run_mixed, specials
from onebox.vgpu.dispatch.synchronous import raise_plain, run_synchronously
from onebox.vgpu.runtime.command_queue import CommandQueue
from onebox.vgpu.runtime.context import context_of, queue_of
from onebox.worker.programs.kernels import written_inputs

aten = torch.ops.aten


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run an operator that has a virtual tensor among its arguments.

    Args:
        func: The overload.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        RuntimeError: What PyTorch raises for such arguments.
        OneboxError: The worker is gone, or an argument is void because an operator before this one failed.
    """
    name = func.name()  # hashed in C, unlike an overload
    handler = specials.get(name)
    if handler is not None:
        _write_unwaited(args)
        return handler(args, kwargs or {})
    key: list[Any] = [name]
    tensors: list[VirtualTensor] = []
    floats: list[float] = []
    if not _scan(args, key, tensors, floats) or (kwargs and not _scan_named(kwargs, key, tensors, floats)):
        _write_unwaited(args)
        if _is_custom(func):
            return _decompose(func, args, kwargs or {})
        return run_mixed(func, args, kwargs or {})
    queue = tensors[0]._handle.queue
    if queue.unwaited:
        queue.write_unwaited()
    if kwargs and kwargs.get("device") not in (None, queue.device) and not _is_here(kwargs["device"], queue):
        return _decompose(func, args, kwargs) if _is_composite(func) else _elsewhere(func, args, kwargs)
    return run(queue, func, args, kwargs, key, tensors, floats)


def run(
    queue: CommandQueue,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    key: list[Any],
    tensors: list[VirtualTensor],
    floats: list[float],
) -> Any:
    """Run an operator on the device of a command queue.

    Args:
        queue: The command queue.
        func: The overload.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        key: The key that :func:`_scan` made of them.
        tensors: The tensors among them.
        floats: The floating-point numbers among them.
    """
    numbers = []
    for tensor in tensors:
        handle = tensor._handle
        if handle.queue is not queue:
            return _across_devices(func, args, kwargs or {}, tensors)
        numbers.append(handle.number)
    if floats and key[0] in SHAPED_BY_FLOATS:
        key += map(repr, floats)
        floats = []
    found = queue.cached_ops.get(tuple(key))
    if found is None:
        if _is_composite(func):
            return _decompose(func, args, kwargs or {})
        try:
            found = infer_op(func, args, kwargs or {})
        except UnknownResult:
            written = written_inputs(describe(func, args, kwargs or {}))
            unshare(tensors[position] for position, resized in written.items() if resized)
            result = run_synchronously(queue, func, args, kwargs or {}, tensors, floats)
            found = learn_op(func, args, kwargs or {}, result)
            if found is not None:
                queue.remember(tuple(key), found)
            return result
        except WireError as error:
            raise NotImplementedError(str(error)) from None
        queue.remember(tuple(key), found)
    if found.changes:
        unshare([tensors[position] for position, _ in found.changes])
        numbers = [tensor._handle.number for tensor in tensors]
    try:
        first = queue.record(found, numbers, floats)
    except OperatorError as error:  # from a synchronous queue
        raise_plain(error, str(func))
    only = found.only
    if only is not None:
        if found.viewed >= 0:
            return wrap_view(tensors[found.viewed], Handle(queue, first), only)
        return wrap(Handle(queue, first), only)
    return _returned(queue, found, tensors, first)


def alias_of(tensor: Tensor) -> Handle:
    """Return the handle of a new buffer that shares the elements of a tensor: one that may be replaced or passed on."""
    return handle_of(launch(command_queue_of(tensor), aten.alias.default, tensor))


def unshare(tensors: Iterable[Tensor]) -> None:
    """Give tensors buffers of their own in the same memory, before their layouts change: ``detach`` shares buffers."""
    for tensor in tensors:
        rebind(tensor, launch(command_queue_of(tensor), aten.alias.default, tensor))


def _write_unwaited(args: Any) -> None:
    """Write the results of collectives that nobody has waited for, on the devices of some arguments."""
    for value in args:
        if value.__class__ is VirtualTensor:
            if value._handle.queue.unwaited:
                value._handle.queue.write_unwaited()
        elif value.__class__ is list or value.__class__ is tuple:
            _write_unwaited(value)


def _is_composite(func: Any) -> bool:
    """Return whether an operator is composed of others on every device, as PyTorch's composites and custom ones are."""
    return _composite_key(func) is not None


def _is_custom(func: Any) -> bool:
    """Return whether an operator is a composite that is not PyTorch's own, and whose tensors may be anywhere."""
    return func.namespace != "aten" and _is_composite(func)


def _composite_key(func: Any) -> str | None:
    kinds = ["CompositeImplicitAutograd"]
    if func.namespace != "aten":  # no worker has it; PyTorch's own of the second kind have kernels for each device
        kinds.append("CompositeExplicitAutograd")
    name = func.name()
    return next((kind for kind in kinds if torch._C._dispatch_has_kernel_for_dispatch_key(name, kind)), None)


def _decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Decompose an operator: one of PyTorch's in later calls, too; a custom one may be another by then, of the same
    name, and an overload must not be called once its library is gone.
    """
    key = getattr(torch._C.DispatchKey, _composite_key(func) or "")
    if func.namespace == "aten":
        specials[func.name()] = lambda args, kwargs: func._op_dk(key, *args, **kwargs)
    return func._op_dk(key, *args, **kwargs)


def _returned(queue: CommandQueue, found: CachedOp, tensors: list[VirtualTensor], first: int) -> Any:
    """Return the results of an operator that returns more than one new tensor."""
    relaid = [position for position, metadata in found.changes if tensors[position]._metadata is not metadata]
    for position, metadata in found.changes:
        if position in relaid:
            relay(tensors[position], metadata)
    if found.versioned:  # another layout is a write of its own
        written = [*found.versioned, *(position for position in relaid if position in found.versioned)]
        increment_version([tensors[position] for position in written])
    values: list[Any] = []
    for item, source in zip(found.returns, found.shared, strict=True):
        if item is None:
            values.append(None)
        elif isinstance(item, int):
            values.append(tensors[item])
        else:
            handle = Handle(queue, first)
            values.append(wrap(handle, item) if source < 0 else wrap_view(tensors[source], handle, item))
            first += 1
    return values[0] if found.rebuild is None else found.rebuild(values)


def _scan(args: Any, key: list[Any], tensors: list[VirtualTensor], floats: list[float]) -> bool:
    """Add arguments to the key of an operator; return whether all its tensors are virtual."""
    for value in args:
        kind = value.__class__
        if kind is VirtualTensor:
            tensors.append(value)
            key.append(value._metadata)
        elif kind is float:
            floats.append(value)
            key.append(float)
        elif kind is int or value is None:
            key.append(value)
        elif kind is bool:
            key.append("true" if value else "false")
        elif kind is list or kind is tuple:
            key.append(list)
            if not _scan(value, key, tensors, floats):
                return False
            key.append(tuple)
        elif isinstance(value, Tensor):
            return False
        else:
            key.append(kind)
            key.append(value.initial_seed() if kind is torch._C.Generator else value)
    return True


def _scan_named(kwargs: dict[str, Any], key: list[Any], tensors: list[VirtualTensor], floats: list[float]) -> bool:
    for name, value in kwargs.items():
        key.append(name)
        if not _scan((value,), key, tensors, floats):
            return False
    return True


def launch(queue: CommandQueue, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on a given device, with or without tensor arguments."""
    key: list[Any] = [func.name()]
    tensors: list[VirtualTensor] = []
    floats: list[float] = []
    if not (_scan(args, key, tensors, floats) and _scan_named(kwargs, key, tensors, floats)):
        raise RuntimeError(f"{func} for {queue.device} with tensors of other devices")
    if queue.unwaited:
        queue.write_unwaited()
    return run(queue, func, args, kwargs, key, tensors, floats)


# ---- arguments on other devices


def _is_here(device: torch.device, queue: CommandQueue) -> bool:
    return device.type == "vgpu" and queue_of(device) is queue


def _elsewhere(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that makes a tensor like another one on another device: only the layout of that one matters."""

    def looks(value: Any) -> Any:
        return layout_of(value).on_meta() if is_virtual(value) else value

    return func(*map(looks, args), **{key: looks(value) for key, value in kwargs.items()})


def _across_devices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    """Run an operator whose tensors are on several virtual devices, if it is a custom one."""
    for tensor in tensors:
        context_of(command_queue_of(tensor))  # raises an error if its pool is closed
    if _is_custom(func):
        return _decompose(func, args, kwargs)
    raise mixed_devices(tensors)


def mixed_devices(tensors: Sequence[Tensor]) -> RuntimeError:
    """Return the error that PyTorch raises when an operator's tensors are on several devices."""
    places = list(dict.fromkeys(str(tensor.device) for tensor in tensors))
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(places[:2])}!"
    )


VirtualTensor.dispatcher = staticmethod(dispatch)

if native.IN_USE:
    from onebox.vgpu.dispatch.native_dispatch import (  # type: ignore
        dispatch,
        launch,
        mixed_devices,
        run,
        unshare,
    )
