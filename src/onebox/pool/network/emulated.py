"""Emulated links: how slow transfers between the devices of one host are made to be. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from onebox.errors import UsageError
from onebox.wire.protocol.groups import EmulatedLink

EMULATED_KINDS = frozenset({"cpu", "sim"})
"""Kinds of devices that links can be emulated between."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """An emulated link: what is sent across it arrives later than it could.

    What is sent in one direction queues up: S bytes take S / ``bandwidth_bps`` to leave, behind those that were sent
    before, and arrive ``latency_s`` later. Other links, and the way back, are not held up.

    Sums and gathers of a group take as long as on a ring whose links are all like the slowest between two members, one
    after the other; they and what is sent from device to device do not hold each other up.

    Args:
        latency_s: Seconds that everything takes in addition.
        bandwidth_bps: Bytes per second at most; infinite for no cap.

    Raises:
        UsageError: The latency is negative or infinite, or the bandwidth not positive.

    Example:
        >>> Link(latency_s=1e-3, bandwidth_bps=125e6)  # Gigabit Ethernet
        Link(latency_s=0.001, bandwidth_bps=125000000.0)
    """

    latency_s: float = 0.0
    bandwidth_bps: float = math.inf

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < math.inf and self.bandwidth_bps > 0):
            raise UsageError(
                f"{self}: a latency is 0 s or more and finite, a bandwidth is positive, in bytes per second, "
                "and infinite for no cap"
            )


LinkMap = Mapping[tuple[int, int], Link]
"""Links by the devices at their two ends, the sender first."""


class LinkEndpoint(Protocol):
    """What has to be known of a device."""

    @property
    def host(self) -> str:
        """The host that it is in."""

    @property
    def kind(self) -> str:
        """``cpu``, ``cuda`` or ``sim``."""


def directed(links: LinkMap, devices: Sequence[LinkEndpoint]) -> dict[tuple[int, int], Link]:
    """Return the link of each direction; one that is given for one direction only is for both.

    Raises:
        UsageError: A link has an end that is not there, or one that it cannot be emulated for.
    """
    for first, second in links:
        if first == second or not all(0 <= end < len(devices) for end in (first, second)):
            raise UsageError(f"a link from device {first} to {second}; this pool has devices 0 to {len(devices) - 1}")
        ends = devices[first], devices[second]
        if not {end.kind for end in ends} <= EMULATED_KINDS or ends[0].host != ends[1].host:
            raise UsageError(
                f"the link from device {first} ({ends[0].kind} on {ends[0].host}) to {second} ({ends[1].kind} on "
                f"{ends[1].host}) cannot be emulated: that is done between cpu and sim devices of one host"
            )
    return {(second, first): link for (first, second), link in links.items()} | dict(links)


def outgoing(links: LinkMap, workers: Sequence[int], rank: int) -> tuple[EmulatedLink, ...]:
    """Return the links from one member of a group to the others.

    Args:
        links: Of each direction.
        workers: The members, in the order of their ranks.
        rank: The sender's.
    """
    return tuple(
        EmulatedLink(peer, worker, link.latency_s, link.bandwidth_bps)
        for peer, worker in enumerate(workers)
        if (link := links.get((workers[rank], worker))) is not None
    )


def changed(links: LinkMap, way: tuple[int, int], bandwidth_bps: float | None, latency_s: float | None) -> LinkMap:
    """Return links with one of them of other values.

    Args:
        links: Of each direction.
        way: Which: sender and receiver.
        bandwidth_bps: Its bytes per second; ``None`` for what they were.
        latency_s: Its latency; ``None`` for what it was.

    Raises:
        UsageError: It is not among them, or there is none of such values.
    """
    if way not in links:
        raise UsageError(
            f"no link from device {way[0]} to {way[1]} is emulated; give the pool one when it is opened: "
            f"onebox.open(..., links={{({way[0]}, {way[1]}): Link()}})"
        )
    old = links[way]
    new = Link(
        latency_s=old.latency_s if latency_s is None else latency_s,
        bandwidth_bps=old.bandwidth_bps if bandwidth_bps is None else bandwidth_bps,
    )
    return {**links, way: new}
