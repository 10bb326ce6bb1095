"""Offloaded buffers: copied to host memory in parallel with the device's work, evicted, and prefetched.

Memory counts depend on the instructions only, not on the progress of copies: the device's bytes change at ``Evict`` and
``Prefetch``, the host's at ``Offload`` and ``Prefetch``. So the peaks of a step are reproducible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire.protocol.instructions import Evict, Offload, Prefetch
from onebox.worker.accelerator import Accelerator
from onebox.worker.memory.async_copy import AsyncCopier, PendingCopy
from onebox.worker.memory.buffers import BufferStore
from onebox.worker.memory.host import HostMemory
from onebox.worker.progress import Moment, Trace

_SPARE = 2
"""Limit of spare blocks as a multiple of the peak use: sizes recur in each step, and new memory costs as much as a copy
(pages of the host have to be cleared, pinned ones locked)."""

OnCopied = Callable[[Moment], None]


class HostBlockPool:
    """Reusable blocks of host memory.

    Args:
        copier: Allocates new ones.
        host: The count of host memory in use. Spare blocks must fit in addition, or are freed.
    """

    def __init__(self, copier: AsyncCopier, host: HostMemory) -> None:
        self._copier = copier
        self._host = host
        self._spare: deque[Tensor] = deque()  # least recently used first
        self._used_bytes = 0
        self._most_bytes = 0

    @property
    def spare_bytes(self) -> int:
        """Bytes of spare blocks."""
        return sum(block.numel() for block in self._spare)

    def take(self, size_bytes: int) -> Tensor:
        """Return a block.

        Raises:
            QuotaExceeded: The host's memory is insufficient.
        """
        self._host.charge(size_bytes)
        self._used_bytes += size_bytes
        self._most_bytes = max(self._most_bytes, self._used_bytes)
        found = next((block for block in reversed(self._spare) if block.numel() == size_bytes), None)
        if found is not None:
            self._spare = deque(block for block in self._spare if block is not found)
            return found
        room_bytes = self._host.limit_bytes - self._host.used_bytes
        self.trim(min(room_bytes, _SPARE * self._most_bytes - self._used_bytes))
        try:
            return self._copier.block(size_bytes)
        except Exception:
            self._host.charge(-size_bytes)
            self._used_bytes -= size_bytes
            raise

    def give(self, block: Tensor) -> None:
        """Return a block to the pool; a copy from it in progress ends before the next one to it begins."""
        self.count(-block.numel())
        self._spare.append(block)

    def count(self, more_bytes: int) -> None:
        """Count bytes of blocks that are in use, though they were not taken, or the reverse."""
        self._host.used_bytes += more_bytes
        self._used_bytes += more_bytes

    def trim(self, most_bytes: int = 0) -> None:
        """Free spare blocks down to a number of bytes."""
        spare_bytes = self.spare_bytes
        while spare_bytes > max(0, most_bytes):
            spare_bytes -= self._spare.popleft().numel()


@dataclass(frozen=True)
class _View:
    """Layout of a tensor in its storage."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def over(self, flat: Tensor) -> Tensor:
        """Return the tensor over another storage."""
        made = torch.empty(0, dtype=self.dtype, device=flat.device)
        return made.set_(flat.untyped_storage(), self.offset, self.shape, self.stride)


class _Copy:
    """A storage in host memory, or on its way there; implements :class:`~onebox.worker.memory.buffers.HostCopies`.

    Args:
        blocks: The pool of its block, which is returned with the last of its buffers.
        block: Its bytes.
        moved: Its copy.
        views: Its buffers, by number.
        done: Notified of the time of completion.
    """

    def __init__(
        self, blocks: HostBlockPool, block: Tensor, moved: PendingCopy, views: dict[int, _View], done: OnCopied
    ) -> None:
        self.block = block
        self.views = views
        self._blocks = blocks
        self._moved = moved
        self._done = done

    def wait(self) -> None:
        """Wait until it is complete."""
        self._done(self._moved.wait())

    def read(self, number: int) -> Tensor:
        """Return a buffer in host memory, for reading there."""
        self._moved.finish()
        return self.views[number].over(self.block)

    def drop(self, number: int) -> None:
        """Remove a buffer; the block is freed with the last one."""
        del self.views[number]
        if not self.views:
            self._moved.order()
            self._blocks.give(self.block)

    def rename(self, into: Mapping[int, int]) -> None:
        """Renumber buffers."""
        self.views = {into.get(number, number): view for number, view in self.views.items()}


