"""Storages of virtual tensors, as far as scripts use them: identity and size.

Libraries recognise tied weights by the addresses of their elements. Such an address cannot be read, as that of a GPU,
so any number that is unique to a buffer serves.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NoReturn

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


def _refused(name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: the elements are on a worker."""
        raise NotImplementedError(
            f"{name} needs the elements of a storage, which for a virtual device are on a worker and not in this "
            "process; use methods of the tensor, or tensor.cpu(), which has a storage on the host"
        )

    return refuse


_OF_ELEMENTS = (
    "__getitem__", "__reduce_ex__", "__setitem__", "_set_from_file", "_share_cuda_", "_share_fd_cpu_",
    "_share_filename_cpu_",
    "_shared_decref", "_shared_incref", "_write_file", "bool", "byte", "byteswap", "bfloat16", "char", "clone",
    "complex_double", "complex_float", "copy_", "cpu", "cuda", "double", "fill_", "float", "half", "hpu", "int",
    "is_pinned", "long", "mps", "new", "pin_memory", "resize_", "short", "to", "tolist", "type",
)  # fmt: skip
"""Methods of a storage that read or write its elements, some of which end the process where there are none."""

_MAKING = ("_new_shared", "_new_using_fd_cpu", "_new_using_filename_cpu", "_new_with_file", "from_buffer", "from_file")
"""Likewise, methods of the class that make another storage of its kind."""

for _name in _OF_ELEMENTS:
    setattr(VirtualStorage, _name, _refused(_name))
for _name in _MAKING:
    setattr(VirtualStorage, _name, classmethod(_refused(_name)))


def on_host_only(make: Any) -> Any:
    """Wrap the constructor of storages, to refuse those of virtual devices, which would be read at no address."""

    @functools.wraps(make)
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        place = kwargs.get("device")
        kind = place.type if isinstance(place, torch.device) else str(place).partition(":")[0]
        if kind == "vgpu":
            raise NotImplementedError(
                "a storage of a virtual device cannot be made by itself, as its elements are on a worker: make a "
                "tensor, as by torch.empty(); a process that reads data for a DataLoader keeps it on the host"
            )
        return make(cls, *args, **kwargs)

    return staticmethod(new)


def swapping_on_host(swap: Any) -> Any:
    """Wrap the method that swaps the bytes of a storage's elements, which it does at their address, to refuse that."""

    @functools.wraps(swap)
    def byteswap(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type != "cpu":
            raise NotImplementedError("byteswap() needs the elements of a storage in this process; use cpu() before")
        return swap(self, *args, **kwargs)

    return byteswap


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
