"""Storages of virtual tensors, as far as scripts ask for them: which tensors share one, and how large it is.

Libraries tell tied weights by the addresses of their elements. Nobody can read at such an address, no more than at that
of a GPU, so any number will do that is a buffer's own.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from onebox.vgpu.core.tensor import Handle, VirtualTensor

_FIRST = 1 << 44
_ALIGNED = 1 << 8
"""Addresses are multiples of this, as those of a GPU's allocator are."""

_free = [_FIRST]
_lock = threading.Lock()


class VirtualStorage(torch.UntypedStorage):
    """The storage of a virtual tensor: a size and an address, no elements."""

    _address: int
    _place: torch.device

    def data_ptr(self) -> int:
        """Return a number that no other storage has; 0 for an empty one."""
        return self._address if self.nbytes() else 0

    @property
    def device(self) -> Any:  # type: ignore[override]  # read-only in PyTorch, too
        """Where the elements are."""
        return self._place


def storage_of(tensor: VirtualTensor) -> VirtualStorage:
    """Return the storage of a virtual tensor: the same one for all tensors of a buffer and for the views of them.

    Args:
        tensor: The tensor; its elements are not looked at.
    """
    base: Any = tensor._base  # whose view it is, as far as autograd knows
    handle: Handle = (tensor if base is None else base)._handle
    size_bytes = tensor._metadata.storage_bytes
    with _lock:
        known = getattr(handle, "storage", None)
        if known is None or known.nbytes() != size_bytes:
            known = handle.storage = _made(size_bytes, handle.stream.device)
    return known


def _made(size_bytes: int, place: torch.device) -> VirtualStorage:
    made = VirtualStorage(size_bytes, device="meta")
    made._address, made._place = _free[0], place
    _free[0] += (size_bytes // _ALIGNED + 1) * _ALIGNED
    return made
