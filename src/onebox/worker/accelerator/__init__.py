"""Devices that compute, behind one interface: streams, events, page-locked memory, generators and memory statistics.

Nothing else in ``worker`` asks whether a device is a GPU: code that matters only where the host runs ahead of the
device asks :attr:`Accelerator.asynchronous`.
"""

from __future__ import annotations

from importlib.metadata import entry_points

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
    "is_installed",
    "needs_driver",
]


KERNELS_AT_ONCE = "CUDA_MODULE_LOADING", "EAGER"
"""Environment variable of CUDA, and a value with which the driver loads kernels when it starts. Otherwise it loads each
at its first use, which may wait for all work of the device: a receive there would wait for a send that comes later."""


GROUP = "onebox.accelerators"
"""Group of entry points."""

_OWN = "cpu", "cuda"


def accelerator_for(name: str) -> Accelerator:
    """Return the accelerator of a device, for this process.

    Args:
        name: The name of the device, by PyTorch: ``cpu`` or ``cuda:k``; or ``KIND:k`` of an installed package
            (:func:`is_installed`).

    Raises:
        RuntimeError: PyTorch knows no such device, or this machine lacks it.
    """
    kind, _, index = name.partition(":")
    for entry in () if kind in _OWN else entry_points(group=GROUP, name=kind):
        made: Accelerator = entry.load()(int(index or 0))
        return made
    device = torch.device(name)
    return CudaAccelerator(device) if device.type == "cuda" else HostAccelerator(device)


def is_installed(kind: str) -> bool:
    """Return whether an installed package has accelerators of some kind: an entry point of this name and of the group
    :data:`GROUP`, that makes one by its number."""
    return kind not in _OWN and bool(entry_points(group=GROUP, name=kind))


def needs_driver(name: str) -> bool:
    """Return whether a device, by its name, is used through the files of a driver; initialises nothing."""
    return name.startswith("cuda")
