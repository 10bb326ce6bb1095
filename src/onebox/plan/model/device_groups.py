"""Proximity and interchangeability of a problem's devices. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from onebox.cost import DeviceGroups, near_groups
from onebox.plan.model.problem import DeviceSpec, Problem
from onebox.plan.model.work import Links

_LIKE = 0.05
"""Relative difference up to which speeds and memories count as equal."""

_UNLIKE = 1.5
"""Ratio of bandwidths from which links count as different; measurements scatter by less."""


def near(problem: Problem) -> tuple[DeviceGroups, ...]:
    """Return the groups of a problem's devices that are near to each other: those of a host, and of a switch.

    Args:
        problem: The problem. Groups follow from its links, not from the names of hosts, since links may be emulated
            within one.
    """
    numbers = sorted(device.number for device in problem.devices)

    def among(table: Mapping[int, Mapping[int, float]]) -> dict[int, dict[int, float]]:
        return {a: {b: bps for b, bps in table.get(a, {}).items() if b != a and b in problem.device} for a in numbers}

    return near_groups(among(problem.links.latency_s), among(problem.links.bandwidth_bps))


def kind(device: DeviceSpec) -> tuple[object, ...]:
    """Return a key of a device that is equal for interchangeable ones, links aside."""
    host = device.host if device.processor else ""  # the host whose cores it shares
    return device.type, _rounded(device.speed), _rounded(device.capacity_bytes or 0), host


def _rounded(value: float) -> int | None:
    return round(math.log(value) / _LIKE) if value > 0 else None


LinkWay = tuple[float, float]
"""Bytes per second there and back."""


def ways_between(links: Links, classes: Sequence[Sequence[tuple[int, ...]]]) -> list[list[set[LinkWay]]]:
    """Return for each pair of classes the bandwidths between a device of one and a device of the other.

    Args:
        links: The links.
        classes: Units, as for :class:`~onebox.plan.search.partition.PartitionLimits`.
    """
    bps = links.bandwidth_bps

    def ways(one: Sequence[tuple[int, ...]], other: Sequence[tuple[int, ...]]) -> set[LinkWay]:
        pairs = ((a, b) for unit in one for peer in other if unit != peer for a in unit for b in peer)
        return {(bps[a][b], bps[b][a]) for a, b in pairs}

    return [[ways(one, other) for other in classes] for one in classes]


def numbered_matters(links: Links, classes: Sequence[Sequence[tuple[int, ...]]]) -> bool:
    """Return whether links between two classes differ much in bandwidth, so that the placement of units matters."""
    for found in (found for row in ways_between(links, classes) for found in row if found):
        for side in range(2):
            carried = [way[side] for way in found]
            if max(carried) > _UNLIKE * min(carried):
                return True
    return False
