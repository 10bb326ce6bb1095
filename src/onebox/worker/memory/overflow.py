"""Buffers of scripts that go to the host's memory while the device is short of it, those first that were last used
longest ago.

A training step uses what its forward pass has made in the reverse order, so what was used longest ago is needed last.
A storage that is away has no bytes, and all its tensors stay as they are: it is filled again before one is used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, UntypedStorage

from onebox.worker.memory.async_copy import AsyncCopier
from onebox.worker.memory.buffers import QuotaExceeded
from onebox.worker.memory.offload import HostBlockPool


class _Place:
    """The place of a storage: on the device or in the host's memory.

    Args:
        storage: The storage.
    """

    __slots__ = ("block", "size_bytes", "storage", "used")

    def __init__(self, storage: UntypedStorage) -> None:
        self.storage = storage
        self.size_bytes = 0
        """Its bytes while it is away."""
        self.block: Tensor | None = None
        """Its bytes in the host's memory; ``None`` while it is on the device."""
        self.used = 0


class Overflow:
    """The storages of a device that may be away.

    Args:
        copier: Copies between the device and the host.
        blocks: Memory of the host.
        before: Called before storages go: what still refers to their memory is copied.

    Attributes:
        ranges: The numbers of buffers that may be away: the first, and that after the last one.
        moves: How many storages have gone.
        refusal: Why the latest room was not enough.
    """

    def __init__(self, copier: AsyncCopier, blocks: HostBlockPool, before: Callable[[], object]) -> None:
        self._copier = copier
        self._before = before
        self._blocks = blocks
        self._places: OrderedDict[int, _Place] = OrderedDict()  # by identity, the last use of the first is the oldest
        self._now = 0
        self.ranges: set[tuple[int, int]] = set()
        self.moves = 0
        self.refusal = ""

    def begin(self) -> None:
        """Begin an operator or an instruction: what it uses stays on the device until the next one begins."""
        self._now += 1

    def takes(self, number: int) -> bool:
        """Return whether a buffer may be away; those with negative numbers are within a batch of a script."""
        return number < 0 or any(first <= number < end for first, end in self.ranges)

    def own(self, tensor: Tensor) -> Tensor:
        """Return a tensor whose storage can be away: the same, or a copy of one that is part of other memory."""
        return tensor if tensor.untyped_storage().resizable() else tensor.clone()

    def note(self, identity: int, storage: UntypedStorage) -> None:
        """Record the use of a storage that may be away."""
        place = self._places.get(identity)
        if place is None:
            if not storage.resizable():
                return
            place = self._places[identity] = _Place(storage)
        place.used = self._now
        self._places.move_to_end(identity)

    def forget(self, identity: int) -> int:
        """Let a storage stay where it is; return its bytes if it is away, and so has ended."""
        place = self._places.pop(identity, None)
        if place is None or place.block is None:
            return 0
        self._blocks.give(place.block)
        return place.size_bytes

    def use(self, identities: Iterable[int]) -> list[int]:
        """Record the use of storages, and return those that are away."""
        away = []
        for identity in identities:
            place = self._places.get(identity)
            if place is not None:
                place.used = self._now
                self._places.move_to_end(identity)
                if place.block is not None and identity not in away:
                    away.append(identity)
        return away

    def away_bytes(self, identity: int) -> int:
        """Return the bytes of a storage that is away; 0 for others."""
        place = self._places.get(identity)
        return place.size_bytes if place is not None and place.block is not None else 0

    def block(self, identity: int) -> Tensor | None:
        """Return the bytes of a storage that is away, in the host's memory."""
        place = self._places.get(identity)
        return place.block if place is not None else None

    def bring(self, identity: int, reserve: Callable[[int], object]) -> None:
        """Bring a storage back.

        Args:
            identity: Its identity.
            reserve: Makes room for its bytes; what goes for it may take its place in a host's memory that is full.
        """
        place = self._places[identity]
        block = place.block
        assert block is not None
        self._blocks.count(-place.size_bytes)
        try:
            reserve(place.size_bytes)
        finally:
            self._blocks.count(place.size_bytes)
        place.storage.resize_(place.size_bytes)
        self._copier.move(block, _bytes_of(place.storage), back=True).wait()
        place.block = None
        self._blocks.give(block)

    def make_room(self, size_bytes: int) -> int:
        """Move storages to the host's memory until that many bytes are free; return how many are, which may be fewer:
        what the present operator uses stays, and the host's memory is bounded."""
        freed_bytes, self.refusal = 0, "the tensors of one operator have to be there at once"
        self._before()
        for place in [each for each in self._places.values() if each.block is None and each.used < self._now]:
            if freed_bytes >= size_bytes:
                break
            own_bytes = place.storage.nbytes()
            if not own_bytes:
                continue
            try:
                block = self._blocks.take(own_bytes)
            except QuotaExceeded as error:
                self.refusal = str(error)
                break
            self._copier.move(_bytes_of(place.storage), block).finish()  # it is freed at once
            place.block, place.size_bytes = block, own_bytes
            place.storage.resize_(0)
            freed_bytes += own_bytes
            self.moves += 1
        return freed_bytes


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """Return all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
