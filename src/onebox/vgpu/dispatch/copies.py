"""Copies: from the host to a device, back, and from device to device, worker to worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onebox.errors import OperatorError
from onebox.vgpu import native
from onebox.vgpu.core.metadata import dense, dense_order
from onebox.vgpu.core.tensor import Handle, command_queue_of, handle_of, is_virtual, layout_of, wrap
from onebox.vgpu.dispatch.registry import special
from onebox.vgpu.dispatch.synchronous import raise_plain
from onebox.vgpu.runtime.command_queue import CommandQueue
from onebox.vgpu.runtime.context import context_of, queue_of
from onebox.wire import TensorSpec, dtype_name, from_frame, to_frame
from onebox.wire.protocol.instructions import Receive, Send
from onebox.wire.protocol.requests import Instruction, Put

aten = torch.ops.aten


def upload(tensor: Tensor, queue: CommandQueue) -> Tensor:
    """Return a copy of a host tensor on a device, without waiting for its arrival.

    Args:
        tensor: Any strided host tensor.
        queue: Command queue of the device.
    """
    tensor = tensor.detach()  # of the plain class, as one of another may not tell its shape
    order = dense_order(tuple(tensor.shape), tensor.stride())
    straight = tensor if order is None else tensor.permute(order)
    number = queue.new_number()
    _put(straight, queue, number)
    made = wrap(Handle(queue, number), dense(tensor.dtype, tuple(straight.shape)))
    if order is None or list(order) == sorted(order):
        return made
    back: Tensor = made.permute(_inverse(order))
    return back


def _put(tensor: Tensor, queue: CommandQueue, number: int) -> None:
    """Fill a buffer with the elements of a host tensor, which may change as soon as this returns."""
    since_ns = time.monotonic_ns()
    private = torch.empty(tensor.shape, dtype=tensor.dtype)
    private.copy_(tensor.detach())
    queue.channel.note_upload(private.nbytes, since_ns)
    spec = TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape))
    codec, frame = queue.packing.packed(spec, to_frame(private))
    queue.before(Put((number,), (spec,), (codec,) if codec else ()), [frame])


def download(tensor: Tensor) -> Tensor:
    """Return a copy of a virtual tensor on the host, with the same layout; waits for the elements.

    Raises:
        OneboxError: The tensor is void because an operator before this one failed, or the worker is gone.
    """
    queue = command_queue_of(tensor)
    if queue.unwaited:
        queue.write_unwaited()
    if not layout_of(tensor).plain:
        tensor = tensor.clone()
    handle = handle_of(tensor)
    try:
        spec, frame = queue.read(handle.number)
    except OperatorError as error:
        raise_plain(error, "")
    if handle.tensor is not None:
        native.load().note_read(tensor)
    flat = from_frame(spec, frame)
    layout = layout_of(tensor)
    if layout.contiguous or dense_order(layout.shape, layout.strides) is None:
        return flat
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype).copy_(flat)


def transfer(tensor: Tensor, queue: CommandQueue) -> Tensor:
    """Return a copy of a virtual tensor on another device, with the same layout; the elements do not pass the
    client."""
    return transfer_all([tensor], [queue])[0][0]


def transfer_all(tensors: Sequence[Tensor], queues: Sequence[CommandQueue]) -> list[list[Tensor]]:
    """Return copies of tensors of one device on others, with the same layouts; sent by a single message.

    Args:
        tensors: The tensors, all of one device.
        queues: Command queues of the other devices.

    Returns:
        For each queue the copies there, in the order of the tensors.
    """
    if not tensors or not queues:
        return [[] for _ in queues]
    source = command_queue_of(tensors[0])
    if source.unwaited:
        source.write_unwaited()
    pairs = [_straight(tensor) for tensor in tensors]
    straights = [straight for straight, _ in pairs]
    if source.pool.attached or any(queue.pool is not source.pool for queue in queues):
        moved = [[handle_of(upload(download(straight), queue)) for straight in straights] for queue in queues]
    else:
        moved = _moved(straights, source, queues)
    return [[_laid_out(handle, *pair) for handle, pair in zip(handles, pairs, strict=True)] for handles in moved]


def _straight(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return a tensor as a contiguous one with permuted dimensions, and the permutation."""
    layout = layout_of(tensor)
    order = dense_order(layout.shape, layout.strides) if layout.plain else None
    if order is None:
        copied = tensor.clone(memory_format=torch.contiguous_format)
        return copied, tuple(range(len(layout.shape)))
    if layout.contiguous:
        return tensor, tuple(range(len(layout.shape)))
    return tensor.permute(order), order


