"""Where a problem's devices are: which are near to each other, and which may take each other's place. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from onebox.cost import DeviceGroups, near_groups
from onebox.plan.model.problem import DeviceSpec, Problem

_LIKE = 0.05
"""Speeds and memories that differ by less than about this part are those of like devices."""


def near(problem: Problem) -> tuple[DeviceGroups, ...]:
    """Return the groups of a problem's devices that are near to each other: hosts, and the switches that they hang on.

    Args:
        problem: Its links tell; names of hosts do not, since links may be emulated within one.
    """
    numbers = sorted(device.number for device in problem.devices)

    def among(table: Mapping[int, Mapping[int, float]]) -> dict[int, dict[int, float]]:
        return {a: {b: bps for b, bps in table.get(a, {}).items() if b != a and b in numbers} for a in numbers}

    return near_groups(among(problem.links.latency_s), among(problem.links.bandwidth_bps))


def kind(device: DeviceSpec) -> tuple[object, ...]:
    """Return what devices have in common that may take each other's place, links aside."""
    host = device.host if device.processor else ""  # whose cores it shares
    return device.type, _rounded(device.speed), _rounded(device.capacity_bytes or 0), host


def _rounded(value: float) -> int | None:
    return round(math.log(value) / _LIKE) if value > 0 else None
