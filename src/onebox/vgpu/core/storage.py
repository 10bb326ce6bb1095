"""Storages of virtual tensors, as far as scripts use them: identity and size.

Libraries recognise tied weights by the addresses of their elements. Such an address cannot be read, as that of a GPU,
so any number that is unique to a buffer serves.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

_FIRST = 1 << 44
_ALIGNED = 1 << 8
"""Alignment of addresses, that of a GPU's allocator."""

_free = [_FIRST]
_lock = threading.Lock()


class VirtualStorage(torch.UntypedStorage):
    """The storage of a virtual tensor: a size and an address, no elements."""

    _address: int
    _place: torch.device

    def data_ptr(self) -> int:
        """Return an address that no other storage has; 0 for an empty one."""
        return self._address if self.nbytes() else 0

    @property
    def device(self) -> Any:  # type: ignore[override]  # read-only in PyTorch, too
        """The device of the elements."""
        return self._place


def new_storage(size_bytes: int, place: torch.device) -> VirtualStorage:
    """Return a storage with an address of its own.

    Args:
        size_bytes: Its size.
        place: Where its elements are.
    """
    made = VirtualStorage(size_bytes, device="meta")
    with _lock:
        made._address, made._place = _free[0], place
        _free[0] += (size_bytes // _ALIGNED + 1) * _ALIGNED
    return made
