"""Hierarchical reductions: groups that reduce within each host first, where links are known to be slower between hosts
or nothing is known of them.

Nothing is measured for this. Emulated links have given speeds; those of a pool over several hosts are known if the pool
has been measured before, as ``make_plan`` does. The decision depends on nothing else but the hosts of the devices, so
that a run is reproducible bit by bit.

A group that never reduces in one ring is not formed: in a ring any rank may be connected to any other, so that forming
it takes connections between all pairs. Those of its parts, most of which share memory, and of one device for each part
suffice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from onebox.cost import (
    AllReduceAlgorithm,
    DeviceGroups,
    PoolProfile,
    TransferTime,
    all_reduce_algorithms,
    choose_all_reduce,
    load,
)
from onebox.engine.partition.optimizer_sharding import Members
from onebox.plan import Links
from onebox.pool import DeviceInfo
from onebox.pool.network.emulated import LinkMap
from onebox.pool.network.profile import profile_key

_MEMORY_LATENCY_S, _MEMORY_BPS = 50e-6, 4e9
"""Speed of shared memory; emulated links are far slower (``benchmarks/transfers.py``)."""

_PROBES = tuple(1 << power for power in range(10, 31, 2))
"""Bucket sizes in bytes; a way is considered if it is the fastest for at least one of them."""

_UNKNOWN = TransferTime(0.0, 0.0)
"""Time of the only way of a group whose links are not known: it is compared with no other."""

Matrix = dict[int, dict[int, float]]


def find_reductions(
    devices: Sequence[DeviceInfo],
    links: LinkMap,
    replica_groups: Iterable[Members],
    *,
    plain_links: bool = False,
) -> dict[Members, tuple[AllReduceAlgorithm, ...]]:
    """Return how groups may sum up: in one ring, or in parts first; only those that may do other than in one ring.

    The ring comes first, and is left out where another way is better for sums of any size.

    Groups whose links are not known sum within each host first, but for those of GPUs alone that NCCL may connect,
    which it does not encrypt.

    Args:
        devices: All devices of the pool.
        links: Its emulated links.
        replica_groups: The groups.
        plain_links: Whether connections between its hosts are not encrypted.
    """
    several = [
        members for members in dict.fromkeys(replica_groups) if len(members) > 2 and _apart(devices, links, members)
    ]
    known = _matrices(devices, links, plain_links) if several else None
    if known is None:
        by_hosts = ((members, _by_hosts(devices, members, plain_links)) for members in several)
        return {members: (way,) for members, way in by_hosts if way is not None}
    found = {}
    for members in several:
        ways = all_reduce_algorithms(*known, members)
        best = [choose_all_reduce(ways, size_bytes) for size_bytes in _PROBES]
        used = tuple(way for way in ways if way in best)
        if used != ways[:1]:
            found[members] = used
    return found


def known_links(devices: Sequence[DeviceInfo], links: LinkMap, *, plain_links: bool = False) -> Links | None:
    """Return the known speeds of the links between a pool's devices; ``None`` if unknown."""
    known = _matrices(devices, links, plain_links)
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


def _by_hosts(devices: Sequence[DeviceInfo], members: Members, plain_links: bool) -> AllReduceAlgorithm | None:
    """Return the way in which each host sums first; ``None`` if each has one member only, or NCCL may connect all."""
    parts: dict[str, Members] = {}
    for member in members:
        host = devices[member].host
        parts[host] = (*parts.get(host, ()), member)
    if len(parts) == len(members) or (plain_links and all(devices[member].kind == "cuda" for member in members)):
        return None
    return AllReduceAlgorithm(tuple(parts.values()), _UNKNOWN)


def _apart(devices: Sequence[DeviceInfo], links: LinkMap, members: Members) -> bool:
    """Return whether members are on different hosts, or emulated as such."""
    if len({devices[member].host for member in members}) > 1:
        return True
    own = frozenset(members)
    return any(source in own and target in own for source, target in links)


def _matrices(
    devices: Sequence[DeviceInfo], links: LinkMap, plain_links: bool
) -> tuple[Mapping[int, Mapping[int, float]], Mapping[int, Mapping[int, float]]] | None:
    """Return latencies and bandwidths between all devices; ``None`` if unknown."""
    every = [device.number for device in devices]
    if not links:
        known = load(profile_key(devices, links, plain_links=plain_links), PoolProfile)
        return None if known is None else (known.latency_s, known.bandwidth_bps)
    latency_s: Matrix = {a: dict.fromkeys(every, _MEMORY_LATENCY_S) for a in every}
    bandwidth_bps: Matrix = {a: dict.fromkeys(every, _MEMORY_BPS) for a in every}
    for (source, target), link in links.items():
        latency_s[source][target] += link.latency_s
        bandwidth_bps[source][target] = 1 / (1 / _MEMORY_BPS + 1 / link.bandwidth_bps)
    return latency_s, bandwidth_bps
