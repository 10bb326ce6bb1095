"""Saving and loading: files have the ordinary format, so that a machine without onebox can read them, too.

A tensor is saved as a host tensor whose storage is tagged with its device. When such a storage is loaded, or
``map_location`` names a virtual device, it is tagged again, and tensors built from it go there.
"""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from onebox.pool.sharing import parent_address
from onebox.vgpu.core.metadata import from_wire
from onebox.vgpu.core.tensor import (
    Handle,
    VirtualTensor,
    command_queue_of,
    handle_of,
    is_virtual,
    layout_of,
    wrap,
)
from onebox.vgpu.dispatch.dispatch import alias_of, launch
from onebox.vgpu.patches import Patches
from onebox.vgpu.runtime import context
from onebox.wire import Strided

PRIORITY = 5
"""Before those of PyTorch's own devices, one of which handles any PrivateUse1 device with real storages."""

_marks: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_saved: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_loading = threading.local()
"""Set while a thread loads a file of the older format: the tensors it has made, and their future elements on the
host."""


def _reduce(tensor: Any, protocol: Any) -> Any:
    """Return the pickle reduction of a virtual tensor; see ``object.__reduce_ex__``."""
    host = _on_host(tensor)
    hooks: Any = collections.OrderedDict()
    arguments = (host._typed_storage(), 0, tuple(host.shape), host.stride(), tensor.requires_grad, hooks)
    if getattr(tensor, "_is_param", False):
        whole = torch._utils._rebuild_tensor_v2, (*arguments[:4], False, hooks)
        return _Rebuild.parameter, (_Saved(whole), tensor.requires_grad, hooks)
    return torch._utils._rebuild_tensor_v2, arguments


def _on_host(tensor: Any) -> Tensor:
    """Return a copy on the host whose storage is tagged; the same storage for tensors of one buffer, tied weights.

    It is reused while the saving code still holds it, and the device has executed nothing since.
    """
    queue = command_queue_of(tensor)
    key = (id(queue), handle_of(tensor).number, queue.records, layout_of(tensor))
    with _lock:
        storage = _saved.get(key)
    if storage is not None:
        shape, strides = tuple(tensor.shape), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, shape, strides)
    host: Tensor = tensor.detach().cpu()
    storage = host.untyped_storage()
    with _lock:
        _marks[storage] = str(tensor.device)
        if host.stride() == tensor.stride() and queue.records == key[2]:
            _saved[key] = storage
    return host


class _Saved:
    """A value that is saved as a call."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call


class _Rebuild:
    parameter = staticmethod(torch._utils._rebuild_parameter)


def _tag(storage: Any) -> str | None:
    return _marks.get(storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage)


def restore(storage: Any, location: str) -> Any:
    if not location.startswith("vgpu"):
        return None
    device = torch.device(location)
    if not context.device_count():
        raise RuntimeError(
            f"Attempting to deserialize object on {location}, but no pool is open. Open one with onebox.open(), or use "
            "torch.load with map_location=torch.device('cpu') to map your storages to the CPU."
        )
    with _lock:
        _marks[storage] = str(context.queue_of(device).device)
    return storage


def rebuilding(rebuild: Any) -> Any:
    """Wrap the function that builds loaded tensors, to build those of tagged storages on their device."""

    @functools.wraps(rebuild)
    def rebuilt(storage: Any, storage_offset: int, size: Any, stride: Any) -> Tensor:
        tensor: Tensor = rebuild(storage, storage_offset, size, stride)
        location = _marks.get(storage._untyped_storage)
        if location is None:
            return tensor
        awaited: list[tuple[Tensor, Tensor]] | None = getattr(_loading, "awaited", None)
        if awaited is None:
            return tensor.to(location)
        made = torch.empty_like(tensor, device=location)
        awaited.append((made, tensor))
        return made

    return rebuilt


def filling_afterwards(load: Any) -> Any:
    """Make the loader of the older format fill the tensors at its end, because elements come after tensors there."""

    @functools.wraps(load)
    def run(*args: Any, **kwargs: Any) -> Any:
        awaited: list[tuple[Tensor, Tensor]] = []
        _loading.awaited = awaited
        try:
            loaded = load(*args, **kwargs)
        finally:
            del _loading.awaited
        with torch.no_grad():
            for made, host in awaited:
                made.copy_(host)
        return loaded

    return run


def add_to_pickle(patches: Patches) -> None:
    """Register virtual tensors with ``torch.save`` and ``torch.load``, and with queues between processes."""
    add_locations(patches, PRIORITY, _tag, restore)
    patches.put(_reducers, VirtualTensor, _shared)


def share_among_processes(patches: Patches) -> None:
    """Let queues between processes take virtual tensors."""
    for kind in (Tensor, torch.nn.Parameter):
        patches.put(_reducers, kind, _either(_reducers[kind]))


_reducers: dict[Any, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]


def _either(reduce: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda tensor: _shared(tensor) if is_virtual(tensor) else reduce(tensor)


def add_locations(patches: Patches, priority: int, tag: Any, restored: Any) -> None:
    """Register the functions that tag storages with their location, and restore them there."""
    registry: list[Any] = torch.serialization._package_registry
    before = list(registry)
    torch.serialization.register_package(priority, tag, restored)
    (entry,) = (each for each in registry if each not in before)
    patches.on_removal(lambda: registry.remove(entry))


def _shared(tensor: Tensor) -> Any:
    """Return the reduction of a tensor for another process that uses the same pool: it gets the same elements.

    As with CUDA, what either of them writes the other reads. The buffer has a second number for the way, so that it is
    there however long that takes; the receiver frees it.

    Raises:
        NotImplementedError: The devices are this process's alone.
        RuntimeError: The tensor is a result that autograd would have to follow into another process.
    """
    if not parent_address():
        raise NotImplementedError(
            f"a tensor of {tensor.device} cannot be sent to another process: the devices are this one's alone; "
            "send tensor.cpu(), or start the script by onebox run, which shares its devices"
        )
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "a tensor that requires a gradient and is no leaf cannot be sent to another process, whose autograd would "
            "not know how it was computed; send tensor.detach()"
        )
    queue = command_queue_of(tensor)
    number = alias_of(tensor.detach()).pass_on()
    queue.flush(wait=True)  # it must exist when the receiver's message comes
    return _received, (
        queue.worker,
        number,
        layout_of(tensor).strided(),
        tensor.requires_grad,
        isinstance(tensor, torch.nn.Parameter),
    )


def _received(worker: int, number: int, layout: Strided, requires_grad: bool, parameter: bool) -> Any:
    """Return the tensor that another process has sent."""
    queue = context.queue_of(torch.device("vgpu", worker))
    passed = wrap(Handle(queue, number), from_wire(layout))  # the number is freed with it
    with torch.no_grad():
        made: Tensor = launch(queue, torch.ops.aten.alias.default, passed)
    return torch.nn.Parameter(made, requires_grad) if parameter else made.requires_grad_(requires_grad)


VirtualTensor.reducer = staticmethod(_reduce)
