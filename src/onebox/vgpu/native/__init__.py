"""The virtual device in C++: PyTorch's device of private use, whose operators are recorded without a step into Python.

``queue`` has the recorded calls and the buffers of tensors, ``recorder`` the kernel that PyTorch calls for an operator,
``device`` the guard, the generators and the hooks by which PyTorch knows a device, ``module`` what Python sees. What is
above them and below, what a call means and where it runs, is Python's: tests have both in one process, the devices of a
pool are these where ``ONEBOX_DEVICE=native`` says so (:data:`IN_USE`), and will be these alone.
"""

import os
from types import ModuleType

IN_USE = os.environ.get("ONEBOX_DEVICE") == "native"
"""Whether virtual devices are those of C++, rather than a subclass of tensors in Python."""


def load() -> ModuleType:
    """Return the module in C++; see :func:`onebox.vgpu.native.build.load`."""
    from onebox.vgpu.native.build import load  # which imports PyTorch's own for compilers

    return load()


__all__ = ["IN_USE", "load"]
