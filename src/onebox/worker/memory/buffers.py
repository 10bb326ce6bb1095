"""The buffer store: numbered tensors with exact memory counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, UntypedStorage

from onebox.errors import WireError
from onebox.sizes import enough_text, size_text
from onebox.wire.protocol.responses import WorkerFailure

_T = TypeVar("_T")


class PendingBuffers(Protocol):
    """Buffers that are being filled asynchronously."""

    @property
    def size_bytes(self) -> int:
        """Total bytes, which are in use already."""

    def wait(self) -> dict[int, Tensor]:
        """Wait until they are filled, and return all of them."""

    def end(self) -> None:
        """Release it: the last buffer has been returned, or is no longer needed."""


class HostCopies(Protocol):
    """A place of buffers besides or instead of the device, or a copy to it in progress."""

    def drop(self, number: int) -> None:
        """Record that a buffer is no longer needed from there."""

    def rename(self, into: Mapping[int, int]) -> None:
        """Renumber buffers, all at once; unknown ones are ignored."""


class AwayStorages(Protocol):
    """Storages that go to the host's memory and come back; see :class:`~onebox.worker.memory.overflow.Overflow`."""

    moves: int
    refusal: str

    def begin(self) -> None:
        """Begin an operator or an instruction."""

    def takes(self, number: int) -> bool:
        """Return whether a buffer may be away."""

    def own(self, tensor: Tensor) -> Tensor:
        """Return a tensor whose storage can be away."""

    def note(self, identity: int, storage: UntypedStorage) -> None:
        """Record the use of a storage that may be away."""

    def forget(self, identity: int) -> int:
        """Let a storage stay where it is; return its bytes if it is away."""

    def use(self, identities: Iterable[int]) -> list[int]:
        """Record the use of storages, and return those that are away."""

    def away_bytes(self, identity: int) -> int:
        """Return the bytes of a storage that is away; 0 for others."""

    def bring(self, identity: int, reserve: Callable[[int], object]) -> None:
        """Bring a storage back, for which room is reserved."""

    def make_room(self, size_bytes: int) -> int:
        """Move storages away; return how many bytes are free now."""


class ReclaimableMemory(Protocol):
    """Memory that is in use only as long as buffers do not need it."""

    size_bytes: int

    def release(self) -> None:
        """Free it."""


