"""Tensors over given memory, on any device of PyTorch, whose release is noticed: by DLPack, as no public function makes
a tensor of a private device over memory of one's own.

The structures are those of ``dlpack.h`` (version 0, as ``torch.from_dlpack`` takes them).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

HOST = 1
"""``kDLCPU``."""

PRIVATE = 12
"""``kDLExtDev``: PyTorch's private device."""


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("index", ctypes.c_int))


class _ElementType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Contents(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int),
        ("elements", _ElementType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("contents", _Contents), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


_structures: dict[int, tuple[object, ...]] = {}
"""Structures of memory that tensors may be over: PyTorch reads them when the last one goes, maybe after the device."""


class TrackedMemory:
    """Memory under tensors, and whether all of them are gone.

    DLPack's own notice of that is of no use: it may come while PyTorch raises an exception, when no Python can run.

    Args:
        address: Its address.
        size_bytes: Its size.
        kind: :data:`HOST` or :data:`PRIVATE`.
        owner: Lives as long as the memory is in use.
    """

    def __init__(self, address: int, size_bytes: int, kind: int, owner: object = None) -> None:
        self.address = address
        self.owner = owner
        shape, strides = (ctypes.c_int64 * 1)(size_bytes), (ctypes.c_int64 * 1)(1)
        managed = _Managed()
        contents = managed.contents
        contents.data, contents.device, contents.dimensions = address, _Device(kind, 0), 1
        contents.elements = _ElementType(1, 8, 1)
        contents.shape, contents.strides = shape, strides
        self._structure = ctypes.addressof(managed)
        _structures[self._structure] = managed, shape, strides
        made = torch._C._from_dlpack(_new_capsule(ctypes.addressof(managed), b"dltensor", None))
        self._first: Tensor | None = made
        self._weak = made.untyped_storage()._weak_ref()

    def take(self) -> Tensor:
        """Return the bytes, once."""
        first, self._first = self._first, None
        assert first is not None
        return first

    def gone(self) -> bool:
        """Return whether no tensor is over it any more; not to be called again then."""
        if not torch.UntypedStorage._expired(self._weak):
            return False
        torch.UntypedStorage._free_weak_ref(self._weak)
        del _structures[self._structure]
        return True


__all__ = ["HOST", "PRIVATE", "TrackedMemory"]
