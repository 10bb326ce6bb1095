"""Emulated links: arrival times over slow links. Pure: the time is an argument.

A transfer of S bytes over a link of latency L and bandwidth B begins when earlier ones have been sent, takes S / B to
send, and arrives L later. Reductions and gathers cost as much as on a ring of n workers: 2 (n - 1) steps of S / n bytes
for a sum, half as many for a gather (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
workstations, 2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from onebox.errors import WireError
from onebox.wire.protocol.groups import EmulatedLink


@dataclass(frozen=True)
class LinkSpeed:
    """Slowness of a link.

    Args:
        latency_ns: Additional nanoseconds of every transfer.
        ns_per_byte: Nanoseconds per byte; 0 for no limit.
    """

    latency_ns: float = 0.0
    ns_per_byte: float = 0.0

    @classmethod
    def of(cls, link: EmulatedLink) -> LinkSpeed:
        """Return the speed of a link.

        Raises:
            WireError: The speed is invalid.
        """
        if not (0 <= link.latency_s < math.inf and link.bandwidth_bps > 0):
            raise WireError(f"{link}: a latency is 0 s or more and finite, a bandwidth is positive")
        return cls(1e9 * link.latency_s, 1e9 / link.bandwidth_bps)

    @classmethod
    def slowest(cls, speeds: Sequence[LinkSpeed]) -> LinkSpeed:
        """Return the speed of an operation that uses all of some links."""
        return cls(
            max((speed.latency_ns for speed in speeds), default=0.0),
            max((speed.ns_per_byte for speed in speeds), default=0.0),
        )


@dataclass
class EmulatedLinks:
    """State of each emulated link of a worker, shared by its groups."""

    _speeds: dict[int, LinkSpeed] = field(default_factory=dict)
    _free_ns: dict[int, float] = field(default_factory=dict)

    def lay(self, links: Sequence[EmulatedLink]) -> None:
        """Create links or set their speeds.

        Raises:
            WireError: One of them is invalid.
        """
        self._speeds |= {link.link: LinkSpeed.of(link) for link in links}

    def retime(self, links: Sequence[EmulatedLink]) -> None:
        """Change the speeds of existing links; transfers in flight are not affected.

        Unknown links are ignored: a group formed later sets their speed.

        Raises:
            WireError: One of them is invalid.
        """
        speeds = {link.link: LinkSpeed.of(link) for link in links}
        self._speeds |= {link: speed for link, speed in speeds.items() if link in self._speeds}

    def slowest(self, links: Sequence[int]) -> LinkSpeed:
        """Return the speed of an operation that uses all of some links."""
        return LinkSpeed.slowest([self._speeds[link] for link in links])

    def send(self, link: int, size_bytes: int, now_ns: int) -> int:
        """Send data over a link and return its arrival time."""
        speed = self._speeds[link]
        free_ns = max(now_ns, self._free_ns.get(link, 0.0)) + size_bytes * speed.ns_per_byte
        self._free_ns[link] = free_ns
        return int(free_ns + speed.latency_ns)


@dataclass
class EmulatedRing:
    """Timing of a group's collectives, which run in sequence on a ring."""

    _free_ns: float = 0.0

    def run(self, arrived_ns: Sequence[int], speeds: Sequence[LinkSpeed], passes: int, size_bytes: int) -> int:
        """Run a collective and return its end time.

        Args:
            arrived_ns: Time at which each rank began it.
            speeds: For each rank, the slowest of its links to others. The slowest of all sets the pace: no order of the
                ranks that avoids it is searched for.
            passes: Number of times that each byte goes round: 2 for a sum, 1 for a gather.
            size_bytes: Bytes of its result.
        """
        ranks, pace = len(speeds), LinkSpeed.slowest(speeds)
        cost = passes * (ranks - 1) * (size_bytes / ranks * pace.ns_per_byte + pace.latency_ns)
        self._free_ns = max(self._free_ns, *arrived_ns) + cost
        return int(self._free_ns)