class Poisoned(Exception):
    """A buffer is void because of an earlier failure."""

    def __init__(self, failure: WorkerFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class QuotaExceeded(Exception):
    """An allocation would exceed the worker's quota, or another bound.

    Args:
        message: Readable message.
        asked_bytes: Requested bytes.
        used_bytes: Other bytes in use.
        allowed_bytes: The bound.
    """

    def __init__(self, message: str, *, asked_bytes: int = 0, used_bytes: int = 0, allowed_bytes: int = 0) -> None:
        super().__init__(message)
        self.asked_bytes = asked_bytes
        self.used_bytes = used_bytes
        self.allowed_bytes = allowed_bytes


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error of any library tells of a lack of memory."""
    known = isinstance(error, QuotaExceeded | torch.OutOfMemoryError | MemoryError)
    return known or _OUT_OF_MEMORY.search(str(error)) is not None


_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator|CUDA error: out of memory|CU(?:BLAS|SPARSE|SOLVER)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED"
    r"|CUDNN_STATUS_(?:ALLOC|INTERNAL_ERROR_(?:HOST|DEVICE)_ALLOCATION)_FAILED"
)
"""Other names of a lack of memory: of PyTorch's allocator on CPUs, of the driver, and of libraries with memory of their
own, whose exceptions have the class of any other."""


class _Held:
    """A storage of buffers.

    Args:
        size_bytes: Counted bytes; stored here, because an operator may enlarge it.
    """

    __slots__ = ("holders", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.holders = 1


class BufferStore:
    """Numbered buffers of one device.

    A number holds a tensor, a promise of one (see :class:`PendingBuffers`), or the failure that voided it; or it is
    offloaded to host memory. A storage is counted once for all its views.

    Args:
        quota_bytes: Most bytes in use; 0 for no limit.
        spare: Other memory within the quota, which is not counted as in use, and is released when it is needed.
    """

    def __init__(self, quota_bytes: int = 0, spare: ReclaimableMemory | None = None) -> None:
        self.quota_bytes = quota_bytes
        self.overflow: AwayStorages | None = None
        """Storages of scripts that go to the host's memory where there is no room for others."""
        self._spare = spare
        self.used_bytes = 0
        self.peak_bytes = 0
        self._tensors: dict[int, Tensor] = {}
        self._pending: dict[int, PendingBuffers] = {}
        self._promised: dict[int, int] = {}  # from the id of a promise to the count of its unfilled numbers
        self._promised_as: dict[int, int] = {}  # from the number of a promised buffer to its number in the promise
        self._void: dict[int, WorkerFailure] = {}
        self._away: dict[int, HostCopies] = {}
        self._storages: dict[int, int] = {}  # from number to the identity of its storage (on meta it has no address)
        self._held: dict[int, _Held] = {}  # by identity of the storage

    def get(self, number: int) -> Tensor:
        """Return a buffer, waiting until it is filled.

        Raises:
            Poisoned: It is void.
            WireError: The buffer does not exist.
        """
        tensor = self._tensors.get(number)
        if tensor is not None:
            if self.overflow is not None:
                self._bring([self._storages[number]], self.overflow)
            return tensor
        pending = self._pending.get(number)
        if pending is not None:
            filled = pending.wait()
            alone = self._promised[id(pending)] == 1
            mine = (number,) if alone else [key for key, value in self._pending.items() if value is pending]
            made = {key: filled[self._promised_as.get(key, key)] for key in mine}
            for key in made:
                self.forget(key)
            for key, value in made.items():
                self.put(key, value if self.overflow is None else self.overflow.own(value))
            return self._tensors[number]
        if number in self._void:
            raise Poisoned(self._void[number])
        if number in self._away:
            raise WireError(f"buffer {number} is in the host's memory; it has to be prefetched before it is read")
        raise WireError(f"there is no buffer {number}")

    def many(self, numbers: Sequence[int]) -> list[Tensor]:
        """Return several buffers; see :meth:`get`."""
        tensors = self._tensors
        if self.overflow is not None:
            self._bring([self._storages[number] for number in numbers if number in tensors], self.overflow)
        return [tensors[number] if number in tensors else self.get(number) for number in numbers]

    def present(self, number: int) -> Tensor:
        """Return a buffer as :meth:`get` does, but for one that is away, whose storage has no bytes then."""
        tensor = self._tensors.get(number)
        return self.get(number) if tensor is None else tensor

    def _bring(self, identities: Sequence[int], overflow: AwayStorages) -> None:
        """Bring storages back, for which others may go.

        Raises:
            QuotaExceeded: There is no room for all of them at once.
        """
        for identity in overflow.use(identities):
            size_bytes = overflow.away_bytes(identity)
            overflow.bring(identity, self.reserve)
            self.used_bytes += size_bytes

    def use(self, tensors: Iterable[Tensor]) -> None:
        """Let the storages of tensors, which buffers may have, be on the device for the present operator.

        Raises:
            QuotaExceeded: There is no room for all of them at once.
        """
        if self.overflow is not None:
            self._bring([tensor.untyped_storage()._cdata for tensor in tensors], self.overflow)

    def put(self, number: int, tensor: Tensor) -> None:
        """Fill a buffer, replacing its contents.

        Raises:
            QuotaExceeded: The quota has no room for it.
        """
        if number in self._tensors or number in self._void or number in self._pending or number in self._away:
            self.forget(number)
        storage = tensor.untyped_storage()
        identity, held, overflow = storage._cdata, self._held.get(storage._cdata), self.overflow
        if overflow is not None and held is not None:
            self._bring([identity], overflow)
        size_bytes = storage.nbytes()
        more_bytes = size_bytes - (held.size_bytes if held is not None else 0)
        if more_bytes:  # of a new storage, or of one that an operator has resized
            self.reserve(more_bytes)
            self.used_bytes += more_bytes
        if held is None:
            self._held[identity] = _Held(size_bytes)
        else:
            held.size_bytes = size_bytes
            held.holders += 1
        if overflow is not None:
            if overflow.takes(number):
                overflow.note(identity, storage)
            else:
                overflow.forget(identity)
        self._storages[number] = identity
        self._tensors[number] = tensor

    def recount(self, number: int) -> None:
        """Recount a buffer whose storage may have grown or been replaced; an empty number is ignored.

        Raises:
            QuotaExceeded: The quota is exceeded; the bytes are counted nevertheless.
        """
        tensor = self._tensors.get(number)
        if tensor is None:
            return
        storage, before = tensor.untyped_storage(), self._storages[number]
        size_bytes = storage.nbytes()
        if self.overflow is not None:
            size_bytes = self.overflow.away_bytes(storage._cdata) or size_bytes
        if before == storage._cdata and self._held[before].size_bytes == size_bytes:
            return
        self._drop(number)
        held = self._held.get(storage._cdata)
        self.used_bytes += size_bytes - (held.size_bytes if held else 0)
        if held is None:
            self._held[storage._cdata] = _Held(size_bytes)
        else:
            held.size_bytes, held.holders = size_bytes, held.holders + 1
        self._storages[number] = storage._cdata
        if self.overflow is not None and self.overflow.takes(number):
            self.overflow.note(storage._cdata, storage)
        self.reserve(0)

    def peak_of(self, action: Callable[[], _T]) -> tuple[_T, int]:
        """Call a function, and return its result and its peak bytes in addition to those at its start."""
        start, before = self.used_bytes, self.peak_bytes
        self.peak_bytes = start
        try:
            made = action()
        finally:
            peak, self.peak_bytes = self.peak_bytes, max(self.peak_bytes, before)
        return made, peak - start

    def promise(self, numbers: Iterable[int], pending: PendingBuffers) -> None:
        """Register buffers that are filled at their first use.

        Raises:
            QuotaExceeded: The quota has no room for them in addition to their previous contents.
        """
        self.reserve(pending.size_bytes)
        self.used_bytes += pending.size_bytes
        self._promised[id(pending)] = 1  # held here while the numbers are registered
        for number in numbers:
            if self.overflow is not None and number in self._tensors:
                self._stay(self._storages[number], self.overflow)
            self.forget(number)
            self._pending[number] = pending
            self._promised[id(pending)] += 1
        self._release(pending)

    def _stay(self, identity: int, overflow: AwayStorages) -> None:
        """Let a storage that is on the device stay there: what is received may be written to it."""
        if not overflow.away_bytes(identity):
            overflow.forget(identity)

    def void(self, numbers: Iterable[int], failure: WorkerFailure) -> None:
        """Mark buffers as void."""
        for number in numbers:
            self.forget(number)
            self._void[number] = failure

    def spoil(self, number: int, failure: WorkerFailure) -> None:
        """Mark a buffer as void, and all that share its storage: an expected write has failed."""
        storage = self._storages.get(number)
        if storage is None:
            self.void([number], failure)
        else:
            self.spoil_storage(storage, failure)

    def spoil_storage(self, storage: int, failure: WorkerFailure) -> None:
        """Mark all buffers with a storage, given by its identity, as void."""
        self.void([number for number, held in self._storages.items() if held == storage], failure)

    def lend(self, number: int, away: HostCopies) -> None:
        """Record the place that a buffer is being copied to; it stays here, too, until :meth:`evict`."""
        self._away[number] = away

    def away(self, number: int) -> HostCopies | None:
        """Return the other place of a buffer."""
        return self._away.get(number)

    def here(self, number: int) -> bool:
        """Return whether a buffer is on the device, or on its way to it."""
        return number in self._tensors or number in self._pending

    def shares(self, number: int) -> bool:
        """Return whether other numbers share the storage of a buffer."""
        storage = self._storages.get(number)
        return storage is not None and self._held[storage].holders > 1

    def evict(self, number: int) -> None:
        """Free the device's memory of an offloaded buffer."""
        assert number in self._away, f"buffer {number} is nowhere else"
        if self._tensors.pop(number, None) is not None:
            self._drop(number)

    def take(self, number: int) -> Tensor:
        """Remove and return a buffer."""
        tensor = self.get(number)
        self.forget(number)
        return tensor

    def forget(self, number: int) -> None:
        """Empty a number; no effect if it is empty."""
        if self._tensors.pop(number, None) is not None:
            self._drop(number)
        elif (pending := self._pending.pop(number, None)) is not None:
            self._promised_as.pop(number, None)
            self._release(pending)
        else:
            self._void.pop(number, None)
        if self._away and (away := self._away.pop(number, None)) is not None:
            away.drop(number)

    def within(self, first: int, end: int) -> list[int]:
        """Return the numbers in a range, its end excluded, that are not empty."""
        tables: list[dict[int, Any]] = [self._tensors, self._pending, self._void, self._away]
        return sorted({number for table in tables for number in table if first <= number < end})

    def rename(self, into: Mapping[int, int]) -> None:
        """Renumber buffers, all at once; buffers whose numbers are taken, and that get no others, end.

        Args:
            into: From each number to its new one; new numbers are distinct.

        Raises:
            WireError: One of them is empty; nothing has changed.
        """
        tables: list[dict[int, Any]] = [self._tensors, self._pending, self._void, self._away]
        for number in into:
            if not any(number in table for table in tables):
                raise WireError(f"there is no buffer {number}")
        for number in into.values():
            if number not in into:
                self.forget(number)
        known = {new: self._promised_as.pop(old, old) for old, new in into.items() if old in self._pending}
        for copy in {id(copy): copy for number in into if (copy := self._away.get(number)) is not None}.values():
            copy.rename(into)
        for table in (*tables, self._storages):
            moved = {into[number]: table.pop(number) for number in into if number in table}
            table.update(moved)
        self._promised_as |= known

    def _drop(self, number: int) -> None:
        """Record that a number no longer holds its storage."""
        storage = self._storages.pop(number)
        held = self._held[storage]
        held.holders -= 1
        if not held.holders:
            del self._held[storage]
            away_bytes = self.overflow.forget(storage) if self.overflow is not None else 0
            self.used_bytes -= held.size_bytes - away_bytes

    def _release(self, pending: PendingBuffers) -> None:
        """Record that a promise has one number less to fill; after the last one its bytes are free."""
        left = self._promised[id(pending)] - 1
        if left:
            self._promised[id(pending)] = left
        else:
            del self._promised[id(pending)]
            self.used_bytes -= pending.size_bytes
            pending.end()

    def room_bytes(self) -> int | None:
        """Return the bytes that nothing uses within the quota, apart from spare memory; ``None`` without a quota."""
        spare_bytes = self._spare.size_bytes if self._spare is not None else 0
        return self.quota_bytes - self.used_bytes - spare_bytes if self.quota_bytes else None

    def reserve(self, more_bytes: int) -> None:
        """Check that additional bytes may be in use for a while, and record their peak.

        Raises:
            QuotaExceeded: They would exceed the quota.
        """
        total = self.used_bytes + more_bytes
        if self.quota_bytes and self._spare is not None and total + self._spare.size_bytes > self.quota_bytes:
            self._spare.release()
        if self.quota_bytes and total > self.quota_bytes and self.overflow is not None:
            freed_bytes = self.overflow.make_room(total - self.quota_bytes)
            self.used_bytes -= freed_bytes
            total -= freed_bytes
        if self.quota_bytes and total > self.quota_bytes:
            raise QuotaExceeded(
                f"{enough_text(total)} needed, but the quota is {size_text(self.quota_bytes)}: "
                f"{enough_text(total - self.quota_bytes)} too much; {size_text(more_bytes)} asked for beside "
                f"{size_text(self.used_bytes)} in use{f'; {self.overflow.refusal}' if self.overflow else ''}",
                asked_bytes=more_bytes,
                used_bytes=self.used_bytes,
                allowed_bytes=self.quota_bytes,
            )
        self.peak_bytes = max(self.peak_bytes, total)

    def charge(self, more_bytes: int) -> None:
        """Count bytes outside of buffers, such as an optimizer's state; negative to free them.

        Raises:
            QuotaExceeded: The quota has no room for them; they are counted nevertheless, because they are allocated.
        """
        self.used_bytes += more_bytes
        if more_bytes > 0:
            self.reserve(0)

    def __contains__(self, number: int) -> bool:
        return any(number in table for table in (self._tensors, self._pending, self._void, self._away))

    def __len__(self) -> int:
        evicted = sum(number not in self._tensors for number in self._away)
        return len(self._tensors) + len(self._pending) + len(self._void) + evicted
