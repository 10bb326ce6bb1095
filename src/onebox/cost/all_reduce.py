"""Collective sums over the devices of a group: all in one ring, or in each part of the group first. Pure.

In a ring of `n` every link carries `2 (n - 1) / n` of the bytes in `2 (n - 1)` steps, and the slowest one sets the pace
(Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009). Where the slow links
are those between `h` hosts, it pays to reduce to one device of each host, sum these in a ring of `h`, and broadcast the
total within hosts: slow links carry `2 (h - 1) / h` of the bytes in `2 (h - 1)` steps, quick ones all of them twice
more, there and back. A sum for one of `n`, like a broadcast from one of them, takes as long as a pipelined chain:
`S / bandwidth + (n - 1) latency` (Chan, Heimlich, Purkayastha and van de Geijn, Collective communication: theory,
practice, and experience, 2007).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from onebox.cost.topology import APART, DeviceGroups, distance, joins

_WORTH = 0.95
"""Maximum part of one ring's time up to which a way with more messages is chosen."""

LinkMatrix = Mapping[int, Mapping[int, float]]
"""``matrix[source][target]``."""


class TransferTime(NamedTuple):
    """Seconds as a linear function of bytes.

    Args:
        fixed_s: Fixed seconds.
        byte_s: Seconds per byte.
    """

    fixed_s: float
    byte_s: float

    def at(self, size_bytes: float) -> float:
        """Return the seconds for some bytes."""
        return self.fixed_s + self.byte_s * size_bytes


class AllReduceAlgorithm(NamedTuple):
    """A way to sum over a group.

    Args:
        parts: Groups that sum first; a single part is one ring. The first device of each part receives its sum, takes
            part in the ring over the parts, and broadcasts the total.
        time: Its time.
    """

    parts: DeviceGroups
    time: TransferTime


def all_reduce_algorithms(
    latency_s: LinkMatrix, bandwidth_bps: LinkMatrix, members: Sequence[int]
) -> tuple[AllReduceAlgorithm, ...]:
    """Return the ways in which a group may sum: one ring first, then by the clearly separate parts of the group.

    Args:
        latency_s: ``latency_s[source][target]``, seconds.
        bandwidth_bps: ``bandwidth_bps[source][target]``, bytes per second.
        members: The devices of the group, each of which can send to each other.
    """
    whole = tuple(members)
    ring = AllReduceAlgorithm((whole,), _ring(latency_s, bandwidth_bps, whole))
    return (
        ring,
        *(_by_parts(latency_s, bandwidth_bps, parts) for parts in _partitions(latency_s, bandwidth_bps, whole)),
    )


def choose_all_reduce(ways: Sequence[AllReduceAlgorithm], size_bytes: int) -> AllReduceAlgorithm:
    """Return the quickest way: the first unless another is clearly quicker.

    Args:
        ways: From :func:`all_reduce_algorithms`, one ring first; or some of them.
        size_bytes: Bytes that each device has.
    """
    first = ways[0]
    best = min(ways, key=lambda way: way.time.at(size_bytes))
    return best if best.time.at(size_bytes) <= _WORTH * first.time.at(size_bytes) else first


def _by_parts(latency_s: LinkMatrix, bandwidth_bps: LinkMatrix, parts: DeviceGroups) -> AllReduceAlgorithm:
    across = _ring(latency_s, bandwidth_bps, [part[0] for part in parts])
    chains = [_chain(latency_s, bandwidth_bps, part) for part in parts]
    # Parts work at the same time; the slowest to begin and the slowest to carry may be two different ones, so this is
    # an upper bound.
    fixed_s, byte_s = max(chain.fixed_s for chain in chains), max(chain.byte_s for chain in chains)
    return AllReduceAlgorithm(parts, TransferTime(across.fixed_s + 2 * fixed_s, across.byte_s + 2 * byte_s))


def _ring(latency_s: LinkMatrix, bandwidth_bps: LinkMatrix, members: Sequence[int]) -> TransferTime:
    """Return the time of a sum in a ring, at the pace of the slowest link between two of them."""
    count = len(members)
    if count < 2:
        return TransferTime(0.0, 0.0)
    steps = 2 * (count - 1)
    return TransferTime(steps * _worst(latency_s, members, max), steps / count / _worst(bandwidth_bps, members, min))


def _chain(latency_s: LinkMatrix, bandwidth_bps: LinkMatrix, members: Sequence[int]) -> TransferTime:
    """Return the time of a reduction to one of some devices, or of a broadcast from one."""
    if len(members) < 2:
        return TransferTime(0.0, 0.0)
    return TransferTime((len(members) - 1) * _worst(latency_s, members, max), 1 / _worst(bandwidth_bps, members, min))


def _worst(matrix: LinkMatrix, members: Sequence[int], which: Callable[[list[float]], float]) -> float:
    return which([matrix[a][b] for a, b in itertools.permutations(members, 2)])


def _partitions(latency_s: LinkMatrix, bandwidth_bps: LinkMatrix, members: tuple[int, ...]) -> list[DeviceGroups]:
    """Return the partitions where links grow clearly longer, by single linkage as in :mod:`onebox.cost.topology`."""
    apart = {
        (a, b): max(distance(latency_s, bandwidth_bps, a, b), distance(latency_s, bandwidth_bps, b, a))
        for a, b in itertools.combinations(members, 2)
    }
    return [groups for before, after, groups in joins(members, apart) if after >= APART * before]
