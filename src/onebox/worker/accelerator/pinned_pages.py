"""Page-locked memory of the host, of exactly the whole pages that hold the requested bytes.

PyTorch's own allocator of such memory (``CachingHostAllocator``, behind ``pin_memory=True``) takes the next power of
two, and keeps what is freed: limits of host memory could count as little as half of it.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

from onebox.worker.accelerator.interface import Accelerator


class _LockedPages(mmap.mmap):
    """Pages that are unlocked before they are unmapped, which is when the last tensor over them is freed."""

    accelerator: Accelerator | None = None

    def __del__(self) -> None:
        if self.accelerator is not None:
            try:
                with suppress(RuntimeError):  # of a device that failed
                    self.accelerator.synchronize()  # copies of any stream may still use them
            finally:  # later pages at this address could not be locked otherwise
                with suppress(RuntimeError):
                    self.accelerator.unpin(torch.frombuffer(self, dtype=torch.uint8))


def locked_pages(size_bytes: int, accelerator: Accelerator) -> Tensor:
    """Return new bytes of the host, locked for an accelerator; or ordinary ones if it locks no more, with which copies
    are synchronous.

    Args:
        size_bytes: Their number.
        accelerator: Locks them, until the last tensor over them is freed.
    """
    whole_bytes = max(1, -(-size_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
    pages = _LockedPages(-1, whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    if accelerator.pin(whole):
        pages.accelerator = accelerator
    return whole[:size_bytes]
