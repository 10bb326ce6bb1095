"""Admission: offers, limits and requests, and the allocation of shares. Pure.

A GPU is leased by its memory: exclusively, or in part, shared with others; so is an emulated device. The CPU is leased
by cores and memory.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from zmq.utils import z85

from onebox.errors import UsageError
from onebox.sizes import size_text
from onebox.wire.protocol.agents import GRACE_S, Lease, Want

GPU_SHARES = 64
"""The most workers that share a GPU."""

WANTS = 256
"""The most devices of one request."""

NUMBERED = ("cuda", "sim")
"""Kinds of devices of which each has a number; a want of the kind alone means any of them."""

_DEVICE = re.compile(rf"cpu|(?:{'|'.join(NUMBERED)})(?::(?:0|[1-9]\d{{0,2}}))?")


@dataclass(frozen=True, kw_only=True)
class Offered:
    """A device that an agent offers.

    Args:
        device: ``cuda:K``, ``sim:K``, or ``cpu`` for all cores that are offered.
        name: Product name.
        memory_bytes: Offered memory.
        threads: Offered cores; for a GPU, those that each of its workers may use.

    Raises:
        UsageError: There is no such device, or an offered amount is zero.
    """

    device: str
    name: str
    memory_bytes: int
    threads: int

    def __post_init__(self) -> None:
        if not _DEVICE.fullmatch(self.device) or self.device in NUMBERED:
            raise UsageError(f"an offer of {self.device!r}; allowed are cpu, cuda:K and sim:K, such as cuda:0")
        if self.memory_bytes < 1 or self.threads < 1:
            raise UsageError(
                f"an offer of {self.device} with {self.memory_bytes} bytes and {self.threads} cores: at least 1 of each"
            )


@dataclass(frozen=True, kw_only=True)
class ClientLimits:
    """Limits of one client at a time, by its key; 0 for no limit.

    Args:
        devices: Number of workers.
        memory_bytes: Memory of all its workers.
        threads: Cores of all its workers.
        lease_s: Seconds after which a lease ends, used or not.
        requests: Leases and waiting requests together.
        grace_s: The longest time that a lease may outlive its client's last heartbeat.

    Raises:
        UsageError: A limit is negative or not finite, or the grace too short.
    """

    devices: int = 0
    memory_bytes: int = 0
    threads: int = 0
    lease_s: float = 0.0
    requests: int = 16
    grace_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("devices", "memory_bytes", "threads", "lease_s", "requests"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise UsageError(f"a limit of {name}={value}; allowed are finite numbers from 0, which is no limit")
        if not GRACE_S <= self.grace_s < math.inf:
            raise UsageError(f"a limit of grace_s={self.grace_s}; allowed are finite numbers from {GRACE_S}")


@dataclass(frozen=True, kw_only=True)
class Share:
    """A device, or a part of it, for one worker.

    Args:
        device: ``cuda:K``, ``sim:K`` or ``cpu``.
        threads: Threads of its CPU operators.
        memory_bytes: The most bytes of its buffers.
    """

    device: str
    threads: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Room:
    """Unallocated memory of a device and, for the CPU, cores."""

    memory_bytes: int
    threads: int


def all_room(offers: Mapping[str, Offered]) -> dict[str, Room]:
    """Return the room of each device with no leases."""
    return {name: Room(memory_bytes=offer.memory_bytes, threads=offer.threads) for name, offer in offers.items()}


def taken(room: Mapping[str, Room], shares: Sequence[Share]) -> dict[str, Room]:
    """Return the room that remains after shares are allocated."""
    left = dict(room)
    for share in shares:
        before = left[share.device]
        threads = before.threads - share.threads if share.device == "cpu" else before.threads
        left[share.device] = Room(memory_bytes=before.memory_bytes - share.memory_bytes, threads=threads)
    return left


def settled(wants: Sequence[Want], offers: Mapping[str, Offered], allowed_bytes: int = 0) -> tuple[Want, ...]:
    """Return a request's wants with the agent's choices filled in.

    For CPU workers, unspecified threads are equal shares of the cores that the request's other wants leave, and
    unspecified memory is in proportion to the cores. Where all that exceeds what the client may have, unspecified
    memory, of GPUs too, is reduced in proportion.

    Args:
        wants: The wants.
        offers: All devices.
        allowed_bytes: The most memory of all together; 0 for no limit.

    Raises:
        UsageError: A want is invalid, not offered, or larger than the offer.
    """
    if not 1 <= len(wants) <= WANTS:
        raise UsageError(f"a request for {len(wants)} devices; allowed are 1 to {WANTS}")
    for want in wants:
        _check(want, offers)
    chosen = [want.threads for want in wants if want.device == "cpu"]
    left = offers["cpu"].threads - sum(chosen) if chosen else 0
    each = max(1, left // max(1, chosen.count(0)))
    made = tuple(_chosen(want, offers["cpu"], each) if want.device == "cpu" else want for want in wants)
    shares = fit(made, all_room(offers), offers)
    if shares is None:
        asked = ", ".join(dict.fromkeys(want.device for want in wants))
        raise UsageError(
            f"{len(wants)} workers ({asked}) do not fit together into what is offered, even with nothing leased: "
            f"{_listing(offers)}"
        )
    chosen_bytes = sum(share.memory_bytes for want, share in zip(wants, shares, strict=True) if not want.memory_bytes)
    left_bytes = allowed_bytes - sum(want.memory_bytes for want in wants)
    if not allowed_bytes or chosen_bytes <= left_bytes or left_bytes < len(wants):
        return made
    return tuple(
        filled
        if want.memory_bytes
        else replace(filled, memory_bytes=max(1, share.memory_bytes * left_bytes // chosen_bytes))
        for want, filled, share in zip(wants, made, shares, strict=True)
    )


def fit(wants: Sequence[Want], room: Mapping[str, Room], offers: Mapping[str, Offered]) -> tuple[Share, ...] | None:
    """Return a share for each want, or None where there is not enough room for all of them.

    ``cuda`` is any GPU that no other want of the request has: exclusive, the smallest free one; shared, the one with
    the least sufficient room; ``sim`` likewise. Wants of a whole GPU are placed first, then the larger ones, so shares
    are found whenever they exist.

    Args:
        wants: Wants returned by :func:`settled`.
        room: The unallocated room.
        offers: All devices.
    """
    left = dict(room)
    found: dict[int, Share] = {}
    used: set[str] = set()
    order = sorted(range(len(wants)), key=lambda number: _urgency(wants[number]))
    for number in order:
        want = wants[number]
        choice = [want.device] if want.device not in NUMBERED else _by_size(want.device, left, offers, used)
        shares = (_share(want, offers[device]) for device in choice)
        share = next((share for share in shares if _fits(want, share, left[share.device], offers)), None)
        if share is None:
            return None
        found[number] = share
        used.add(share.device)
        left |= taken({share.device: left[share.device]}, [share])
    return tuple(found[number] for number in range(len(wants)))


def lacking(wants: Sequence[Want], room: Mapping[str, Room], offers: Mapping[str, Offered]) -> str:
    """Describe what a request lacks: cores, memory, or whole devices; empty where it fits.

    Args:
        wants: Wants returned by :func:`settled`.
        room: The unallocated room.
        offers: All devices.

    Example:
        >>> offers = {"cpu": Offered(device="cpu", name="a CPU", memory_bytes=8 << 30, threads=1)}
        >>> lacking([Want("cpu", 1, 1 << 30)], {"cpu": Room(memory_bytes=6 << 30, threads=0)}, offers)
        'cores (0 of 1 free, 1 asked for)'
    """
    if fit(wants, room, offers) is not None:
        return ""
    enough_memory, enough_cores = dict(room), dict(room)
    for name, offer in offers.items():
        enough_memory[name] = Room(memory_bytes=offer.memory_bytes, threads=room[name].threads)
        enough_cores[name] = Room(memory_bytes=room[name].memory_bytes, threads=offer.threads)
    found = []
    if fit(wants, enough_memory, offers) is None:
        asked = sum(want.threads for want in wants if want.device == "cpu")
        found.append(f"cores ({room['cpu'].threads} of {offers['cpu'].threads} free, {asked} asked for)")
    if fit(wants, enough_cores, offers) is None:
        names = sorted(reach(wants, offers))
        free, whole = (sum(each[name].memory_bytes for name in names) for each in (room, offers))
        asked = sum(want.memory_bytes for want in wants)
        memory = f"memory ({size_text(free)} of {size_text(whole)} free, {size_text(asked)} asked for)"
        found.append(memory if all(want.memory_bytes for want in wants) else f"whole devices ({', '.join(names)})")
    return " and ".join(found)


def reach(wants: Sequence[Want], offers: Mapping[str, Offered]) -> frozenset[str]:
    """Return the devices that a request might get."""
    return frozenset(
        device
        for want in wants
        for device in (_of_kind(want.device, offers) if want.device in NUMBERED else [want.device])
    )


def explain_invalid(request: Lease) -> str | None:
    """Explain why a request is invalid, apart from its wants; None if it is valid."""
    try:
        key = z85.decode(request.key) if len(request.key) == 40 else b""
    except (ValueError, KeyError, struct.error) as error:
        return f"a key that is none: {type(error).__name__}"
    if len(key) != 32:
        return f"a key of {len(request.key)} characters; a public CURVE key has 40 of Z85"
    if not 0 < request.speed <= 1:
        return f"a speed of {request.speed}; allowed is more than 0 and up to 1"
    if request.speed < 1 and any(want.device != "cpu" for want in request.wants):
        return f"a speed of {request.speed} for a GPU; only cpu workers can be slowed down"
    return None


def _check(want: Want, offers: Mapping[str, Offered]) -> None:
    """Require that a want could be met without other leases."""
    if not _DEVICE.fullmatch(want.device):
        raise UsageError(f"{want.device[:40]!r} is no device; allowed are cpu, cuda, sim, cuda:K and sim:K")
    if want.threads < 0 or want.memory_bytes < 0:
        raise UsageError(
            f"{want.device} with {want.threads} threads and {want.memory_bytes} bytes; allowed is 0 or more"
        )
    matching = [offer for name, offer in offers.items() if want.device in (name, name.split(":")[0])]
    if not matching:
        raise UsageError(f"{want.device} is not offered; offered is {_listing(offers)}")
    if not any(want.threads <= offer.threads and want.memory_bytes <= offer.memory_bytes for offer in matching):
        raise UsageError(f"{_wanted(want)} is more than is offered: {_listing(offers)}")
    least = min(offer.memory_bytes for offer in matching) / GPU_SHARES
    if want.device != "cpu" and 0 < want.memory_bytes < least:
        share = size_text(math.ceil(least))
        raise UsageError(
            f"{size_text(want.memory_bytes)} of {want.device}; a share of it is {share} at least, as {GPU_SHARES} "
            "workers may share a GPU"
        )


def _wanted(want: Want) -> str:
    """Describe a want, without the parts left to the agent."""
    parts = [f"{want.threads} threads"] * bool(want.threads) + [size_text(want.memory_bytes)] * bool(want.memory_bytes)
    return f"{want.device} with {' and '.join(parts)}"


def _chosen(want: Want, offer: Offered, threads: int) -> Want:
    threads = want.threads or threads
    share = offer.memory_bytes * min(threads, offer.threads) // offer.threads
    return Want("cpu", threads, want.memory_bytes or max(1, share))


def _urgency(want: Want) -> tuple[int, int]:
    """Return a sort key for placement: wants without a choice first, then whole GPUs, then the larger ones."""
    if want.device not in NUMBERED:
        return 0, 0
    return (1, 0) if want.memory_bytes == 0 else (2, -want.memory_bytes)


def _of_kind(kind: str, offers: Mapping[str, Offered]) -> list[str]:
    """Return the numbered devices of a kind."""
    return [device for device in offers if device.startswith(f"{kind}:")]


def _by_size(kind: str, room: Mapping[str, Room], offers: Mapping[str, Offered], but: set[str]) -> list[str]:
    """Return the devices of a kind that are not in ``but``, those with the least room first."""
    found = [device for device in _of_kind(kind, offers) if device not in but]
    return sorted(found, key=lambda device: room[device].memory_bytes)


def _share(want: Want, offer: Offered) -> Share:
    memory = want.memory_bytes or offer.memory_bytes
    return Share(device=offer.device, threads=want.threads or offer.threads, memory_bytes=memory)


def _fits(want: Want, share: Share, room: Room, offers: Mapping[str, Offered]) -> bool:
    offer = offers[share.device]
    if want.memory_bytes == 0 and room.memory_bytes < offer.memory_bytes:
        return False
    return share.memory_bytes <= room.memory_bytes and share.threads <= room.threads


def _listing(offers: Mapping[str, Offered]) -> str:
    """List the offers in a message."""
    parts = [
        f"{offer.device} ({size_text(offer.memory_bytes)}, {offer.threads} core{'s' if offer.threads > 1 else ''})"
        for offer in list(offers.values())[:16]
    ]
    return ", ".join(parts) or "nothing"


__all__ = [
    "NUMBERED",
    "WANTS",
    "ClientLimits",
    "Offered",
    "Room",
    "Share",
    "all_room",
    "explain_invalid",
    "fit",
    "lacking",
    "reach",
    "settled",
    "taken",
]
