"""Emulated links: latency and bandwidth of transfers between the ``sim`` devices of one host. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from onebox.errors import UsageError
from onebox.trainer_options import is_number
from onebox.wire.protocol.groups import EmulatedLink


@dataclass(frozen=True, kw_only=True)
class Link:
    """An emulated link between ``sim`` devices, which delays what is sent across it.

    Transfers in one direction queue up: S bytes take S / ``bandwidth_bps`` to leave, after those sent before, and
    arrive ``latency_s`` later. Other links, and the opposite direction, are independent.

    Collectives of a group run one after the other and take as long as on a ring whose links all equal the slowest
    between two members; they and point-to-point transfers do not delay each other.

    Args:
        latency_s: Added seconds of each transfer.
        bandwidth_bps: Most bytes per second; infinite for no limit.

    Raises:
        UsageError: The latency is negative or infinite, or the bandwidth not positive.

    Example:
        >>> Link(latency_s=1e-3, bandwidth_bps=125e6)  # Gigabit Ethernet
        Link(latency_s=0.001, bandwidth_bps=125000000.0)
    """

    latency_s: float = 0.0
    bandwidth_bps: float = math.inf

    def __post_init__(self) -> None:
        if not (is_number(self.latency_s) and is_number(self.bandwidth_bps)) or not (
            0 <= self.latency_s < math.inf and self.bandwidth_bps > 0
        ):
            raise UsageError(
                f"{self}: a latency is 0 s or more and finite, a bandwidth is positive, in bytes per second, "
                "and infinite for no cap"
            )


LinkMap = Mapping[tuple[int, int], Link]
"""Links by (sender, receiver)."""


class LinkEndpoint(Protocol):
    """The properties of a device that links need."""

    @property
    def host(self) -> str:
        """Name of its host."""

    @property
    def kind(self) -> str:
        """``cpu``, ``cuda`` or ``sim``."""


def directed(links: LinkMap, devices: Sequence[LinkEndpoint]) -> dict[tuple[int, int], Link]:
    """Return the link of each direction; one that is given for one direction only applies to both.

    Raises:
        UsageError: A link has an unknown end, or one that is no ``sim`` device.
    """
    for first, second in links:
        if first == second or not all(0 <= end < len(devices) for end in (first, second)):
            raise UsageError(f"a link from device {first} to {second}; this pool has devices 0 to {len(devices) - 1}")
        ends = devices[first], devices[second]
        if {end.kind for end in ends} != {"sim"} or ends[0].host != ends[1].host:
            raise UsageError(
                f"the link from device {first} ({ends[0].kind} on {ends[0].host}) to {second} ({ends[1].kind} on "
                f"{ends[1].host}) cannot be emulated: that is done between sim devices of one host"
            )
    return {(second, first): link for (first, second), link in links.items()} | dict(links)


def outgoing(links: LinkMap, workers: Sequence[int], rank: int) -> tuple[EmulatedLink, ...]:
    """Return the links from one member of a group to the others.

    Args:
        links: The links of each direction.
        workers: The members, in the order of their ranks.
        rank: The sender's.
    """
    return tuple(
        EmulatedLink(peer, worker, link.latency_s, link.bandwidth_bps)
        for peer, worker in enumerate(workers)
        if (link := links.get((workers[rank], worker))) is not None
    )


def changed(links: LinkMap, way: tuple[int, int], bandwidth_bps: float | None, latency_s: float | None) -> LinkMap:
    """Return the links with new values for one of them.

    Args:
        links: The links of each direction.
        way: Sender and receiver of the link.
        bandwidth_bps: Its bytes per second; ``None`` to keep them.
        latency_s: Its latency; ``None`` to keep it.

    Raises:
        UsageError: There is no such link, or the values are invalid.
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
