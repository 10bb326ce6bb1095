"""The virtual device in C++: PyTorch's device of private use, whose operators are recorded without a step into Python.

``queue`` has the recorded calls and the buffers of tensors, ``recorder`` the kernel that PyTorch calls for an operator,
``sparse`` those of sparse tensors, ``device`` the guard, the generators and the hooks by which PyTorch knows a device,
``module`` what Python sees. What is above them and below, what a call means and where it runs, is Python's.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

_loaded: list[ModuleType] = []


def load() -> Any:
    """Return the module in C++, which is loaded at its first use; see :func:`onebox.vgpu.native.build.load`."""
    if not _loaded:
        from onebox.vgpu.native import build  # which imports much

        _loaded[:] = [build.load()]
    return _loaded[0]


def loaded() -> Any:
    """Return the module in C++; ``None`` where nothing has needed it."""
    return _loaded[0] if _loaded else None


__all__ = ["load", "loaded"]
