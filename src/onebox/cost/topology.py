"""Topology of a pool: groups of devices that are near to each other, hosts and switches, from link speeds alone. Pure.

Names do not show the wiring of devices, link times do. Devices are clustered by single linkage (Gower and Ross, Minimum
spanning trees and single linkage cluster analysis, 1969), because disturbances of a measurement only make a link seem
longer; and the tree is cut only at clear gaps: where clusters are joined over a distance that is a multiple of all
those before, and each device is nearer to its own cluster than to any other.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

DeviceGroups = tuple[tuple[int, ...], ...]
"""A partition of devices: each in one group."""

LARGE_BYTES = 8 << 20
"""Bytes of the large message by which links are compared."""

_FLOOR_S = 100e-6
"""Seconds added to every time: smaller differences come from the scheduler of an operating system, not from a wire."""

APART = 2.0
"""Minimum ratio of the distance between groups to that within groups."""

_NEARER = 1.5
"""Minimum ratio of a device's distance from any other group to that from its own."""

_MOST_LEVELS = 2
"""Number of levels: hosts, and their switches."""

_FAR = 100.0
"""Distance of devices that cannot send to each other directly, as a multiple of the largest distance."""


def near_groups(
    latency_s: Mapping[int, Mapping[int, float]], bandwidth_bps: Mapping[int, Mapping[int, float]]
) -> tuple[DeviceGroups, ...]:
    """Return groups of devices that are nearer to each other than to others, the smallest groups first.

    Args:
        latency_s: ``latency_s[source][target]``, seconds; no entry for unconnected devices. Each device is a source.
        bandwidth_bps: ``bandwidth_bps[source][target]``, bytes per second, likewise.

    Returns:
        One or two partitions; the groups of the second are made of those of the first. Without a clearly separate
        group, one partition with one group. Devices that cannot send to each other are never in one group.
    """
    known = _distances(latency_s, bandwidth_bps)
    parts = [_levels(part, known) for part in _reachable(sorted(latency_s), known)]
    levels = (
        tuple(itertools.chain.from_iterable(part[min(level, len(part) - 1)] for part in parts))
        for level in range(max(map(len, parts)))
    )
    return tuple(dict.fromkeys(levels))


def shortest_tree(
    latency_s: Mapping[int, Mapping[int, float]], bandwidth_bps: Mapping[int, Mapping[int, float]]
) -> list[tuple[int, int]]:
    """Return the shortest links that connect all devices: a minimum spanning tree, which determines the groups.

    Another measurement of these links corrects a group that one disturbed measurement has made or hidden.

    Args:
        latency_s: As in :func:`near_groups`.
        bandwidth_bps: Likewise.

    Returns:
        Pairs of devices, the lower number first: one link fewer than there are devices, where all are connected.
    """
    return [(a, b) for _, a, b, _ in _spanning(latency_s, _distances(latency_s, bandwidth_bps))]


def _spanning(
    devices: Iterable[int], apart: Mapping[tuple[int, int], float]
) -> Iterator[tuple[float, int, int, Mapping[int, int]]]:
    """Yield the shortest links that join devices, from the shortest on (Kruskal, 1956, doi:10.2307/2033241).

    Args:
        devices: The devices.
        apart: The lengths of links between two of them.

    Yields:
        The length, the two devices, and for each device the representative of its component without this link.
    """
    home = {device: device for device in devices}
    for length, a, b in sorted((length, a, b) for (a, b), length in apart.items()):
        if home[a] != home[b]:
            yield length, a, b, home
            home = _joined(home, a, b)


def _joined(home: Mapping[int, int], a: int, b: int) -> dict[int, int]:
    """Return the representatives after the groups of two devices are joined."""
    return {device: home[a] if place == home[b] else place for device, place in home.items()}


def _distances(
    latency_s: Mapping[int, Mapping[int, float]], bandwidth_bps: Mapping[int, Mapping[int, float]]
) -> dict[tuple[int, int], float]:
    """Return the distance, both ways, of each two devices that can send to each other, the lower number first."""
    return {
        (a, b): math.sqrt(distance(latency_s, bandwidth_bps, a, b) * distance(latency_s, bandwidth_bps, b, a))
        for a, b in itertools.combinations(sorted(latency_s), 2)
        if b in latency_s[a] and a in latency_s[b]
    }


def distance(
    latency_s: Mapping[int, Mapping[int, float]],
    bandwidth_bps: Mapping[int, Mapping[int, float]],
    source: int,
    target: int,
) -> float:
    """Return the distance from a device to another: the geometric mean of the times of an empty and of a large message.

    So twice the latency counts as much as half the bandwidth.
    """
    empty_s = latency_s[source][target] + _FLOOR_S
    return math.sqrt(empty_s * (empty_s + LARGE_BYTES / bandwidth_bps[source][target]))


def _reachable(devices: Sequence[int], known: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the connected components of the devices."""
    home = {device: device for device in devices}
    for a, b in known:
        if home[a] != home[b]:
            home = _joined(home, a, b)
    return [[device for device in devices if home[device] == place] for place in dict.fromkeys(home.values())]


def _levels(devices: Sequence[int], known: Mapping[tuple[int, int], float]) -> list[DeviceGroups]:
    """Return the partitions of some devices at the clearest cuts, the one with the smallest groups first.

    Args:
        devices: The devices, in order.
        known: Distances between two, the lower number first.
    """
    if len(devices) == 1:
        return [(tuple(devices),)]
    far = _FAR * max(known.values())
    apart = {pair: known.get(pair, far) for pair in itertools.combinations(devices, 2)}
    found: list[tuple[float, DeviceGroups]] = []
    for before, after, groups in joins(devices, apart):
        if after >= APART * before and _is_plain(groups, apart, before):
            found.append((after / before, groups))
    plainest = sorted(found, key=lambda level: level[0], reverse=True)[:_MOST_LEVELS]
    return sorted((groups for _, groups in plainest), key=len, reverse=True) or [(tuple(devices),)]


def joins(
    devices: Sequence[int], apart: Mapping[tuple[int, int], float]
) -> Iterator[tuple[float, float, DeviceGroups]]:
    """Yield the steps of single linkage: each time the last distance, the next one, and the groups in between.

    Args:
        devices: The devices, in order.
        apart: The distance between each two, in the order of the devices.
    """
    before = None
    for after, _, _, home in _spanning(devices, apart):
        if before is not None and after > before:
            places = dict.fromkeys(home[device] for device in devices)
            groups = (tuple(device for device in devices if home[device] == place) for place in places)
            yield before, after, tuple(groups)
        before = after


def _is_plain(groups: DeviceGroups, apart: Mapping[tuple[int, int], float], within: float) -> bool:
    """Return whether each device is nearer to its own group than to each other group.

    Args:
        groups: The groups.
        apart: Distances between two devices, the lower number first.
        within: Distance that is used within a group of one.
    """

    def between(device: int, others: Sequence[int]) -> float:
        distances = [apart[min(device, b), max(device, b)] for b in others if b != device]
        return statistics.median(distances) if distances else within

    return all(
        between(device, other) >= _NEARER * between(device, group)
        for group, other in itertools.permutations(groups, 2)
        for device in group
    )
