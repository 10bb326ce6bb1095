"""Division of devices into islands, and of a batch among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from onebox.cost import DeviceGroups
from onebox.engine.workload.batch import Batch
from onebox.errors import UsageError
from onebox.plan import apportion
from onebox.pool import DeviceInfo, Pool
from onebox.pool.devices import distinct_hosts

Islands = Sequence[Sequence[int]] | Literal["auto"]
"""Devices of each island, or ``auto`` for the groups of near devices that the links show."""

_ALLOWED = "allowed are 'auto', and the devices of each island, such as [[0, 1], [2, 3]]"


def chosen_islands(pool: Pool, islands: Islands) -> DeviceGroups:
    """Return the devices of each island.

    Args:
        pool: The pool.
        islands: The user's choice; ``auto`` for the groups of near devices by links that are probed now.

    Raises:
        UsageError: A device is in no island or in two, or all are near each other.
    """
    if islands == "auto":
        hosts = tuple(distinct_hosts(pool.devices).values())
        return near_islands(pool.profile(probe=range(len(pool))).groups, hosts)
    return given_islands(islands, len(pool))


def given_islands(islands: Any, count: int) -> DeviceGroups:
    """Return the devices of each island as given.

    Args:
        islands: A list of devices for each island.
        count: Number of devices in the pool.

    Raises:
        UsageError: It is no such list, or a device is in no island, in two, or not in the pool.

    Example:
        >>> given_islands([[0, 1], [2]], 3)
        ((0, 1), (2,))
    """
    try:
        found = tuple(tuple(int(device) for device in island) for island in islands)
    except (TypeError, ValueError):
        raise UsageError(f"islands={islands!r}: {_ALLOWED}") from None
    if isinstance(islands, str) or not found or not all(found):
        raise UsageError(f"islands={islands!r}: {_ALLOWED}")
    every = [device for island in found for device in island]
    for device in every:
        if not 0 <= device < count:
            raise UsageError(f"islands={islands!r}: there is no device {device}; the pool has {count}, numbered from 0")
        if every.count(device) > 1:
            raise UsageError(f"islands={islands!r}: device {device} is named twice; each belongs to one island")
    missing = sorted(set(range(count)) - set(every))
    if missing:
        raise UsageError(
            f"islands={islands!r}: device {missing[0]} is in no island; name each of the {count} devices of the pool "
            "once, or open the pool without it"
        )
    return found


def near_islands(levels: Sequence[DeviceGroups], hosts: DeviceGroups) -> DeviceGroups:
    """Return the islands that measured links suggest: the coarsest groups of devices near to each other.

    Hosts with one device each are islands: no link within one shows how near those of others are.

    Args:
        levels: The measured groups, the smallest first, as of :func:`onebox.cost.near_groups`.
        hosts: The devices of each host.

    Raises:
        UsageError: All devices are near each other.

    Example:
        >>> near_islands([((0,), (1,), (2, 3)), ((0, 1), (2, 3))], ((0, 1), (2, 3)))
        ((0, 1), (2, 3))
        >>> near_islands([((0, 1),)], ((0,), (1,)))
        ((0,), (1,))
    """
    groups = levels[-1]
    if len(groups) < 2 and len(hosts) == len(groups[0]) > 1:
        return hosts
    if len(groups) < 2:
        raise UsageError(
            f"islands='auto': the {len(groups[0])} devices are all near each other, by their measured links: leave "
            "islands out for exact steps, or name the islands, such as islands=[[0, 1], [2, 3]]"
        )
    return groups


def check_shares(shares: str | Sequence[float], islands: DeviceGroups) -> None:
    """Require one weight for each island, if weights are given.

    Args:
        shares: The islands' shares of a batch, as in :class:`~onebox.Outer`.
        islands: Devices of each island.

    Raises:
        UsageError: There are more or fewer.
    """
    if not isinstance(shares, str) and len(shares) != len(islands):
        raise UsageError(
            f"Outer(shares={list(shares)}): {len(shares)} weights for {len(islands)} islands; one for each is needed"
        )


def are_alike(islands: DeviceGroups, devices: Sequence[DeviceInfo]) -> bool:
    """Return True if islands have as many devices of each kind.

    Args:
        islands: Devices of each island.
        devices: All devices of the pool.
    """
    kinds = [
        Counter((each.name, each.kind, each.threads, each.speed) for each in map(devices.__getitem__, own))
        for own in islands
    ]
    return all(own == kinds[0] for own in kinds)


def island_sizes(samples: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Return the samples of a batch that each island computes.

    Example:
        >>> island_sizes(7, [1.0, 1.0])
        (4, 3)
    """
    return tuple(apportion(samples, weights))


def divided(batch: Batch, weights: Sequence[float]) -> tuple[Batch | None, ...]:
    """Return each island's part of a batch; ``None`` for an island that gets no sample.

    Args:
        batch: The batch; the parts share its memory.
        weights: Share of each island.
    """
    parts: list[Batch | None] = []
    start = 0
    for size in island_sizes(batch.size, weights):
        parts.append(part_of(batch, start, size) if size else None)
        start += size
    return tuple(parts)


def part_of(batch: Batch, start: int, size: int) -> Batch:
    """Return some consecutive samples of a batch, as a batch."""
    samples = None if batch.samples is None else batch.samples[start : start + size]
    return replace(batch, leaves=batch.slice(start, size), size=size, samples=samples)


def island_seed(seed: int, island: int) -> int:
    """Return the seed of the random operators of an island: the run's own for the first one.

    Example:
        >>> island_seed(3, 0), island_seed(3, 2), island_seed(2**63 - 1, 1) == -(2**63)
        (3, 5, True)
    """
    return (seed + island + (1 << 63)) % (1 << 64) - (1 << 63)
