"""The buffer store: numbered tensors, every byte accounted for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from onebox.errors import WireError
from onebox.wire.sayings import Failure


class Pending(Protocol):
    """Buffers that something else is filling."""

    @property
    def size_bytes(self) -> int:
        """Bytes of them all, which are in use already."""

    def wait(self) -> dict[int, Tensor]:
        """Wait until it has, and return them all."""


class Poisoned(Exception):
    """A buffer is void because of an earlier failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class QuotaExceeded(Exception):
    """An allocation would exceed the worker's quota."""


class BufferStore:
    """Numbered buffers of one device.

    A number holds a tensor, a promise of one (see :class:`Pending`), or the failure that voided it. A storage is
    counted once, however many tensors view it.

    Args:
        quota_bytes: The most bytes that may be in use; 0 for no limit.
    """

    def __init__(self, quota_bytes: int = 0) -> None:
        self.quota_bytes = quota_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._tensors: dict[int, Tensor] = {}
        self._pending: dict[int, Pending] = {}
        self._promised: dict[int, int] = {}  # from the id of a promise to how many numbers it still fills
        self._void: dict[int, Failure] = {}
        self._holders: dict[int, int] = {}  # from a storage, by its identity (on meta it has no address), to its uses

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
            made = {key: value for key, value in pending.wait().items() if self._pending.get(key) is pending}
            for key in made:
                self.forget(key)
            for key, value in made.items():
                self.put(key, value)
            return self._tensors[number]
        if number in self._void:
            raise Poisoned(self._void[number])
        raise WireError(f"there is no buffer {number}")

    def put(self, number: int, tensor: Tensor) -> None:
        """Fill a buffer; what it held before is gone.

        Raises:
            QuotaExceeded: The quota has no room for it.
        """
        self.forget(number)
        storage = tensor.untyped_storage()
        holders = self._holders.get(storage._cdata, 0)
        if holders == 0 and storage.nbytes():
            self.reserve(storage.nbytes())
            self.used_bytes += storage.nbytes()
        self._holders[storage._cdata] = holders + 1
        self._tensors[number] = tensor

    def promise(self, numbers: Iterable[int], pending: Pending) -> None:
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

    def void(self, numbers: Iterable[int], failure: Failure) -> None:
        """Mark buffers as void."""
        for number in numbers:
            self.forget(number)
            self._void[number] = failure

    def take(self, number: int) -> Tensor:
        """Return a buffer and forget it."""
        tensor = self.get(number)
        self.forget(number)
        return tensor

    def forget(self, number: int) -> None:
        """Empty a number; one that is empty stays so."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._release(pending)
        self._void.pop(number, None)
        tensor = self._tensors.pop(number, None)
        if tensor is not None:
            storage = tensor.untyped_storage()
            self._holders[storage._cdata] -= 1
            if not self._holders[storage._cdata]:
                del self._holders[storage._cdata]
                self.used_bytes -= storage.nbytes()

    def _release(self, pending: Pending) -> None:
        """Note that a promise has one number less to fill; with the last its bytes are free."""
        self._promised[id(pending)] -= 1
        if not self._promised[id(pending)]:
            del self._promised[id(pending)]
            self.used_bytes -= pending.size_bytes

    def reserve(self, more_bytes: int) -> None:
        """Note that so many bytes more will be in use for a while.

        Raises:
            QuotaExceeded: They would exceed the quota.
        """
        total = self.used_bytes + more_bytes
        if self.quota_bytes and total > self.quota_bytes:
            raise QuotaExceeded(
                f"{total} bytes needed, but the quota is {self.quota_bytes}: "
                f"{total - self.quota_bytes} too many; use a smaller micro-batch or a larger quota"
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
        return len(self._tensors) + len(self._pending) + len(self._void)
