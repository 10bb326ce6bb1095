"""Devices that compute, behind one interface: streams, events, page-locked memory, generators and memory statistics.

Nothing else in ``worker`` asks whether a device is a GPU: code that matters only where the host runs ahead of the
device asks :attr:`Accelerator.asynchronous`.
"""

from __future__ import annotations

import torch

from onebox.worker.accelerator.cpu import HostAccelerator
from onebox.worker.accelerator.cuda import CudaAccelerator
from onebox.worker.accelerator.interface import (
    Accelerator,
    DeviceFailed,
    DeviceIdentity,
    DeviceMemory,
    DeviceStream,
    Event,
    Graph,
)
from onebox.worker.accelerator.model import ModelAccelerator

__all__ = [
    "KERNELS_AT_ONCE",
    "Accelerator",
    "DeviceFailed",
    "DeviceIdentity",
    "DeviceMemory",
    "DeviceStream",
    "Event",
    "Graph",
    "HostAccelerator",
    "accelerator_for",
    "needs_driver",
]


KERNELS_AT_ONCE = "CUDA_MODULE_LOADING", "EAGER"
"""Environment variable of CUDA, and a value with which the driver loads kernels when it starts. Otherwise it loads each
at its first use, which may wait for all work of the device: a receive there would wait for a send that comes later."""


def accelerator_for(name: str) -> Accelerator:
    """Return the accelerator of a device, for this process.

    Args:
        name: The name of the device, by PyTorch: ``cpu``, ``cuda:k``, or ``meta`` for tensors without elements; or
            ``model:SEED``, a modelled accelerator for tests.

    Raises:
        RuntimeError: PyTorch knows no such device, or this machine lacks it.
    """
    if name.startswith("model:"):
        return ModelAccelerator(int(name.removeprefix("model:")))
    device = torch.device(name)
    return CudaAccelerator(device) if device.type == "cuda" else HostAccelerator(device)


def needs_driver(name: str) -> bool:
    """Return whether a device, by its name, is used through the files of a driver; initialises nothing."""
    return name.startswith("cuda")
