"""Primitives of ``nn.DataParallel`` for virtual devices: scatter, gather and broadcast, in C++ in PyTorch.

A PyTorch without CUDA lacks these functions; in one with CUDA its own remain in use for CUDA tensors. The names and
arguments are those of ``torch/csrc/cuda/python_comm.cpp``.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from onebox.vgpu.core.tensor import command_queue_of, is_virtual
from onebox.vgpu.dispatch.copies import transfer_all
from onebox.vgpu.integration import device_module
from onebox.vgpu.runtime import context


def _place(number: int) -> torch.device:
    """Return the device of a number; -1 is the host."""
    return torch.device("cpu") if number == -1 else torch.device("vgpu", number)


_local = threading.local()


@contextlib.contextmanager
def in_chunks(total: int, sizes: Sequence[int]) -> Iterator[None]:
    """A context in which this thread scatters in chunks of these sizes, where the caller does not say others.

    Args:
        total: Their sum; tensors have so many rows or a multiple of it, and then so many times larger chunks.
        sizes: The sizes.
    """
    _local.chunks = total, sizes
    try:
        yield
    finally:
        _local.chunks = None


def scatter(
    tensor: Tensor, devices: Sequence[int], chunk_sizes: Sequence[int] | None, dim: int, streams: Any = None
) -> list[Tensor]:
    """Return a tensor's chunks along a dimension, each on a device; a chunk that is already there is a view.

    Args:
        tensor: A tensor on any virtual device or the host.
        devices: The devices' numbers.
        chunk_sizes: The chunks' sizes; when ``None``, those of :func:`in_chunks`, or else as equal as possible, which
            may be fewer than there are devices.
        dim: The dimension.
        streams: Ignored, for compatibility.

    Raises:
        RuntimeError: The sizes do not fit.
    """
    if not devices:
        raise RuntimeError("Expected at least one device to scatter to")
    if chunk_sizes is None and (chosen := getattr(_local, "chunks", None)) is not None:
        total, sizes = chosen
        chunk_sizes = [size * tensor.size(dim) // total for size in sizes]
    if chunk_sizes is not None and len(chunk_sizes) != len(devices):
        raise RuntimeError(
            "Expected devices and chunk_sizes to be of same length, but got "
            f"len(devices) = {len(devices)} and len(chunk_sizes) = {len(chunk_sizes)}"
        )
    chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    return [chunk.to(_place(number)) for chunk, number in zip(chunks, devices, strict=False)]


def scatter_out(tensor: Tensor, out_tensors: Sequence[Tensor], dim: int, streams: Any = None) -> list[Tensor]:
    """Copy a tensor's chunks along a dimension into existing tensors, and return these.

    Raises:
        RuntimeError: The sizes do not fit.
    """
    if not out_tensors:
        raise RuntimeError("Expected at least one output tensor to scatter to")
    total = sum(out.size(dim) for out in out_tensors)
    if total != tensor.size(dim):
        raise RuntimeError(
            f"Total size for output tensors along scatter dim {dim} does not match input tensor size at dim {dim}. "
            f"Expect: {tensor.size(dim)}, but got: {total}"
        )
    chunks = tensor.split([out.size(dim) for out in out_tensors], dim)
    for number, (chunk, out) in enumerate(zip(chunks, out_tensors, strict=True)):
        if chunk.shape != out.shape:
            raise RuntimeError(
                f"Output tensor at index {number} has incorrect shape: {list(out.shape)}, but expected "
                f"{list(chunk.shape)}"
            )
        out.copy_(chunk)
    return list(out_tensors)


def gather(tensors: Sequence[Tensor], dim: int, destination_index: int | None) -> Tensor:
    """Concatenate tensors of several devices along a dimension.

    Args:
        tensors: Tensors on virtual devices.
        dim: The dimension.
        destination_index: Number of the result's device; -1 for the host, ``None`` for the current device.

    Raises:
        RuntimeError: The shapes differ in another dimension.
    """
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    _check_shapes(tensors, dim)
    place = _place(context.current_device() if destination_index is None else destination_index)
    _send_recorded(tensors)
    return torch.cat([tensor.to(place) for tensor in tensors], dim)


def gather_out(tensors: Sequence[Tensor], out_tensor: Tensor, dim: int) -> Tensor:
    """Concatenate tensors of several devices along a dimension into an existing tensor, and return it.

    Raises:
        RuntimeError: The shapes do not fit.
    """
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    _check_shapes(tensors, dim)
    expected = list(tensors[0].shape)
    expected[dim] = sum(tensor.size(dim) for tensor in tensors)
    if list(out_tensor.shape) != expected:
        raise RuntimeError(f"Expected out tensor to have shape {expected}, but got {list(out_tensor.shape)}")
    _send_recorded(tensors)
    for tensor, part in zip(tensors, out_tensor.split([tensor.size(dim) for tensor in tensors], dim), strict=True):
        part.copy_(tensor)
    return out_tensor


def _check_shapes(tensors: Sequence[Tensor], dim: int) -> None:
    first = list(tensors[0].shape)
    for number, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            raise RuntimeError(
                f"Expected all input tensors to be CUDA tensors, but tensor at index {number} has device "
                f"{tensor.device}"
            )
        shape = list(tensor.shape)
        if len(shape) != len(first):
            raise RuntimeError(
                f"Expected all input tensors to have the same number of dimensions, but tensor at index {number} has "
                f"{len(shape)} dimensions, (expected {len(first)})"
            )
        expected = list(first)
        if first:
            expected[dim] = shape[dim]
        if shape != expected:
            raise RuntimeError(
                f"Input tensor at index {number} has invalid shape {shape}, but expected {expected}: they may differ "
                f"along dimension {dim} only"
            )


def _send_recorded(tensors: Sequence[Tensor]) -> None:
    """Flush the queues of all devices, before the first of them is waited for."""
    for tensor in tensors:
        if is_virtual(tensor):
            command_queue_of(tensor).flush()


def broadcast(tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
    """Return a copy of a tensor on each device; the tensor itself on its own.

    Raises:
        RuntimeError: A device does not exist.
    """
    for number in devices:
        if number < 0:
            raise RuntimeError(f"Expected non-negative device index, but got {number}")
    return [copies[0] for copies in _copies([tensor], devices)]


def broadcast_out(tensor: Tensor, out_tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy a tensor into others, and return these.

    Raises:
        RuntimeError: A shape differs.
    """
    for number, out in enumerate(out_tensors):
        if out.shape != tensor.shape:
            raise RuntimeError(
                f"Expected all output tensors to have same shape as the source tensor {list(tensor.shape)}, but output "
                f"tensor at index {number} has shape {list(out.shape)}"
            )
        out.copy_(tensor)
    return list(out_tensors)


