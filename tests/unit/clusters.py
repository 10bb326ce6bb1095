"""Clusters for tests: what would be measured between their devices. Numbers are dealt out across the hosts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import NamedTuple

INSIDE = (50e-6, 8e9)
"""Latency and bytes a second within a host: PCIe."""

TEN_GBIT = (100e-6, 1.1e9)
GBIT = (200e-6, 115e6)
WIFI = (3e-3, 25e6)
BAD = (1e-3, 40e6)

Link = tuple[float, float]
Matrix = dict[int, dict[int, float]]


class Cluster(NamedTuple):
    """Devices and what is between them.

    Args:
        hosts: The host of each device.
        kinds: The type of each device.
        link: Latency and bandwidth from one device to another.
    """

    hosts: tuple[int, ...]
    kinds: tuple[str, ...]
    link: Callable[[int, int], Link]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The devices of each host."""
        found = [tuple(n for n, host in enumerate(self.hosts) if host == one) for one in dict.fromkeys(self.hosts)]
        return sorted(found)

    def matrix(self, *, noise: float = 0.0, seed: int = 0) -> tuple[Matrix, Matrix]:
        """Return latencies and bandwidths, each up to so much worse than it should be."""
        draw = random.Random(seed)
        latency: Matrix = {number: {} for number in range(len(self.hosts))}
        bandwidth: Matrix = {number: {} for number in range(len(self.hosts))}
        for a, b in permutations(range(len(self.hosts)), 2):
            seconds, bps = self.link(a, b)
            latency[a][b] = seconds * (1 + noise * draw.random())
            bandwidth[a][b] = bps / (1 + noise * draw.random())
        return latency, bandwidth


def _between(hosts: Sequence[int], across: Callable[[int, int], Link]) -> Callable[[int, int], Link]:
    return lambda a, b: INSIDE if hosts[a] == hosts[b] else across(hosts[a], hosts[b])


def two_hosts(each: int = 4) -> Cluster:
    """Return two hosts with some devices each, and Gigabit Ethernet between them."""
    hosts = tuple(number % 2 for number in range(2 * each))
    return Cluster(hosts, ("quick",) * len(hosts), _between(hosts, lambda one, other: GBIT))


def slow_uplink(hosts: int = 4, each: int = 4) -> Cluster:
    """Return hosts with some devices each, on a quick switch, but the last one, whose uplink is slow."""
    of = tuple(number % hosts for number in range(hosts * each))
    return Cluster(
        of,
        ("quick",) * len(of),
        _between(of, lambda one, other: GBIT if hosts - 1 in (one, other) else TEN_GBIT),
    )


def bad_ring(count: int = 8) -> Cluster:
    """Return devices in a ring, the link behind the first of which is bad; what is not wired goes the shorter way."""

    def link(a: int, b: int) -> Link:
        ahead = (b - a) % count
        hops = [(a + hop) % count for hop in range(ahead)]
        if 2 * ahead > count:
            hops = [(b + hop) % count for hop in range(count - ahead)]
        each = [BAD if place == 0 else TEN_GBIT for place in hops]
        return sum(one[0] for one in each), min(one[1] for one in each)

    return Cluster((0,) * count, ("quick",) * count, link)


def laptop_and_desktops() -> Cluster:
    """Return a slow laptop on a wireless network beside two desktops with two devices each."""
    hosts = (2, 0, 1, 0, 1)
    kinds = ("slow", "quick", "half", "quick", "half")
    return Cluster(hosts, kinds, _between(hosts, lambda one, other: WIFI if 2 in (one, other) else GBIT))


CLUSTERS = {
    "2 hosts x 4": two_hosts(),
    "4 hosts x 4, one slow uplink": slow_uplink(),
    "ring of 8, one bad link": bad_ring(),
    "laptop beside two desktops": laptop_and_desktops(),
}
