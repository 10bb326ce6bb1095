"""``torch.accelerator`` for virtual devices: its functions in PyTorch's core, implemented by ``torch.vgpu``.

The core would ask the device in C++, which is loaded only when a tensor is made.
"""

from __future__ import annotations

from typing import Any

from onebox.vgpu.integration import device_module
from onebox.vgpu.runtime import context


def _stats(device: int) -> dict[str, Any]:
    """Return a device's memory statistics in the nested form of the core."""
    nested: dict[str, Any] = {}
    for name, value in device_module.memory_stats(device).items():
        *outer, last = name.split(".")
        inner = nested
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


ANSWERS = {
    "getDeviceIndex": context.current_device,
    "setDeviceIndex": device_module.set_device,
    "exchangeDevice": device_module.exchange_device,
    "maybeExchangeDevice": device_module.exchange_device,
    "getStream": device_module.current_stream,
    "setStream": device_module.set_stream,
    "synchronizeDevice": device_module.synchronize,
    "getDeviceCapability": lambda device: {"supported_dtypes": set(device_module.SUPPORTED)},
    "isAllocatorInitialized": device_module.is_available,
    "emptyCache": device_module.empty_cache,
    "emptyHostCache": lambda: None,
    "getDeviceStats": _stats,
    "resetPeakStats": device_module.reset_peak_memory_stats,
    "resetAccumulatedStats": device_module.reset_accumulated_memory_stats,
    "getMemoryInfo": device_module.mem_get_info,
}
"""The functions of the core, without their common prefix, and their implementations."""

RECENT = frozenset({"emptyHostCache"})
"""Those that are new in torch 2.13."""
