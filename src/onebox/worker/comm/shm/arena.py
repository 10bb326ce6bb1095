"""Blocks of one large span of memory: taken, given back, used again; pure but for the pages it lets go of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

ALIGN = 64
_STEPS = 4
"""Sizes of blocks between one power of two and the next; what a block is larger than asked for is not written to, and
takes address space only."""

_SLACK_BYTES = 32 << 20
_WINDOW = 1024


class MemoryBlock:
    """A block that was taken.

    Args:
        offset: Where it begins in the span.
        size: Its bytes, at least what was asked for.
    """

    __slots__ = ("backed", "offset", "readers", "size")

    def __init__(self, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size
        self.readers = 0
        self.backed = True


class Arena:
    """Hands out blocks.

    A block that comes back is kept for the next taker of its size, the latest first, because its pages are in place
    and in the cache. Pages of free blocks go back to the system when more are held than twice what was in use lately.

    Args:
        start: First byte of the span; blocks begin at multiples of ``align`` behind it.
        end: Where it ends.
        discard: Called with the offset and size of a range whose pages are not needed.
        align: A multiple of 64.
        keep: Whether all pages are kept until :meth:`empty`.
    """

    def __init__(
        self, start: int, end: int, discard: Callable[[int, int], None], *, align: int = ALIGN, keep: bool = False
    ) -> None:
        self.used_bytes = 0
        self.backed_bytes = 0
        self._align = align
        self._top = -(-start // align) * align
        self._end = end
        self._discard = discard
        self._keep = keep
        self._free: dict[int, list[MemoryBlock]] = defaultdict(list)
        self._peaks = [0, 0]  # most bytes in use, in this window of operations and in the one before
        self._count = 0

    def take(self, size: int) -> MemoryBlock:
        """Return a block of at least so many bytes.

        Raises:
            MemoryError: The span is full.
        """
        size = rounded(size, self._align)
        free = self._free[size]
        if free:
            block = free.pop()
        else:
            if self._top + size > self._end:
                raise MemoryError(f"{self.used_bytes} bytes wait to be read by other workers; no room for {size} more")
            block = MemoryBlock(self._top, size)
            block.backed = False
            self._top += size
        self.used_bytes += size
        if not block.backed:
            block.backed = True
            self.backed_bytes += size
        self._peaks[0] = max(self._peaks[0], self.used_bytes)
        return block

    def give(self, block: MemoryBlock) -> None:
        """Take a block back."""
        self.used_bytes -= block.size
        self._count += 1
        if self._count == _WINDOW:
            self._count = 0
            self._peaks = [self.used_bytes, self._peaks[0]]
        free = self._free[block.size]
        if not self._keep and self.backed_bytes > 2 * max(self._peaks) + _SLACK_BYTES:
            self._discard(block.offset, block.size)
            self.backed_bytes -= block.size
            block.backed = False
            free.insert(0, block)
        else:
            free.append(block)

    def empty(self) -> None:
        """Let go of the pages of all free blocks."""
        for block in [block for blocks in self._free.values() for block in blocks if block.backed]:
            self._discard(block.offset, block.size)
            self.backed_bytes -= block.size
            block.backed = False


def rounded(size: int, align: int = ALIGN) -> int:
    """Return the size of the blocks that so many bytes go into: a multiple of ``align``, and never nothing."""
    if size > ALIGN * _STEPS:
        step = 1 << ((size - 1).bit_length() - _STEPS.bit_length())
        size = -(-size // step) * step
    return max(align, -(-size // align) * align)
