"""Shared-memory messages copied by an accelerator: posted when the copy is complete, returned after they have been
read.
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections import deque
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from onebox.wire import DTYPES, TensorSpec
from onebox.worker.accelerator import Accelerator
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.shm.arena import MemoryBlock, rounded
from onebox.worker.comm.shm.receiver import PendingReceive
from onebox.worker.comm.shm.segment import SharedMemory
from onebox.worker.comm.shm.sender import BlockRegion, ShmSender
from onebox.worker.memory.async_copy import CopyStream

PAGE_BYTES = mmap.PAGESIZE

_CLOSE_S = 30.0
"""Longest wait of a leaving worker for its sends to be completed by the accelerator."""


class ShmCopy(Protocol):
    """A copy in progress."""

    def finish(self) -> None:
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


def shm_copier_for(accelerator: Accelerator) -> ShmCopier | None:
    """Return the copier for a device; ``None`` for one that the host does not run ahead of."""
    return StreamShmCopier(accelerator) if accelerator.asynchronous else None


class StreamShmCopier:
    """Copies between a device and shared memory, with one stream for each direction.

    Copies are asynchronous if the memory is page-locked: each block is registered with the driver at first use. Blocks
    of such a group begin and end at page boundaries, and their pages are kept until the group is left.

    Args:
        accelerator: The device.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._out = CopyStream(accelerator, yields=True)
        self._into = CopyStream(accelerator, yields=True)
        self._registered: dict[int, Tensor] = {}  # blocks by address
        self._refused = False

    def out(self, tensor: Tensor, memory: SharedMemory, offset: int, start: int, size_bytes: int) -> ShmCopy:
        """Begin to copy a tensor, ordered after the device's earlier work."""
        dense = tensor.contiguous()
        if dense.data_ptr() == tensor.data_ptr():
            dense = tensor.clone()  # it may be overwritten meanwhile; cloning is much faster than copying to the host
        host = self._block(memory, offset, size_bytes)[start : start + dense.nbytes]
        self._out.follow()
        return self._out.copy([(dense.view(-1).view(torch.uint8), host)], hold=True)

    def into(self, memory: SharedMemory, offset: int, spec: TensorSpec) -> tuple[Tensor, ShmCopy]:
        """Begin to copy from a block, independent of the device's other work."""
        host = self._block(memory, offset, spec.size_bytes)
        with self._accelerator.on(self._into.stream):
            made = self._accelerator.empty(spec.shape, DTYPES[spec.dtype])
        copied = self._into.copy([(host, made.view(-1).view(torch.uint8))])
        copied.order()
        self._accelerator.keep(made, self._accelerator.current())
        return made, copied

    def release(self) -> None:
        """Wait for all copies, and unregister all blocks."""
        for copies in (self._out, self._into):
            copies.stream.synchronize()
        for block in self._registered.values():
            self._accelerator.unpin(block)
        self._registered.clear()

    def _block(self, memory: SharedMemory, offset: int, size_bytes: int) -> Tensor:
        """Return the bytes of a block, page-locked."""
        address = memory.address + offset
        if size_bytes and address not in self._registered and not self._refused:
            block = memory.bytes[offset : offset + rounded(size_bytes, PAGE_BYTES)]
            if self._accelerator.pin(block):
                self._registered[address] = block
            else:
                self._refused = True  # copies still work, but synchronously
        return memory.bytes[offset : offset + size_bytes]


class _Waiting(NamedTuple):
    done: ShmCopy
    peer: int
    channel: int
    block: MemoryBlock
    spec: TensorSpec | None  # none if more parts follow


class GpuShmSender:
    """Sends and receives for a device that copies asynchronously.

    A thread waits for copies and posts them in order, so that the worker can wait for other ranks that depend on them.

    Args:
        sender: The sender of this rank.
        copier: The copier.
    """

    def __init__(self, sender: ShmSender, copier: ShmCopier) -> None:
        self._sender = sender
        self._copier = copier
        self._failure = ""
        self._reading: deque[tuple[ShmCopy, PendingReceive]] = deque()
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._post, name="onebox-post", daemon=True)
        self._thread.start()

    def send(self, tensor: Tensor, peer: int, channel: int, place: BlockRegion) -> BlockRegion:
        """Begin to send a tensor, or a part of one; return its location, with its block.

        Raises:
            RankLost: An earlier copy failed; the group has been left.
        """
        self.settle()
        if self._failure:
            raise RankLost(f"the group has been left: {self._failure}")
        block = place.block or self._sender.take(place.whole.size_bytes)
        done = self._copier.out(tensor, self._sender.memory, block.offset, place.start, place.whole.size_bytes)
        self._queue.put(_Waiting(done, peer, channel, block, place.whole if place.last else None))
        return place._replace(block=block)

    def receive(self, expected: PendingReceive) -> Tensor:
        """Return a tensor of the device with the elements of a message that has come, which is returned when they have
        been copied.
        """
        self.settle()
        memory, offset, spec = expected.place()
        if offset < 0:
            return expected.take()
        made, done = self._copier.into(memory, offset, spec)
        self._reading.append((done, expected))
        return made

    def settle(self) -> None:
        """Return the messages that have been read."""
        while self._reading and self._reading[0][0].over():
            self._reading.popleft()[1].give_back()

    def close(self) -> None:
        """Post pending sends, wait for reads, and release all memory. Idempotent."""
        self._queue.put(None)
        self._thread.join(_CLOSE_S)
        self._copier.release()
        while self._reading:
            self._reading.popleft()[1].give_back()

    def _post(self) -> None:
        while (waiting := self._queue.get()) is not None:
            try:
                waiting.done.finish()
                if waiting.spec is not None:
                    self._sender.post(waiting.peer, waiting.channel, waiting.block, waiting.spec)
            except Exception as error:  # reported everywhere: peers see the group left, this worker the next call
                self._failure = str(error) or type(error).__name__
                self._sender.leave()
                return
            del waiting


class GpuReceive:
    """A requested message for such a device.

    Args:
        expected: The message.
        gpu: Copies it.
    """

    lasting = False

    def __init__(self, expected: PendingReceive, gpu: GpuShmSender) -> None:
        self._expected = expected
        self._gpu = gpu
        self.wait = expected.wait
        self.part = expected.part
        self.give_back = expected.give_back

    def take(self) -> Tensor:
        """Return a tensor of the device with its elements."""
        return self._gpu.receive(self._expected)
