"""How elements get from an accelerator into memory that processes share, and from there to an accelerator.

An accelerator copies while its worker goes on, on streams of its own, where the memory's pages stay in their places:
blocks are registered with its driver, each once, when it is used first. Blocks of such a group begin and end at pages,
and their pages are not given back before the group is left.
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
    """A copy that has begun."""

    def wait(self) -> None:
        """Wait until it is made.

        Raises:
            RuntimeError: It failed.
        """

    def over(self) -> bool:
        """Tell whether it is made.

        Raises:
            RuntimeError: It failed.
        """


class ShmCopier(Protocol):
    """Copies between a device and shared memory."""

    def out(self, tensor: Tensor, memory: SharedMemory, offset: int, start: int, size_bytes: int) -> ShmCopy:
        """Begin to copy a tensor, as it is now, to a block.

        Args:
            tensor: The tensor.
            memory: Where the block is.
            offset: Where it begins.
            start: The byte of it where the tensor begins.
            size_bytes: Bytes of the block.
        """

    def into(self, memory: SharedMemory, offset: int, spec: TensorSpec) -> tuple[Tensor, ShmCopy]:
        """Begin to copy a tensor of the device from a block; what the device does with it comes behind that."""

    def release(self) -> None:
        """Wait for all copies, and let go of all memory."""


def shm_copier_for(device: torch.device) -> ShmCopier | None:
    """Return what copies for a device; ``None`` for one whose tensors are in the host's memory, or nowhere."""
    return CudaShmCopier(device) if device.type == "cuda" else None


class CudaShmCopier:
    """Copies between a GPU and shared memory, by a stream in each direction.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._into = torch.cuda.Stream(device)
        self._registered: dict[int, SharedMemory] = {}  # blocks by their addresses
        self._refused = False

    def out(self, tensor: Tensor, memory: SharedMemory, offset: int, start: int, size_bytes: int) -> ShmCopy:
        """Begin to copy a tensor, behind what the device has been given to do so far."""
        dense = tensor.contiguous()
        if dense.data_ptr() == tensor.data_ptr():
            dense = tensor.clone()  # it may be written to meanwhile; this takes a fraction of the way to the host
        host = self._block(memory, offset, size_bytes)[start : start + dense.nbytes]
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host.copy_(dense.view(-1).view(torch.uint8), non_blocking=True)
            copied = _Copied(self._out)
        dense.record_stream(self._out)
        return copied

    def into(self, memory: SharedMemory, offset: int, spec: TensorSpec) -> tuple[Tensor, ShmCopy]:
        """Begin to copy from a block, whatever the device is busy with."""
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
        """Return a block's bytes, whose pages stay where they are."""
        address = memory.address + offset
        if size_bytes and address not in self._registered and not self._refused:
            size = rounded(size_bytes, PAGE_BYTES)
            if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)):
                self._refused = True  # copies are made all the same, while the worker waits
                self._forget_error()
            else:
                self._registered[address] = memory
        return memory.bytes[offset : offset + size_bytes]

    def _forget_error(self) -> None:
        """Let nobody else be told of what the driver has refused: the next launch of a kernel would be."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)


class _Copied:
    """All that a stream has been given to do so far."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # a thread that waits for it leaves its core to others
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def over(self) -> bool:
        return self.event.query()
