"""The buffer store: numbered tensors, every byte accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from onebox.errors import WireError
from onebox.sizes import enough_text, size_text
from onebox.wire.protocol.responses import WorkerFailure

_T = TypeVar("_T")


class PendingBuffers(Protocol):
    """Buffers that something else is filling."""

    @property
    def size_bytes(self) -> int:
        """Bytes of them all, which are in use already."""

    def wait(self) -> dict[int, Tensor]:
        """Wait until it has, and return them all."""

    def end(self) -> None:
        """Note that the last of them has been returned, or is not wanted any more."""


class HostCopies(Protocol):
    """Where buffers are, or are being copied to, besides or instead of the device."""

    def drop(self, number: int) -> None:
        """Note that nobody needs a buffer from there any more."""

    def rename(self, into: Mapping[int, int]) -> None:
        """Note that buffers are known by other numbers, all at once; those that are not there are passed over."""


class Poisoned(Exception):
    """A buffer is void because of an earlier failure."""

    def __init__(self, failure: WorkerFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class QuotaExceeded(Exception):
    """An allocation would exceed the worker's quota, or another bound.

    Args:
        message: For a person.
        asked_bytes: What was asked for.
        used_bytes: What is in use beside it.
        allowed_bytes: The bound.
    """

    def __init__(self, message: str, *, asked_bytes: int = 0, used_bytes: int = 0, allowed_bytes: int = 0) -> None:
        super().__init__(message)
        self.asked_bytes = asked_bytes
        self.used_bytes = used_bytes
        self.allowed_bytes = allowed_bytes


class _Held:
    """A storage that buffers hold.

    Args:
        size_bytes: What it counts for; kept here, because an operator may make it grow.
    """

    __slots__ = ("holders", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.holders = 1


class BufferStore:
    """Numbered buffers of one device.

    A number holds a tensor, a promise of one (see :class:`PendingBuffers`), or the failure that voided it; or it is
    away, in the host's memory. A storage is counted once, however many tensors view it.

    Args:
        quota_bytes: The most bytes that may be in use; 0 for no limit.
    """

    def __init__(self, quota_bytes: int = 0) -> None:
        self.quota_bytes = quota_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._tensors: dict[int, Tensor] = {}
        self._pending: dict[int, PendingBuffers] = {}
        self._promised: dict[int, int] = {}  # from the id of a promise to how many numbers it still fills
        self._promised_as: dict[int, int] = {}  # from a number that fills a promise to the one by which this knows it
        self._void: dict[int, WorkerFailure] = {}
        self._away: dict[int, HostCopies] = {}
        self._storages: dict[int, int] = {}  # from a number to its storage's identity (on meta it has no address)
        self._held: dict[int, _Held] = {}  # from a storage's identity

    def get(self, number: int) -> Tensor:
        """Return a buffer, waiting for it where it is still being filled.

        Raises:
            Poisoned: It is void.
            WireError: There is no such buffer.
        """
        tensor = self._tensors.get(number)
        if tensor is not None:
            return tensor
        if number in self._pending:
            pending = self._pending[number]
            filled = pending.wait()
            mine = [key for key, value in self._pending.items() if value is pending]
            made = {key: filled[self._promised_as.get(key, key)] for key in mine}
            for key in made:
                self.forget(key)
            for key, value in made.items():
                self.put(key, value)
            return self._tensors[number]
        if number in self._void:
            raise Poisoned(self._void[number])
        if number in self._away:
            raise WireError(f"buffer {number} is in the host's memory; it has to be prefetched before it is read")
        raise WireError(f"there is no buffer {number}")

    def many(self, numbers: Sequence[int]) -> list[Tensor]:
        """Return several buffers; see :meth:`get`."""
        found = [self._tensors.get(number) for number in numbers]
        return [self.get(number) if tensor is None else tensor for number, tensor in zip(numbers, found, strict=True)]

    def put(self, number: int, tensor: Tensor) -> None:
        """Fill a buffer; what it held before is gone.

        Raises:
            QuotaExceeded: The quota has no room for it.
        """
        if number in self._tensors or number in self._void or number in self._pending or number in self._away:
            self.forget(number)
        storage = tensor.untyped_storage()
        self._hold(number, storage._cdata, storage.nbytes())
        self._tensors[number] = tensor

    def recount(self, number: int) -> None:
        """Count a buffer anew whose storage may have grown, or may be another one; an empty number is passed over.

        Raises:
            QuotaExceeded: The quota has no room for what it has become; it is counted all the same.
        """
        tensor = self._tensors.get(number)
        if tensor is None:
            return
        storage, before = tensor.untyped_storage(), self._storages[number]
        size_bytes = storage.nbytes()
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
        self.reserve(0)

    def peak_of(self, action: Callable[[], _T]) -> tuple[_T, int]:
        """Do something, and return what it returns and the most bytes that it had in use beyond those at its start."""
        start, before = self.used_bytes, self.begin_peak()
        try:
            made = action()
        finally:
            peak = self.end_peak(before)
        return made, peak - start

    def begin_peak(self) -> int:
        """Measure the peak from here on; return the peak before, for :meth:`end_peak`."""
        before, self.peak_bytes = self.peak_bytes, self.used_bytes
        return before

    def end_peak(self, before: int) -> int:
        """Return the peak since :meth:`begin_peak`, and measure the peak of all times again."""
        peak, self.peak_bytes = self.peak_bytes, max(self.peak_bytes, before)
        return peak

    def promise(self, numbers: Iterable[int], pending: PendingBuffers) -> None:
        """Let buffers be filled when somebody asks for them.

        Raises:
            QuotaExceeded: The quota has no room for them beside what they held before.
        """
        self.reserve(pending.size_bytes)
        self.used_bytes += pending.size_bytes
        self._promised[id(pending)] = 1  # held here while the numbers are filled in
        for number in numbers:
            self.forget(number)
            self._pending[number] = pending
            self._promised[id(pending)] += 1
        self._release(pending)

    def void(self, numbers: Iterable[int], failure: WorkerFailure) -> None:
        """Mark buffers as void."""
        for number in numbers:
            self.forget(number)
            self._void[number] = failure

    def spoil(self, number: int, failure: WorkerFailure) -> None:
        """Mark a buffer as void, and all that share its storage: something should have written there, and has not."""
        storage = self._storages.get(number)
        if storage is None:
            self.void([number], failure)
        else:
            self.spoil_storage(storage, failure)

    def spoil_storage(self, storage: int, failure: WorkerFailure) -> None:
        """Mark all buffers as void that share a storage, given by its identity."""
        self.void([number for number, held in self._storages.items() if held == storage], failure)

    def lend(self, number: int, away: HostCopies) -> None:
        """Note where a buffer is being copied to; it stays here, too, until :meth:`evict`."""
        self._away[number] = away

    def away(self, number: int) -> HostCopies | None:
        """Return where else a buffer is."""
        return self._away.get(number)

    def here(self, number: int) -> bool:
        """Tell whether a buffer is on the device, or on its way to it."""
        return number in self._tensors or number in self._pending

    def shares(self, number: int) -> bool:
        """Tell whether other numbers hold the storage of a buffer, too."""
        storage = self._storages.get(number)
        return storage is not None and self._held[storage].holders > 1

    def evict(self, number: int) -> None:
        """Let go of a buffer that is away."""
        assert number in self._away, f"buffer {number} is nowhere else"
        if self._tensors.pop(number, None) is not None:
            self._drop(number)

    def take(self, number: int) -> Tensor:
        """Return a buffer and forget it."""
        tensor = self.get(number)
        self.forget(number)
        return tensor

    def forget(self, number: int) -> None:
        """Empty a number; one that is empty stays so."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._promised_as.pop(number, None)
            self._release(pending)
        self._void.pop(number, None)
        if self._tensors.pop(number, None) is not None:
            self._drop(number)
        if self._away and (away := self._away.pop(number, None)) is not None:
            away.drop(number)

    def rename(self, into: Mapping[int, int]) -> None:
        """Let buffers be known by other numbers, all at once; what had these numbers, and gets no other, ends.

        Args:
            into: From each number to the one that it becomes, no two to the same.

        Raises:
            WireError: One of them is empty; then nothing has changed.
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

    def _hold(self, number: int, storage: int, size_bytes: int) -> None:
        """Note that a number holds a storage, which counts for as many bytes as it has now."""
        held = self._held.get(storage)
        if held is None:
            if size_bytes:
                self.reserve(size_bytes)
                self.used_bytes += size_bytes
            self._held[storage] = _Held(size_bytes)
        else:
            more = size_bytes - held.size_bytes
            if more:
                self.reserve(more)
                self.used_bytes += more
                held.size_bytes = size_bytes
            held.holders += 1
        self._storages[number] = storage

    def _drop(self, number: int) -> None:
        """Note that a number no longer holds its storage."""
        storage = self._storages.pop(number)
        held = self._held[storage]
        held.holders -= 1
        if not held.holders:
            del self._held[storage]
            self.used_bytes -= held.size_bytes

    def _release(self, pending: PendingBuffers) -> None:
        """Note that a promise has one number less to fill; with the last its bytes are free."""
        self._promised[id(pending)] -= 1
        if not self._promised[id(pending)]:
            del self._promised[id(pending)]
            self.used_bytes -= pending.size_bytes
            pending.end()

    def reserve(self, more_bytes: int) -> None:
        """Note that so many bytes more will be in use for a while.

        Raises:
            QuotaExceeded: They would exceed the quota.
        """
        total = self.used_bytes + more_bytes
        if self.quota_bytes and total > self.quota_bytes:
            raise QuotaExceeded(
                f"{enough_text(total)} needed, but the quota is {size_text(self.quota_bytes)}: "
                f"{enough_text(total - self.quota_bytes)} too much; {size_text(more_bytes)} asked for beside "
                f"{size_text(self.used_bytes)} in use",
                asked_bytes=more_bytes,
                used_bytes=self.used_bytes,
                allowed_bytes=self.quota_bytes,
            )
        self.peak_bytes = max(self.peak_bytes, total)

    def charge(self, more_bytes: int) -> None:
        """Count bytes that are held outside of the buffers, such as an optimizer's state; negative to return them.

        Raises:
            QuotaExceeded: The quota has no room for them; they are counted all the same, because they are there.
        """
        self.used_bytes += more_bytes
        if more_bytes > 0:
            self.reserve(0)

    def __len__(self) -> int:
        evicted = sum(number not in self._tensors for number in self._away)
        return len(self._tensors) + len(self._pending) + len(self._void) + evicted