def _laid_out(handle: Handle, straight: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return the tensor of a buffer that holds the contiguous form, with its dimensions in their original order."""
    layout = layout_of(straight)
    made = wrap(handle, dense(layout.dtype, layout.shape))
    if list(order) == sorted(order):
        return made
    back: Tensor = made.permute(_inverse(order))
    return back


def _moved(tensors: Sequence[Tensor], source: CommandQueue, targets: Sequence[CommandQueue]) -> list[list[Handle]]:
    """Send contiguous tensors from their worker to others."""
    devices = context_of(source)
    sources = [handle_of(tensor) for tensor in tensors]
    layouts = [layout_of(tensor) for tensor in tensors]
    specs = [TensorSpec(dtype_name(layout.dtype), layout.shape) for layout in layouts]
    sends: list[Instruction] = []
    handles = []
    with devices.transfers:  # sends and receives of two devices must be in the same order
        group = devices.group()
        for target in targets:
            numbers = [target.new_number() for _ in tensors]
            for number, spec in zip(numbers, specs, strict=True):
                target.before(Receive(number, spec, group, source.worker))
                target.native.watch(number)
            sends += [Send(handle.number, group, target.worker) for handle in sources]
            handles.append([Handle(target, number) for number in numbers])
        source.flush(sends, pace=False)
    source.channel.pace()
    return handles


def _inverse(order: tuple[int, ...]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


# ---- copy operators


@special(aten._to_copy.default)
def _to_copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (tensor,) = args
    if not is_virtual(tensor):
        return _uploaded(tensor, **kwargs)
    options = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking", "pin_memory")}
    device = kwargs.get("device")
    here = command_queue_of(tensor)
    if device is None or (device.type == "vgpu" and queue_of(device) is here):
        return NotImplemented
    dtype = options.pop("dtype", None)
    if dtype is not None and dtype != tensor.dtype:
        tensor = tensor.to(dtype)
    memory_format = options.get("memory_format")
    if device.type == "vgpu":
        moved: Tensor = transfer(tensor, queue_of(device))
    elif device.type == "meta":
        moved = layout_of(tensor).on_meta()
    else:
        moved = download(tensor)
        moved = moved if device.type == "cpu" else moved.to(device)
    if memory_format in (None, torch.preserve_format):
        return moved
    return moved.contiguous(memory_format=memory_format)


def _uploaded(tensor: Tensor, *, device: Any, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    """Return a copy of a host tensor on a device, of another type or layout if asked for."""
    moved = upload(tensor if dtype is None else tensor.to(dtype), queue_of(device))
    return moved if memory_format in (None, torch.preserve_format) else moved.contiguous(memory_format=memory_format)


@special(aten.copy_.default)
def _copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[:2]
    if not is_virtual(target):
        return target.copy_(download(source))
    here = command_queue_of(target)
    if not is_virtual(source):
        layout = layout_of(target)
        same = source.dtype == layout.dtype and tuple(source.shape) == layout.shape
        handle = handle_of(target)
        if same and layout.contiguous and layout.offset == 0 and here.fresh(handle.number):
            _put(source, here, handle.number)
            return target
        source = upload(source.expand(()) if source.dim() == 0 else source, here)
    elif command_queue_of(source) is not here:
        source = transfer(source, here)
    else:
        return NotImplemented
    return target.copy_(source)


# ---- operators that need no worker, or only its values


@special(aten._local_scalar_dense.default)
def _scalar(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return download(args[0]).item()


@special(aten.record_stream.default)
def _record_stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return None  # a buffer is freed in the order of its device's one queue


__all__ = ["download", "transfer", "transfer_all", "upload"]
