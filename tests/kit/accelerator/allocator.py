"""The caching allocator of a modelled accelerator, over one arena of host memory.

As PyTorch's, it keeps freed blocks for the stream that they were allocated on, which uses them again at once, with no
regard to other streams, unless these were noted (:meth:`CachingAllocator.keep`).
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from tests.kit.accelerator.happens_before import Range
from tests.kit.accelerator.memory import HOST, PRIVATE, TrackedMemory
from tests.kit.accelerator.streams import Kernel, ModelEvent, ModelStream, Scheduler

ALIGN_BYTES = 512
"""Alignment of blocks, as of PyTorch's allocator for CUDA."""

POISON = 0xFF
"""Each byte of memory that was not written: a NaN, or -1."""


@dataclass(eq=False)
class Block:
    """A block of the arena.

    Args:
        address: Its address.
        size_bytes: Its size.
        stream: The stream that it was allocated on.
        memory: Its tensors; ``None`` if it is free.
        users: Other streams that use it.
        pending: Events after which it is free.
    """

    address: int
    size_bytes: int
    stream: ModelStream
    memory: TrackedMemory | None = None
    users: set[ModelStream] = field(default_factory=set)
    pending: list[ModelEvent] = field(default_factory=list)

    @property
    def place(self) -> Range:
        """Its addresses."""
        return self.address, self.address + self.size_bytes


