"""Memory statistics of a device, in the formats of ``torch.cuda``."""

from __future__ import annotations

from typing import Any

from onebox.vgpu.cuda_alias.device_names import number_of
from onebox.vgpu.cuda_alias.unsupported import raise_unsupported
from onebox.vgpu.integration import device_module


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    """Return the statistics of :func:`torch.cuda.memory_stats`, one dictionary in another for each dot."""
    nested: dict[str, Any] = {}
    for name, value in device_module.memory_stats(number_of(device)).items():
        *path, last = name.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Return a device's memory statistics as a table of text."""
    number = number_of(device)
    figures = device_module.memory_stats(number)
    free, total = device_module.mem_get_info(number)
    rows = [
        ("in use", figures["allocated_bytes.all.current"]),
        ("most in use", figures["allocated_bytes.all.peak"]),
        ("free", free),
        ("of the device", total),
    ]
    lines = [f"memory of cuda:{number}, {device_module.get_device_name(number)}"]
    lines += [f"  {what:<14} {size_bytes / 2**20:12.1f} MiB" for what, size_bytes in rows]
    return "\n".join(lines)


def get_per_process_memory_fraction(device: Any = None) -> float:
    """Return 1: this process may use all of the device's memory."""
    number_of(device)
    return 1.0


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Accept 1 and reject all else: a worker's memory is limited when the pool is opened."""
    number_of(device)
    if fraction != 1:
        raise_unsupported("torch.cuda.set_per_process_memory_fraction")
