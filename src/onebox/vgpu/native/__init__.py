"""The virtual device in C++: PyTorch's device of private use, whose operators are recorded without a step into Python.

``queue`` has the recorded calls and the buffers of tensors, ``recorder`` the kernel that PyTorch calls for an operator,
``device`` the guard, the generators and the hooks by which PyTorch knows a device, ``module`` what Python sees. What is
above them and below, what a call means and where it runs, is Python's: tests have both in one process, the devices of a
pool do not use it yet.
"""

from onebox.vgpu.native.build import load

__all__ = ["load"]