class CachingAllocator:
    """Allocates tensors of the device.

    Args:
        scheduler: Its streams.
        size_bytes: Size of the arena; pages that were never used take no memory.
    """

    def __init__(self, scheduler: Scheduler, size_bytes: int) -> None:
        self._scheduler = scheduler
        # Pages that are never written take no memory, and shared ones are not under the limit of the process's data.
        self._map = mmap.mmap(-1, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        self.arena = torch.frombuffer(self._map, dtype=torch.uint8)
        self.base = self.arena.data_ptr()
        self.size_bytes = size_bytes
        self.limit_bytes = size_bytes
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self._typed: dict[torch.dtype, Tensor] = {torch.uint8: self.arena}
        self._blocks: dict[int, Block] = {}
        self._free: dict[ModelStream, list[Block]] = {}
        self._private: set[ModelStream] = set()
        self._waiting: list[Block] = []
        self._extents: list[Range] = [(self.base, self.base + size_bytes)]

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all blocks, also of free ones."""
        return self.size_bytes - sum(end - start for start, end in self._extents)

    def holds(self, address: int) -> bool:
        """Return whether an address is of the device."""
        return self.base <= address < self.base + self.size_bytes

    def bytes(self, size_bytes: int) -> Tensor:
        """Return new memory, poisoned.

        Raises:
            torch.OutOfMemoryError: There is not enough.
        """
        with self._scheduler.lock:
            self.collect()
            stream = self._scheduler.current()
            block = self._block(max(ALIGN_BYTES, -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES), stream)
            self._blocks[block.address] = block
            self.allocated_bytes += block.size_bytes
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
            view = self.host_view(block.address, (block.size_bytes,), (1,), torch.uint8)
            poison = Kernel("allocation", (), (block.place,), partial(view.fill_, POISON))
            self._scheduler.launch(poison, counted=False)
            block.memory = TrackedMemory(block.address, size_bytes, PRIVATE)
            return block.memory.take()

    def keep(self, tensor: Tensor, stream: ModelStream) -> None:
        """Delay the reuse of a tensor's memory until the present work of a stream is done when it is freed."""
        with self._scheduler.lock:
            self.collect()
            block = self._blocks.get(tensor.untyped_storage().data_ptr())
            if block is not None and block.stream is not stream:
                block.users.add(stream)

    def collect(self) -> None:
        """Take back the blocks of tensors that are gone, and those whose other users are done."""
        for block in [block for block in self._blocks.values() if block.memory is not None and block.memory.gone()]:
            del self._blocks[block.address]
            block.memory = None
            self.allocated_bytes -= block.size_bytes
            block.pending = [self._scheduler.record(stream) for stream in block.users]
            block.users = set()
            self._waiting.append(block)
        waiting, self._waiting = self._waiting, []
        for block in waiting:
            if all(event.complete for event in block.pending):
                self._free.setdefault(block.stream, []).append(block)
            else:
                self._waiting.append(block)

    def host_view(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of the device as a tensor of the host, for a kernel."""
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self.arena.view(dtype)
        return typed.as_strided(shape, strides, (address - self.base) // dtype.itemsize)

    def make_private(self, stream: ModelStream) -> None:
        """Keep the memory of a stream for it, also what is free, until :meth:`give_up`."""
        self._private.add(stream)

    def give_up(self, stream: ModelStream) -> None:
        """Let the free memory of a stream be used by others."""
        self._private.discard(stream)

    def _block(self, size_bytes: int, stream: ModelStream) -> Block:
        free = self._free.setdefault(stream, [])
        able = [block for block in free if size_bytes <= block.size_bytes <= 2 * size_bytes]
        if able:
            best = min(reversed(able), key=lambda block: block.size_bytes)  # of equal ones the last
            free.remove(best)
            for event in best.pending:  # the allocator has seen that it is complete
                self._scheduler.acquire(event.clock)
            best.pending = []
            return best
        if self.allocated_bytes + size_bytes <= self.limit_bytes:
            found = self._carve(size_bytes, stream)
            if found is None:
                self._give_back()
                found = self._carve(size_bytes, stream)
            if found is not None:
                return found
        raise torch.OutOfMemoryError(f"the modelled device has no {size_bytes} bytes left of {self.limit_bytes}")

    def _carve(self, size_bytes: int, stream: ModelStream) -> Block | None:
        for index, (start, end) in enumerate(self._extents):
            if end - start >= size_bytes:
                self._extents[index : index + 1] = [(start + size_bytes, end)] * (end - start > size_bytes)
                return Block(start, size_bytes, stream)
        return None

    def _give_back(self) -> None:
        """Wait for the device, and make one memory of all free blocks."""
        self._scheduler.synchronize()
        self.collect()
        given = [blocks for stream, blocks in self._free.items() if stream not in self._private]
        extents = [*self._extents, *(block.place for blocks in given for block in blocks)]
        self._free = {stream: blocks for stream, blocks in self._free.items() if stream in self._private}
        self._extents = []
        for start, end in sorted(extents):
            if self._extents and self._extents[-1][1] == start:
                self._extents[-1] = self._extents[-1][0], end
            else:
                self._extents.append((start, end))


class PinnedMemory:
    """Page-locked memory of the host: allocated, or registered.

    Args:
        scheduler: Notified when it is given back.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._places: dict[int, int] = {}  # the end of each, by its beginning
        self._own: list[TrackedMemory] = []

    def bytes(self, size_bytes: int) -> Tensor:
        """Return new memory, poisoned."""
        with self._scheduler.lock:
            self.collect()
            memory = bytearray([POISON]) * max(1, size_bytes)
            owner = torch.frombuffer(memory, dtype=torch.uint8)
            self._own.append(made := TrackedMemory(owner.data_ptr(), size_bytes, HOST, owner))
            self._places[made.address] = made.address + len(memory)
            return made.take()

    def register(self, memory: Tensor) -> bool:
        """Register existing memory; return false if some of it is registered already, as the driver refuses that."""
        self.collect()
        start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        if any(begin < end and start < stop for begin, stop in self._places.items()):
            return False
        self._places[start] = end
        return True

    def unregister(self, memory: Tensor) -> None:
        """Unregister memory.

        Raises:
            RuntimeError: It is not registered.
        """
        end = self._places.pop(memory.data_ptr(), None)
        if end is None:
            raise RuntimeError("memory that is not registered is unregistered")
        self._scheduler.release((memory.data_ptr(), end))

    def holds(self, start: int, end: int) -> bool:
        """Return whether memory is page-locked.

        Raises:
            RuntimeError: Only a part of it is; a driver refuses to copy such memory.
        """
        with self._scheduler.lock:
            self.collect()
            common = [(first, last) for first, last in self._places.items() if first < end and start < last]
            if common and not any(first <= start and end <= last for first, last in common):
                raise RuntimeError("an access to memory of which only a part is page-locked")
            return bool(common)

    def __bool__(self) -> bool:
        return bool(self._places)

    def collect(self) -> None:
        """Forget memory that is gone."""
        for memory in (gone := [memory for memory in self._own if memory.gone()]):
            self._scheduler.release((memory.address, self._places.pop(memory.address)))
        if gone:
            self._own = [memory for memory in self._own if memory not in gone]


__all__ = ["ALIGN_BYTES", "POISON", "Block", "CachingAllocator", "PinnedMemory"]