def broadcast_coalesced(tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int = 0) -> list[list[Tensor]]:
    """Return, for each device, copies of tensors; on the first, where they are, the tensors themselves.

    Args:
        tensors: Tensors, all on the first device.
        devices: The devices' numbers.
        buffer_size: Ignored, for compatibility: all copies to a device are one message, without packing.

    Raises:
        RuntimeError: A tensor is elsewhere.
    """
    if any(tensor.get_device() != devices[0] for tensor in tensors):
        raise RuntimeError(f"All tensors must be on devices[0]: {devices[0]}")
    return _copies(tensors, devices)


def _copies(tensors: Sequence[Tensor], devices: Sequence[int]) -> list[list[Tensor]]:
    """Return tensors on each device; those of one device are sent together."""
    if not all(is_virtual(tensor) for tensor in tensors):
        return [[tensor.to(_place(number)) for tensor in tensors] for number in devices]
    virtual = [tensor for tensor in tensors if is_virtual(tensor)]
    away = [number for number in dict.fromkeys(devices) if virtual and number != virtual[0].get_device()]
    with torch.no_grad():
        moved = transfer_all(virtual, [context.queue_of(_place(number)) for number in away])
    there: dict[int, list[Any]] = dict(zip(away, moved, strict=True))
    return [list(there.get(number, virtual)) for number in devices]


# ---- replacements in PyTorch


PRIMITIVES: dict[str, Callable[..., Any]] = {
    "_scatter": scatter,
    "_scatter_out": scatter_out,
    "_gather": gather,
    "_gather_out": gather_out,
    "_broadcast": broadcast,
    "_broadcast_out": broadcast_out,
    "_broadcast_coalesced": broadcast_coalesced,
}
"""The functions of PyTorch's core, and their implementations."""


def either(own: Callable[..., Any], original: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a function for virtual devices that falls back to the original for CUDA devices."""

    def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        first = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        if original is not None and _is_real(first, args):
            return original(tensors, *args, **kwargs)
        return own(tensors, *args, **kwargs)

    return call


def _is_real(tensor: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call is about CUDA devices: its tensors are there, or none is virtual and no pool is open."""
    outs = [out for out in (args[0] if args and isinstance(args[0], list | tuple) else args[:1]) if _is_tensor(out)]
    seen = [tensor, *outs] if _is_tensor(tensor) else outs
    if any(is_virtual(each) for each in seen):
        return False
    return any(each.device.type == "cuda" for each in seen) or not context.device_count()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def with_autocast(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make replicas inherit the caller's autocast: PyTorch's own function passes on that of CUDA."""

    @functools.wraps(original)
    def parallel_apply(modules: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("vgpu"):
            dtype, cached = torch.get_autocast_dtype("vgpu"), torch.is_autocast_cache_enabled()
            modules = [torch.autocast("vgpu", dtype, cache_enabled=cached)(module) for module in modules]
        return original(modules, *args, **kwargs)

    return parallel_apply


def without_virtual(original: Callable[..., bool]) -> Callable[..., bool]:
    """Restrict the check for NCCL to CUDA tensors."""

    def is_available(tensors: Any) -> bool:
        if any(is_virtual(tensor) for tensor in tensors):
            return False
        return original(tensors)

    return is_available


def copying_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that returns a device's copy stream: for a virtual device its only one."""

    def get_stream(device: torch.device) -> Any:
        return device_module.Stream(device) if device.type == "vgpu" else original(device)

    return get_stream
