"""Which devices are near to each other: hosts and switches, seen in the speeds of the links alone. Pure.

A name does not tell how devices are wired, their times do. Devices are clustered by average linkage (Sokal and
Michener, A statistical method for evaluating systematic relationships, 1958), and the tree is cut only where it is
plain: where clusters are joined over a distance that is a multiple of all those before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

Groups = tuple[tuple[int, ...], ...]
"""A partition of devices: each in one group."""

LARGE_BYTES = 8 << 20
"""The large message by which links are compared."""

_FLOOR_S = 100e-6
"""Added to every time: what differs by less is the scheduler of an operating system, not a wire."""

_APART = 2.0
"""How many times the distance within groups the one between groups is, at least."""

_NEARER = 1.5
"""How many times the distance of a device from its own group the one from any other is, at least."""

_MOST_LEVELS = 2
"""Hosts, and the switches that they hang on."""

_FAR = 100.0
"""How many times the largest distance it is to where nothing can be sent."""


def near_groups(
    latency_s: Mapping[int, Mapping[int, float]], bandwidth_bps: Mapping[int, Mapping[int, float]]
) -> tuple[Groups, ...]:
    """Return groups of devices that are nearer to each other than to others, the smallest groups first.

    Args:
        latency_s: ``latency_s[source][target]``, seconds; no entry where nothing can be sent. Each device is a source.
        bandwidth_bps: ``bandwidth_bps[source][target]``, bytes per second, likewise.

    Returns:
        One or two partitions; the groups of the second are made of those of the first. Where no group is well apart
        from the others, one partition with one group.
    """
    devices = sorted(latency_s)
    known = {
        (a, b): math.sqrt(distance(latency_s, bandwidth_bps, a, b) * distance(latency_s, bandwidth_bps, b, a))
        for number, a in enumerate(devices)
        for b in devices[number + 1 :]
        if b in latency_s[a] and a in latency_s[b]
    }
    if not known:
        return (tuple((device,) for device in devices),)
    far = _FAR * max(known.values())
    pairs = [known.get((a, b), far) for number, a in enumerate(devices) for b in devices[number + 1 :]]
    levels = [
        tuple(tuple(devices[index] for index in group) for group in groups) for groups in _levels(pairs, len(devices))
    ]
    return tuple(levels) or ((tuple(devices),),)


def distance(
    latency_s: Mapping[int, Mapping[int, float]],
    bandwidth_bps: Mapping[int, Mapping[int, float]],
    source: int,
    target: int,
) -> float:
    """Return how far a device is from another: the geometric mean of the times of an empty and of a large message.

    So a link is as far off with twice the latency as with half the bandwidth.
    """
    empty_s = latency_s[source][target] + _FLOOR_S
    return math.sqrt(empty_s * (empty_s + LARGE_BYTES / bandwidth_bps[source][target]))


def _levels(pairs: list[float], count: int) -> list[list[list[int]]]:
    """Return the partitions at the plainest cuts, the one with the smallest groups first.

    Args:
        pairs: Distances between 0 and 1, 0 and 2, …, 1 and 2, ….
        count: Devices.
    """
    from scipy.cluster.hierarchy import fcluster, linkage  # takes longer to import than workers have to start
    from scipy.spatial.distance import squareform

    tree = linkage(pairs, method="average")
    apart = squareform(pairs).tolist()
    heights = [float(height) for height in tree[:, 2]]
    found = []
    for before, after in itertools.pairwise(heights):
        if after < _APART * before:
            continue
        labels = fcluster(tree, math.sqrt(before * after), criterion="distance")
        groups = [[index for index in range(count) if labels[index] == label] for label in dict.fromkeys(labels)]
        if _is_plain(groups, apart, before):
            found.append((after / before, groups))
    plainest = sorted(found, key=lambda level: level[0], reverse=True)[:_MOST_LEVELS]
    return sorted((groups for _, groups in plainest), key=len, reverse=True)


def _is_plain(groups: list[list[int]], apart: list[list[float]], within: float) -> bool:
    """Tell whether each device is nearer to its own group than to each other group.

    Args:
        groups: The groups.
        apart: Distances between all devices.
        within: What stands for the distance within a group of one.
    """
    for group in groups:
        for device in group:
            own = [apart[device][other] for other in group if other != device] or [within]
            nearest = min(_mean([apart[device][b] for b in other]) for other in groups if other is not group)
            if nearest < _NEARER * _mean(own):
                return False
    return True


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
