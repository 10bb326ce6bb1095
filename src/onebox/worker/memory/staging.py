"""Copies between messages and an asynchronous device through pinned memory, which do not make the host wait for the
device's work."""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from onebox.wire import DTYPES, TensorSpec, check_elements
from onebox.worker.accelerator import Accelerator, DeviceStream, Event

BLOCK_BYTES = 8 << 20
BLOCKS = 4
"""Blocks of pinned memory that frames are copied to: while one is copied to the device, the host fills the next."""

READ_BYTES = 4 << 10
"""Largest tensor that is read without waiting."""

SLAB_BYTES = 64 << 10
"""Pinned memory that such reads share: to lock pages, or to unlock them, takes longer than a step should wait."""

_ALIGN_BYTES = 512
_SLOT_BYTES = 64


class _Block:
    """A block of pinned memory, with the last copy from it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.used_bytes = 0
        self.copied: Event | None = None


class UploadRing:
    """Uploads of frames to a device, on a stream of their own, through a bounded ring of pinned blocks.

    The host only waits for earlier uploads, where all blocks are in use.

    Args:
        accelerator: The device.
        block_bytes: Bytes of a block; larger frames are copied in parts.
        blocks: Number of blocks, which are allocated when they are needed.
    """

    def __init__(self, accelerator: Accelerator, *, block_bytes: int = BLOCK_BYTES, blocks: int = BLOCKS) -> None:
        self._accelerator = accelerator
        self._block_bytes = block_bytes
        self._most = blocks
        self._ring: deque[_Block] = deque()  # the last one is being filled

    @functools.cached_property
    def _stream(self) -> DeviceStream:
        return self._accelerator.stream()

    def upload(self, spec: TensorSpec, frame: memoryview | bytes) -> Tensor:
        """Return a new tensor with the elements of a frame, which the device's next work may read.

        Raises:
            WireError: The frame does not match the spec.
        """
        check_elements(spec, frame)
        device = self._accelerator
        with device.on(self._stream):  # memory of this stream: that of others may still be in use
            made = device.empty(spec.shape, DTYPES[spec.dtype])
        if not spec.size_bytes:
            return made
        target = made.view(-1).view(torch.uint8)
        source = np.frombuffer(frame, dtype=np.uint8).ctypes.data
        done = 0
        while done < spec.size_bytes:
            block = self._room(spec.size_bytes - done)
            part = block.memory[block.used_bytes : block.used_bytes + spec.size_bytes - done]
            ctypes.memmove(part.data_ptr(), source + done, part.numel())
            with device.on(self._stream):
                target[done : done + part.numel()].copy_(part, non_blocking=True)
            block.copied = self._stream.record(yields=True)
            block.used_bytes += -(-part.numel() // _ALIGN_BYTES) * _ALIGN_BYTES
            done += part.numel()
        assert block.copied is not None
        device.current().wait(block.copied)
        device.keep(made, device.current())
        return made

    def _room(self, size_bytes: int) -> _Block:
        """Return a block with room for some bytes, or, where they are more than a block, an empty one."""
        if self._ring and self._ring[-1].used_bytes + min(size_bytes, self._block_bytes) <= self._block_bytes:
            return self._ring[-1]
        if len(self._ring) < self._most:
            block = _Block(self._accelerator.pinned(self._block_bytes))
        else:
            block = self._ring.popleft()
            if block.copied is not None and not block.copied.query():
                block.copied.synchronize()
            block.used_bytes = 0
        self._ring.append(block)
        return block


class _Slab:
    """Pinned memory of several reads, used again when all of them are over."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.used_bytes = 0
        self.reads = 0


class PendingRead:
    """A tensor on its way to the host; called when the device has done the work before it, it returns the tensor."""

    def __init__(self, slab: _Slab, copy: Tensor, dtype: torch.dtype, shape: torch.Size) -> None:
        self._slab, self._copy, self._dtype, self._shape = slab, copy, dtype, shape
        slab.reads += 1

    def __call__(self) -> Tensor:
        return self._copy.clone().view(self._dtype).view(self._shape)

    def __del__(self) -> None:
        self._slab.reads -= 1


class HostReads:
    """Reads of small tensors, such as losses, in the order of the device's work and without waiting for it.

    Args:
        accelerator: The device.
        slab_bytes: Bytes of the pinned memory that is allocated at once.
    """

    def __init__(self, accelerator: Accelerator, *, slab_bytes: int = SLAB_BYTES) -> None:
        self._accelerator = accelerator
        self._slab_bytes = slab_bytes
        self._slabs: list[_Slab] = []  # the last one is being filled

    def begin(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to copy a tensor, after the device's present work and before its next, which may overwrite it.

        Args:
            tensor: The tensor; a large one, which a step does not read, is waited for.

        Returns:
            A function that returns the copy, for when the device has done the work up to here.
        """
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        dense = tensor.detach().contiguous()
        dense = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
        if dense.numel() > min(READ_BYTES, self._slab_bytes):
            here = self._accelerator.to_host(tensor)
            return lambda: here
        slab = self._room(dense.numel())
        copy = slab.memory[slab.used_bytes : slab.used_bytes + dense.numel()]
        copy.copy_(dense, non_blocking=True)
        slab.used_bytes += -(-dense.numel() // _SLOT_BYTES) * _SLOT_BYTES
        return PendingRead(slab, copy, tensor.dtype, tensor.shape)

    def _room(self, size_bytes: int) -> _Slab:
        """Return a slab with room for some bytes."""
        if self._slabs and self._slabs[-1].used_bytes + size_bytes <= self._slab_bytes:
            return self._slabs[-1]
        slab = next((each for each in self._slabs if not each.reads), None)
        if slab is None:
            slab = _Slab(self._accelerator.pinned(self._slab_bytes))
        else:
            self._slabs.remove(slab)
            slab.used_bytes = 0
        self._slabs.append(slab)
        return slab
