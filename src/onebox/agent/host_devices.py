"""This host's offered devices, and their load."""

from __future__ import annotations

import itertools
import os

import psutil
import torch

from onebox.agent.admission import Offered
from onebox.emulator import MEMORY_BYTES
from onebox.errors import UsageError
from onebox.pool.discovery import cores, gpu_count, requested_devices
from onebox.worker.device import ComputeDevice

_FRESH_S = 1.0


def offered_devices(
    spec: str = "auto", *, threads: int | None = None, memory_bytes: int | None = None
) -> list[Offered]:
    """Return the devices that this host offers.

    Args:
        spec: ``auto`` for all GPUs and the CPU; or a list such as ``cuda:0,cuda:1``, ``cuda`` or ``cuda:0,cpu``; with
            ``sim*N``, emulated devices, numbered from 0.
        threads: Limit of the offered cores; all that this process may use when ``None``. Workers of a GPU may use an
            equal share of them.
        memory_bytes: Limit of each device's offered memory; all when ``None``.

    Raises:
        UsageError: The list is invalid, names a device twice or a missing one, or there is less than is to be offered.
    """
    if threads is not None and not 1 <= threads <= cores():
        raise UsageError(f"{threads} cores are to be offered; this process may use 1 to {cores()}")
    if memory_bytes is not None and memory_bytes < 1:
        raise UsageError(f"{memory_bytes} bytes of memory are to be offered; at least 1 is needed")
    if spec.strip() == "auto":
        spec = "cuda,cpu" if gpu_count() else "cpu"
    requests = requested_devices(spec, threads)
    emulated = itertools.count()
    names = [f"sim:{next(emulated)}" if request.device == "sim" else request.device for request in requests]
    if len(set(names)) < len(names) or any(request.speed != 1 for request in requests):
        raise UsageError(f"{spec!r} cannot be offered; name each device once, such as 'cuda:0,cuda:1,cpu', without @")
    most = threads or cores()
    each = {"cpu": most, "cuda": max(1, most // max(1, sum(name.startswith("cuda") for name in names))), "sim": 1}
    kinds = [name.partition(":")[0] for name in names]
    if not each.keys() >= set(kinds):  # modelled accelerators, which are for tests
        raise UsageError(f"{spec!r} cannot be offered; allowed are cpu, cuda, cuda:K and sim*N")
    return [_offered(name, each[kind], memory_bytes) for name, kind in zip(names, kinds, strict=True)]


def _offered(name: str, threads: int, memory_bytes: int | None) -> Offered:
    if name == "cpu":
        product, memory = (
            ComputeDevice("cpu", torch.get_num_threads()).product_name(),
            int(psutil.virtual_memory().total),
        )
    elif name.startswith("sim"):
        product, memory = "emulated", MEMORY_BYTES
    else:
        properties = torch.cuda.get_device_properties(torch.device(name))
        product, memory = properties.name, int(properties.total_memory)
    if memory_bytes is not None and memory_bytes > memory:
        raise UsageError(f"{memory_bytes} bytes of {name} are to be offered; it has {memory}")
    return Offered(device=name, name=product, memory_bytes=memory_bytes or memory, threads=threads)


class DeviceLoad:
    """Utilisation of this host's devices; a reading is cached for a moment."""

    def __init__(self) -> None:
        psutil.cpu_percent(None)  # its result covers the time since the last call
        self._read: dict[str, tuple[float, float]] = {}

    def of(self, device: str, now_s: float) -> float:
        """Return the fraction of recent time in which a device was busy, 0 to 1; -1 where unknown."""
        known = self._read.get(device)
        if known is None or now_s - known[0] > _FRESH_S:
            known = self._read[device] = now_s, _busy(device)
        return known[1]

    @staticmethod
    def average() -> float:
        """Return the load average of the last minute, divided by the number of cores."""
        return os.getloadavg()[0] / cores()


def _busy(device: str) -> float:
    if device == "cpu":
        return min(1.0, psutil.cpu_percent(None) / 100)
    try:
        return torch.cuda.utilization(torch.device(device)) / 100
    except Exception:  # it needs a library of the driver's, which raises errors of its own
        return -1.0
