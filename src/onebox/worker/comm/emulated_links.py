"""Emulated links: when what is sent across a slow wire would arrive. Pure: the time is an argument.

A transfer of S bytes over a link of latency L and bandwidth B begins to leave when those before it have left, takes
S / B to leave, and arrives L later. Sums and gathers cost what they cost on a ring of n workers: 2 (n - 1)
steps of S / n bytes for a sum, half as many for a gather (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms
for clusters of workstations, 2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from onebox.errors import WireError
from onebox.wire.protocol.groups import EmulatedLink


@dataclass(frozen=True)
class LinkSpeed:
    """How slow a link is.

    Args:
        latency_ns: Nanoseconds that everything takes in addition.
        ns_per_byte: Nanoseconds that each byte takes; 0 for no cap.
    """

    latency_ns: float = 0.0
    ns_per_byte: float = 0.0

    @classmethod
    def of(cls, link: EmulatedLink) -> LinkSpeed:
        """Return the speed of a link.

        Raises:
            WireError: There is no such link.
        """
        if not (0 <= link.latency_s < math.inf and link.bandwidth_bps > 0):
            raise WireError(f"{link}: a latency is 0 s or more and finite, a bandwidth is positive")
        return cls(1e9 * link.latency_s, 1e9 / link.bandwidth_bps)

    @classmethod
    def slowest(cls, speeds: Sequence[LinkSpeed]) -> LinkSpeed:
        """Return the speed of something that waits for all of some links."""
        return cls(
            max((speed.latency_ns for speed in speeds), default=0.0),
            max((speed.ns_per_byte for speed in speeds), default=0.0),
        )


@dataclass
class EmulatedLinks:
    """What is under way on each emulated link of a worker, whatever groups it is in."""

    _speeds: dict[int, LinkSpeed] = field(default_factory=dict)
    _free_ns: dict[int, float] = field(default_factory=dict)

    def lay(self, links: Sequence[EmulatedLink]) -> None:
        """Let there be links, of these speeds from now on.

        Raises:
            WireError: One of them cannot be.
        """
        self._speeds |= {link.link: LinkSpeed.of(link) for link in links}

    def retime(self, links: Sequence[EmulatedLink]) -> None:
        """Let links be of other speeds from now on; what is under way arrives when it would have.

        Those that are not there are passed over: a group that is formed later brings their speed.

        Raises:
            WireError: One of them cannot be.
        """
        speeds = {link.link: LinkSpeed.of(link) for link in links}
        self._speeds |= {link: speed for link, speed in speeds.items() if link in self._speeds}

    def slowest(self, links: Sequence[int]) -> LinkSpeed:
        """Return the speed of something that waits for all of some links."""
        return LinkSpeed.slowest([self._speeds[link] for link in links])

    def send(self, link: int, size_bytes: int, now_ns: int) -> int:
        """Send something across a link and return when it arrives."""
        speed = self._speeds[link]
        free_ns = max(now_ns, self._free_ns.get(link, 0.0)) + size_bytes * speed.ns_per_byte
        self._free_ns[link] = free_ns
        return int(free_ns + speed.latency_ns)


@dataclass
class EmulatedRing:
    """When collectives end that a group runs one after the other on a ring."""

    _free_ns: float = 0.0

    def run(self, arrived_ns: Sequence[int], speeds: Sequence[LinkSpeed], passes: int, size_bytes: int) -> int:
        """Run a collective and return when it ends.

        Args:
            arrived_ns: When each rank came to it.
            speeds: Of each rank, the slowest of its links to others. The slowest of all sets the pace: nobody has
                looked for an order of the ranks that goes round it.
            passes: How often each byte goes round: 2 for a sum, 1 for a gather.
            size_bytes: Bytes of its result.
        """
        ranks, pace = len(speeds), LinkSpeed.slowest(speeds)
        cost = passes * (ranks - 1) * (size_bytes / ranks * pace.ns_per_byte + pace.latency_ns)
        self._free_ns = max(self._free_ns, *arrived_ns) + cost
        return int(self._free_ns)
