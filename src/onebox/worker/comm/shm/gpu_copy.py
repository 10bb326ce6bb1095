"""Asynchronous copies between an accelerator and memory shared by processes.

An accelerator copies asynchronously, on separate streams, if the memory is page-locked: each block is registered with
its driver at first use. Blocks of such a group begin and end at page boundaries, and their pages are kept until the
group is left.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from onebox.wire import DTYPES, TensorSpec
from onebox.worker.comm.shm.arena import rounded
from onebox.worker.comm.shm.segment import SharedMemory

PAGE_BYTES = mmap.PAGESIZE


class ShmCopy(Protocol):
    """A copy in progress."""

    def wait(self) -> None:
        """Wait until it is complete.

        Raises:
            RuntimeError: It failed.
        """

    def over(self) -> bool:
        """Return whether it is complete.

        Raises:
            RuntimeError: It failed.
        """


class ShmCopier(Protocol):
    """Copies between a device and shared memory."""

    def out(self, tensor: Tensor, memory: SharedMemory, offset: int, start: int, size_bytes: int) -> ShmCopy:
        """Begin to copy a tensor, with its present contents, to a block.

        Args:
            tensor: The tensor.
            memory: Memory of the block.
            offset: Offset of the block.
            start: Offset of the tensor in the block.
            size_bytes: Bytes of the block.
        """

    def into(self, memory: SharedMemory, offset: int, spec: TensorSpec) -> tuple[Tensor, ShmCopy]:
        """Begin to copy a tensor of the device from a block; later work of the device is ordered after the copy."""

    def release(self) -> None:
        """Wait for all copies, and release all memory."""


def shm_copier_for(device: torch.device) -> ShmCopier | None:
    """Return the copier for a device; ``None`` for one whose tensors are in host memory, or have no elements."""
    return CudaShmCopier(device) if device.type == "cuda" else None


class CudaShmCopier:
    """Copies between a GPU and shared memory, with one stream for each direction.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._into = torch.cuda.Stream(device)
        self._registered: dict[int, SharedMemory] = {}  # blocks by address
        self._refused = False

    def out(self, tensor: Tensor, memory: SharedMemory, offset: int, start: int, size_bytes: int) -> ShmCopy:
        """Begin to copy a tensor, ordered after the device's earlier work."""
        dense = tensor.contiguous()
        if dense.data_ptr() == tensor.data_ptr():
            dense = tensor.clone()  # it may be overwritten meanwhile; cloning is much faster than copying to the host
        host = self._block(memory, offset, size_bytes)[start : start + dense.nbytes]
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host.copy_(dense.view(-1).view(torch.uint8), non_blocking=True)
            copied = _Copied(self._out)
        dense.record_stream(self._out)
        return copied

    def into(self, memory: SharedMemory, offset: int, spec: TensorSpec) -> tuple[Tensor, ShmCopy]:
        """Begin to copy from a block, independent of the device's other work."""
        host = self._block(memory, offset, spec.size_bytes)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._into):
            made = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=self._device)
            made.view(-1).view(torch.uint8).copy_(host, non_blocking=True)
            copied = _Copied(self._into)
        current.wait_event(copied.event)
        made.record_stream(current)
        return made, copied

    def release(self) -> None:
        """Wait for all copies, and unregister all blocks."""
        for stream in (self._out, self._into):
            stream.synchronize()
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()

    def _block(self, memory: SharedMemory, offset: int, size_bytes: int) -> Tensor:
        """Return the bytes of a block, page-locked."""
        address = memory.address + offset
        if size_bytes and address not in self._registered and not self._refused:
            size = rounded(size_bytes, PAGE_BYTES)
            if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)):
                self._refused = True  # copies still work, but synchronously
                self._forget_error()
            else:
                self._registered[address] = memory
        return memory.bytes[offset : offset + size_bytes]

    def _forget_error(self) -> None:
        """Clear the driver's error, which the next kernel launch would report."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)


class _Copied:
    """All earlier work of a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # a thread that waits for it yields its core
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def over(self) -> bool:
        return self.event.query()
