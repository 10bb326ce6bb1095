"""Proximity and interchangeability of a problem's devices. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from onebox.cost import DeviceGroups, near_groups
from onebox.plan.model.problem import DeviceSpec, Problem

_LIKE = 0.05
"""Relative difference up to which speeds and memories count as equal."""


def near(problem: Problem) -> tuple[DeviceGroups, ...]:
    """Return the groups of a problem's devices that are near to each other: those of a host, and of a switch.

    Args:
        problem: The problem. Groups follow from its links, not from the names of hosts, since links may be emulated
            within one.
    """
    numbers = sorted(device.number for device in problem.devices)

    def among(table: Mapping[int, Mapping[int, float]]) -> dict[int, dict[int, float]]:
        return {a: {b: bps for b, bps in table.get(a, {}).items() if b != a and b in numbers} for a in numbers}

    return near_groups(among(problem.links.latency_s), among(problem.links.bandwidth_bps))


def kind(device: DeviceSpec) -> tuple[object, ...]:
    """Return a key of a device that is equal for interchangeable ones, links aside."""
    host = device.host if device.processor else ""  # the host whose cores it shares
    return device.type, _rounded(device.speed), _rounded(device.capacity_bytes or 0), host


def _rounded(value: float) -> int | None:
    return round(math.log(value) / _LIKE) if value > 0 else None
