"""Blocks of one large span of memory: allocated, freed and reused; pure except for discarding pages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from onebox.worker.memory.shared import SharedMemoryQuota

ALIGN = 64
_STEPS = 4
"""Block sizes between one power of two and the next; the unused end of a block is never written, and takes address
space only."""

_SLACK_BYTES = 32 << 20
_WINDOW = 1024


class MemoryBlock:
    """An allocated block.

    Args:
        offset: Its beginning in the span.
        size: Its bytes, at least the requested number.
    """

    __slots__ = ("backed", "offset", "readers", "size")

    def __init__(self, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size
        self.readers = 0
        self.backed = True


class Arena:
    """Allocator of blocks.

    A freed block is reused for the next request of its size, the latest first, because its pages are mapped and cached.
    Pages of free blocks are returned to the system when they exceed twice the recent peak use.

    Args:
        start: First byte of the span; blocks begin at multiples of ``align`` after it.
        end: End of the span.
        discard: Called with the offset and size of a range of unneeded pages.
        align: A multiple of 64.
        keep: Whether all pages are kept until :meth:`empty`.
        quota: Counts the pages of blocks.
    """

    def __init__(
        self,
        start: int,
        end: int,
        discard: Callable[[int, int], None],
        *,
        align: int = ALIGN,
        keep: bool = False,
        quota: SharedMemoryQuota | None = None,
    ) -> None:
        self._quota = quota or SharedMemoryQuota()
        self.used_bytes = 0
        self.backed_bytes = 0
        self._align = align
        self._top = -(-start // align) * align
        self._end = end
        self._discard = discard
        self.keep = keep
        self._free: dict[int, list[MemoryBlock]] = defaultdict(list)
        self._peaks = [0, 0]  # peak bytes in use, in this window of operations and in the previous one
        self._count = 0

    def take(self, size: int, *, forced: bool = False) -> MemoryBlock:
        """Allocate a block of at least the given number of bytes.

        Args:
            size: The bytes.
            forced: Take them even beyond the quota.

        Raises:
            MemoryError: The span is full.
            QuotaExceeded: The quota has no room for its pages.
        """
        size = rounded(size, self._align)
        free = self._free[size]
        charged = not free or not free[-1].backed
        if charged:
            self._quota.charge(size, forced=forced)  # may free pages of other blocks, or blocks by a finalizer
        if free:
            block = free.pop()
        else:
            if self._top + size > self._end:
                self._quota.charge(-size)
                raise MemoryError(f"{self.used_bytes} bytes wait to be read by other workers; no room for {size} more")
            block = MemoryBlock(self._top, size)
            block.backed = False
            self._top += size
        self.used_bytes += size
        if not block.backed:
            block.backed = True
            self.backed_bytes += size
        elif charged:
            self._quota.charge(-size)
        self._peaks[0] = max(self._peaks[0], self.used_bytes)
        return block

    def give(self, block: MemoryBlock) -> None:
        """Free a block."""
        self.used_bytes -= block.size
        self._count += 1
        if self._count == _WINDOW:
            self._count = 0
            self._peaks = [self.used_bytes, self._peaks[0]]
        free = self._free[block.size]
        if not self.keep and self.backed_bytes > 2 * max(self._peaks) + _SLACK_BYTES:
            self._release(block)
            free.insert(0, block)
        else:
            free.append(block)

    def empty(self) -> None:
        """Discard the pages of all free blocks."""
        for block in [block for blocks in self._free.values() for block in blocks if block.backed]:
            self._release(block)

    def forget(self) -> None:
        """Count no block any longer: the memory is that of its readers now."""
        self._quota.charge(-self.backed_bytes)
        self.backed_bytes = 0

    def _release(self, block: MemoryBlock) -> None:
        """Return the pages of a free block to the system."""
        self._discard(block.offset, block.size)
        self.backed_bytes -= block.size
        self._quota.charge(-block.size)
        block.backed = False


def rounded(size: int, align: int = ALIGN) -> int:
    """Return the block size for a number of bytes: a positive multiple of ``align``."""
    if size > ALIGN * _STEPS:
        step = 1 << ((size - 1).bit_length() - _STEPS.bit_length())
        size = -(-size // step) * step
    return max(align, -(-size // align) * align)
