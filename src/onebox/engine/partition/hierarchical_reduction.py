"""Hierarchical reductions: groups that reduce within each host first, as far as link speeds are known.

Nothing is measured for this. Emulated links have given speeds; those of a pool over several hosts are known if the pool
has been measured before, as ``make_plan`` does. The decision depends on nothing else, so that a run is reproducible bit
by bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from onebox.cost import AllReduceAlgorithm, DeviceGroups, PoolProfile, all_reduce_algorithms, choose_all_reduce, load
from onebox.engine.partition.optimizer_sharding import Members
from onebox.plan import Links
from onebox.pool import DeviceInfo
from onebox.pool.network.emulated import LinkMap
from onebox.pool.network.profile import profile_key

_MEMORY_LATENCY_S, _MEMORY_BPS = 50e-6, 4e9
"""Speed of shared memory; emulated links are far slower (``benchmarks/transfers.py``)."""

_PROBES = tuple(1 << power for power in range(10, 31, 2))
"""Bucket sizes in bytes; a group is considered if at least one of them is reduced faster hierarchically than in a
ring."""

Matrix = dict[int, dict[int, float]]


def find_reductions(
    devices: Sequence[DeviceInfo], links: LinkMap, replica_groups: Iterable[Members]
) -> dict[Members, tuple[AllReduceAlgorithm, ...]]:
    """Return how groups may sum up: in one ring, or in parts first; only those that may do other than in one ring.

    Args:
        devices: All devices of the pool.
        links: Its emulated links.
        replica_groups: The groups.
    """
    several = [
        members for members in dict.fromkeys(replica_groups) if len(members) > 2 and _apart(devices, links, members)
    ]
    known = _matrices(devices, links) if several else None
    if known is None:
        return {}
    found = {}
    for members in several:
        ways = all_reduce_algorithms(*known, members)
        best = [choose_all_reduce(ways, size_bytes) for size_bytes in _PROBES]
        if used := [way for way in ways[1:] if way in best]:
            found[members] = (ways[0], *used)
    return found


def known_links(devices: Sequence[DeviceInfo], links: LinkMap) -> Links | None:
    """Return the known speeds of the links between a pool's devices; ``None`` if unknown."""
    known = _matrices(devices, links)
    return None if known is None else Links(latency_s=known[0], bandwidth_bps=known[1])


def subgroups(ways: Iterable[AllReduceAlgorithm]) -> list[Members]:
    """Return the groups that hierarchical reductions need: parts, and the leaders of all parts."""
    found: list[Members] = []
    for way in ways:
        if len(way.parts) > 1:
            found += [*way.parts, group_leaders(way.parts)]
    return [members for members in dict.fromkeys(found) if len(members) > 1]


def group_leaders(parts: DeviceGroups) -> Members:
    """Return the leaders of a group's parts."""
    return tuple(part[0] for part in parts)


def _apart(devices: Sequence[DeviceInfo], links: LinkMap, members: Members) -> bool:
    """Return whether members are on different hosts, or emulated as such."""
    linked = any(pair in links for pair in itertools.permutations(members, 2))
    return linked or len({devices[member].host for member in members}) > 1


def _matrices(
    devices: Sequence[DeviceInfo], links: LinkMap
) -> tuple[Mapping[int, Mapping[int, float]], Mapping[int, Mapping[int, float]]] | None:
    """Return latencies and bandwidths between all devices; ``None`` if unknown."""
    every = [device.number for device in devices]
    if not links:
        known = load(profile_key(devices, links), PoolProfile)
        return None if known is None else (known.latency_s, known.bandwidth_bps)
    latency_s: Matrix = {a: dict.fromkeys(every, _MEMORY_LATENCY_S) for a in every}
    bandwidth_bps: Matrix = {a: dict.fromkeys(every, _MEMORY_BPS) for a in every}
    for (source, target), link in links.items():
        latency_s[source][target] += link.latency_s
        bandwidth_bps[source][target] = 1 / (1 / _MEMORY_BPS + 1 / link.bandwidth_bps)
    return latency_s, bandwidth_bps