class _Returning:
    """A storage on its way back; implements :class:`~onebox.worker.memory.buffers.PendingBuffers`."""

    def __init__(self, flat: Tensor, moved: PendingCopy, views: dict[int, _View], done: OnCopied) -> None:
        self.size_bytes = flat.numel()
        self._flat: Tensor | None = flat
        self._moved = moved
        self._views = views
        self._done = done

    def wait(self) -> dict[int, Tensor]:
        """Wait until it is complete and return its buffers."""
        self._done(self._moved.wait())
        assert self._flat is not None
        return {number: view.over(self._flat) for number, view in self._views.items()}

    def end(self) -> None:
        """Free its memory, which a copy may still write to, before it is reused."""
        self._moved.order()
        self._flat = None


class Offloader:
    """Executes ``Offload``, ``Evict`` and ``Prefetch``.

    Args:
        accelerator: Device of the buffers.
        store: The buffers.
        host: The count of host memory.
        copier: Copies between the device and the host.
    """

    def __init__(self, accelerator: Accelerator, store: BufferStore, host: HostMemory, copier: AsyncCopier) -> None:
        self._accelerator = accelerator
        self._store = store
        self._copier = copier
        self.blocks = HostBlockPool(self._copier, host)

    def run(self, what: Offload | Evict | Prefetch, numbers: Sequence[int], trace: Trace) -> None:
        """Execute an instruction.

        Args:
            what: The instruction.
            numbers: Its buffers.
            trace: Notified when a copy that it begins is complete.

        Raises:
            Poisoned: One of them is void.
            QuotaExceeded: The memory of the host or the device is insufficient.
            WireError: One does not exist, or is in the wrong place.
        """
        numbers = tuple(dict.fromkeys(numbers))
        match what:
            case Offload():
                self._offload(numbers, trace)
            case Evict():
                self._evict(numbers)
            case Prefetch():
                self._prefetch(numbers, trace)

    def readable(self, number: int) -> Tensor:
        """Return a buffer for reading, from the host's memory if it is only there.

        Raises:
            Poisoned: It is void.
            WireError: It does not exist.
        """
        away = self._store.away(number)
        if away is None or self._store.here(number):
            return self._store.get(number)
        return self._copy(number).read(number)

    def settle(self) -> None:
        """Make in-place writes wait for copies that may still read the tensors."""
        self._copier.settle()

    def rest(self) -> None:
        """Free spare memory: its user is gone."""
        self.blocks.trim()

    def close(self) -> None:
        """Stop the copier."""
        self._copier.close()
        self.blocks.trim()

    def _offload(self, numbers: Sequence[int], trace: Trace) -> None:
        tensors = {number: self._store.get(number) for number in numbers}
        trace.ready()
        known = [number for number in numbers if self._store.away(number) is not None]
        if known:
            raise WireError(f"buffer {known[0]} is being copied to the host's memory already")
        done = trace.later()
        groups: dict[int, dict[int, Tensor]] = {}
        for number, tensor in tensors.items():
            groups.setdefault(tensor.untyped_storage()._cdata, {})[number] = tensor
        for group in groups.values():
            flat = _bytes_of(next(iter(group.values())))
            block = self.blocks.take(flat.numel())
            views = {number: _View.of(tensor) for number, tensor in group.items()}
            copy = _Copy(self.blocks, block, self._copier.move(flat, block), views, done)
            for number in group:
                self._store.lend(number, copy)

    def _evict(self, numbers: Sequence[int]) -> None:
        copies = []
        for number in numbers:
            self._store.get(number)  # raises the error of a void one
            copies.append(self._copy(number))
        for copy in dict.fromkeys(copies):
            copy.wait()
        for number in numbers:
            self._store.evict(number)

    def _prefetch(self, numbers: Sequence[int], trace: Trace) -> None:
        groups: dict[_Copy, dict[int, _View]] = {}
        for number in numbers:
            if self._store.here(number):
                raise WireError(f"buffer {number} is on the device; only what was evicted can be prefetched")
            copy = self._copy(number)
            groups.setdefault(copy, {})[number] = copy.views[number]
        done = trace.later()
        for copy, views in groups.items():
            self._store.reserve(copy.block.numel())
            flat = self._accelerator.empty((copy.block.numel(),), torch.uint8)
            returning = _Returning(flat, self._copier.move(copy.block, flat, back=True), views, done)
            self._store.promise(views, returning)

    def _copy(self, number: int) -> _Copy:
        copy = self._store.away(number)
        if copy is None:
            self._store.get(number)  # raises its error, if it has one
            raise WireError(f"buffer {number} was not offloaded")
        assert isinstance(copy, _Copy)
        return copy


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return all bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
