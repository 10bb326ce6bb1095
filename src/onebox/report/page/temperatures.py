"""Temperatures of this machine's devices, of those that have a sensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import psutil
import torch

_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
"""Names of processors' sensors in Linux."""


def device_temperatures(devices: Collection[str]) -> dict[str, float]:
    """Return the temperatures of devices of this machine in degrees Celsius, of those that have a sensor.

    Args:
        devices: Their names: ``cpu`` or ``cuda:k``.
    """
    found: dict[str, float] = {}
    for device in devices:
        value = _processor_temperature() if device == "cpu" else _gpu_temperature(device)
        if value is not None:
            found[device] = round(value, 1)
    return found


def _processor_temperature() -> float | None:
    read: Callable[[], Mapping[str, Sequence[Any]]] = getattr(psutil, "sensors_temperatures", dict)
    sensors = read()
    for name in _SENSORS:
        if sensors.get(name):
            return max(float(each.current) for each in sensors[name])
    return None


def _gpu_temperature(device: str) -> float | None:
    if not device.startswith("cuda"):
        return None
    try:
        return float(torch.cuda.temperature(torch.device(device)))
    except Exception:  # it needs a library of the driver's, which raises errors of its own
        return None
