"""Memory that a worker shares with others of its host, counted separately, and bounded.

The kernel counts it for no process, so that no limit of a process holds for it. It lasts until its readers are done
with it, also after the worker has left the group in which it was sent.
"""

from __future__ import annotations

import threading
from typing import Protocol

from onebox.sizes import enough_text, size_text
from onebox.worker.memory.buffers import QuotaExceeded

SHARED_SHARE = 2
LEAST_BYTES = 64 << 20
"""Shared memory of a worker with a quota: so many times the quota, and so much besides. Tensors that have been sent
wait there until they are read, and those that were received may stay there."""


LENT_STORAGES: set[int] = set()
"""Storages of tensors that lie in the memory of other workers, who could change them: by PyTorch's addresses."""


def shared_limit_bytes(quota_bytes: int) -> int:
    """Return the most bytes that a worker with a quota may share; 0 for no limit."""
    return SHARED_SHARE * quota_bytes + LEAST_BYTES if quota_bytes else 0


class SharedBlocks(Protocol):
    """The blocks that a worker has shared in one group."""

    def reclaim(self) -> None:
        """Free the memory that no reader uses."""

    def settle(self) -> bool:
        """Free what is left, of a group that this worker has left; return whether no reader can use any of it."""


class SharedMemoryQuota:
    """Bytes of a worker's shared memory, over all groups. Thread-safe.

    Args:
        quota_bytes: The worker's quota; 0 for no limit.
    """

    def __init__(self, quota_bytes: int = 0) -> None:
        self.limit_bytes = shared_limit_bytes(quota_bytes)
        self.used_bytes = 0
        self._lock = threading.RLock()  # a finalizer that frees shared memory may run in the thread that has it
        self._groups: list[SharedBlocks] = []
        self._left: list[SharedBlocks] = []

    def enter(self, blocks: SharedBlocks) -> None:
        """Add a group's blocks, whose spare memory can be reclaimed."""
        with self._lock:
            self._groups.append(blocks)

    def leave(self, blocks: SharedBlocks) -> None:
        """Keep counting the blocks of a group that was left until they are settled. Idempotent."""
        with self._lock:
            if blocks not in self._groups:
                return
            self._groups.remove(blocks)
            self._left.append(blocks)
        self.settle()

    def charge(self, more_bytes: int, *, forced: bool = False) -> None:
        """Count bytes before they are used; negative to free them.

        Args:
            more_bytes: The bytes.
            forced: Count them even beyond the limit.

        Raises:
            QuotaExceeded: They exceed the limit; they are not counted then.
        """
        if self._add(more_bytes, forced):
            return
        self.settle()
        for blocks in list(self._groups):
            blocks.reclaim()
        if not self._add(more_bytes, forced):
            used_bytes = self.used_bytes
            raise QuotaExceeded(
                f"{enough_text(used_bytes + more_bytes)} of memory shared with other workers needed, but "
                f"{size_text(self.limit_bytes)} are allowed: {size_text(used_bytes)} have been sent and not been read, "
                "or are in use by their readers",
                asked_bytes=more_bytes,
                used_bytes=used_bytes,
                allowed_bytes=self.limit_bytes,
            )

    def _add(self, more_bytes: int, forced: bool) -> bool:
        with self._lock:
            if more_bytes > 0 and not forced and self.limit_bytes and self.used_bytes + more_bytes > self.limit_bytes:
                return False
            self.used_bytes += more_bytes
            return True

    def settle(self) -> bool:
        """Free what readers have returned of the groups that were left; return whether nothing of these is left."""
        for blocks in list(self._left):
            if blocks.settle():
                with self._lock:
                    if blocks in self._left:
                        self._left.remove(blocks)
        return not self._left
