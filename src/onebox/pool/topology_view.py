"""A pool's devices and links as values to draw. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from onebox.cost import PoolProfile
from onebox.drawing import Place, PlaceDevice, PlaceLink, notebook
from onebox.pool.devices import DeviceInfo, distinct_hosts
from onebox.sizes import bit_rate_text, size_text, time_text


def places_of(
    devices: Sequence[DeviceInfo], profile: PoolProfile | None
) -> tuple[tuple[Place, ...], tuple[PlaceLink, ...]]:
    """Return the places of devices, and a link between each two of them.

    Places are hosts. On a single host they are the groups of near devices that measured links show, as of emulated
    links.

    Args:
        devices: The devices of a pool.
        profile: Their profile; ``None`` where they have not been measured.
    """
    named = list(distinct_hosts(devices).items())
    if len(named) == 1 and profile is not None and len(profile.groups[0]) > 1:
        host = named[0][0]
        named = [(f"{host}, group {number}", group) for number, group in enumerate(profile.groups[0])]
    places = tuple(
        Place(
            name=name,
            devices=tuple(
                PlaceDevice(number=number, kind=devices[number].kind, emulated=devices[number].emulated)
                for number in group
            ),
            inner_bps=_between(profile, combinations(group, 2))[0],
        )
        for name, group in named
    )
    links = []
    for one, other in combinations(range(len(named)), 2):
        pairs = ((a, b) for a in named[one][1] for b in named[other][1])
        bandwidth_bps, latency_s = _between(profile, pairs)
        links.append(PlaceLink(ends=(one, other), bandwidth_bps=bandwidth_bps, latency_s=latency_s))
    return places, tuple(links)


def pool_html(devices: Sequence[DeviceInfo], profile: PoolProfile | None) -> str:
    """Return a pool as a notebook shows it: its devices and, where they were measured, the links between its places.

    Args:
        devices: The devices of a pool.
        profile: Their profile; ``None`` where they have not been measured.
    """
    rows = [
        (
            device.number,
            device.host,
            f"{device.device}, emulated, speed {device.speed:g}" if device.emulated else device.device,
            device.name,
            device.threads,
            size_text(device.memory_bytes),
        )
        for device in devices
    ]
    parts = [notebook.table(("device", "host", "kind", "name", "threads", "memory"), rows)]
    places, links = places_of(devices, profile)
    known = [
        (
            f"{places[link.ends[0]].name} – {places[link.ends[1]].name}",
            bit_rate_text(link.bandwidth_bps),
            time_text(link.latency_s),
        )
        for link in links
        if link.bandwidth_bps is not None and link.latency_s is not None
    ]
    if known:
        parts.append(notebook.table(("link", "rate", "latency"), known))
    return notebook.card(f"Pool of {len(devices)} device{'s' * (len(devices) != 1)}", *parts)


def _between(profile: PoolProfile | None, pairs: Iterable[tuple[int, int]]) -> tuple[float | None, float | None]:
    """Return the least bandwidth and the longest latency of links, in either direction, as far as they are known."""
    both = [way for a, b in pairs for way in ((a, b), (b, a))]
    if profile is None:
        return None, None
    known = [profile.link(a, b) for a, b in both if b in profile.latency_s[a]]
    return (min(rate for _, rate in known), max(late for late, _ in known)) if known else (None, None)
