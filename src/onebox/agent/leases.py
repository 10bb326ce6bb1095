"""Leases and the queue of a host's devices: events and the time in, decisions out. Pure.

The queue is first come, first served: a later request gets devices only if no earlier one could use any of them, so
that small requests never starve a large one. A lease's devices are free again only when its workers have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from onebox.agent.admission import (
    ClientLimits,
    Offered,
    Room,
    Share,
    all_room,
    fit,
    lacking,
    reach,
    settled,
    taken,
)
from onebox.errors import UsageError
from onebox.sizes import size_text
from onebox.wire.protocol.agents import Holder, Offer, Want

QUEUE = 256
"""The most requests in the queue."""

TOLD = 8
"""The most requests whose new places are reported at a time, as each takes some milliseconds; the others follow."""

LEAST_GRACE_S = 2.0
"""The shortest grace of a lease: two heartbeat intervals."""

SILENT_S = 5.0
"""Silence after which a client's session counts as dead where another session of the client waits for its devices:
longer than an interruption of the network that a client tolerates."""

DROPPED = "it was silent for longer than its grace while it waited, and has lost its place in the queue; ask again"
_LISTED = 4


@dataclass(frozen=True)
class Client:
    """One session of a client.

    Args:
        key: Its public key, to which limits apply.
        session: Identifier that distinguishes its sessions.
        name: Its name, for messages.
    """

    key: str
    session: bytes
    name: str = field(compare=False, default="")


# ---- decisions


@dataclass(frozen=True)
class Grant:
    """Decision to grant a request: workers are to be started, one for each share, in the order of the wants."""

    client: Client
    number: int
    lease: int
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class Wait:
    """Decision that a request waits at a new position in the queue."""

    client: Client
    number: int
    place: int
    behind: str
    lacking: str


@dataclass(frozen=True)
class Refuse:
    """Decision to refuse a request."""

    client: Client
    number: int
    kind: Literal["usage", "busy"]
    reason: str


@dataclass(frozen=True)
class End:
    """Decision to end a lease: its workers are to be ended, and then :meth:`Leases.freed` to be called.

    Args:
        client: Its holder.
        lease: Its number.
        cause: ``released`` by its client, ``silent`` client, ``time`` limit, ``failed`` start.
        why: The reason, for messages.
    """

    client: Client
    lease: int
    cause: Literal["released", "silent", "time", "failed"]
    why: str


@dataclass(frozen=True)
class Dequeue:
    """A request has left the queue because its client is silent or its session was ended."""

    client: Client
    number: int
    why: str


Decision = Grant | Wait | Refuse | End | Dequeue


@dataclass
class _Waiting:
    client: Client
    number: int
    wants: tuple[Want, ...]
    reach: frozenset[str]
    estimate: tuple[Share, ...]
    grace_s: float
    place: int = 0


@dataclass
class _Held:
    client: Client
    number: int
    shares: dict[int, Share]
    grace_s: float
    since_s: float
    ending: bool = False


class Leases:
    """The leases of one host.

    Args:
        offers: Its devices.
        limits: Limits of each client.

    Raises:
        UsageError: A device is offered twice.
    """

    def __init__(self, offers: Sequence[Offered], limits: ClientLimits) -> None:
        self._offers = {offer.device: offer for offer in offers}
        if len(self._offers) < len(offers):
            raise UsageError(f"a device is offered twice: {', '.join(offer.device for offer in offers)}")
        self._limits = limits
        self._queue: list[_Waiting] = []
        self._held: dict[int, _Held] = {}
        self._heard: dict[Client, float] = {}
        self._last = 0

    # ---- requests of clients

    def ask(
        self, client: Client, number: int, wants: Sequence[Want], *, grace_s: float, wait: bool, now_s: float
    ) -> list[Decision]:
        """Handle a request for devices, all or none. A repetition under the same number is not a second request.

        Args:
            client: The requesting session.
            number: The session's number of the request.
            wants: The devices.
            grace_s: How long the client may be silent.
            wait: Whether it waits for devices that others have leased.
            now_s: The time.
        """
        for waiting in self._queue:
            if (waiting.client, waiting.number) == (client, number):
                return [self._wait(waiting)]
        if any((held.client, held.number) == (client, number) for held in self._held.values()):
            return []
        try:
            request = self._request(client, number, wants, grace_s)
        except UsageError as error:
            return [Refuse(client, number, "usage", str(error))]
        if not wait and not self._could_be_next(request):
            lack = self._lacking(request)
            behind = self._behind(request) + (f", lacking {lack}" if lack else "")
            return [Refuse(client, number, "busy", f"what is asked for is leased: {behind}; wait, or ask for less")]
        self._heard[client] = now_s
        self._queue.append(request)
        return self._advance(now_s)

    def heard(self, client: Client, now_s: float) -> tuple[int, ...]:
        """Record a client's heartbeat and return its leases."""
        if client in self._heard:
            self._heard[client] = now_s
        return self.of(client)

    def of(self, client: Client) -> tuple[int, ...]:
        """Return the leases of a session."""
        return tuple(lease for lease, held in self._held.items() if held.client == client and not held.ending)

    def release(self, client: Client, lease: int) -> list[Decision]:
        """Release a lease of a client, over any of its connections; no decision if it has no such lease."""
        held = self._held.get(lease)
        if held is None or held.ending or held.client.key != client.key:
            return []
        return [self._end(lease, "released", "its client released it")]

    def part(self, client: Client, why: str, now_s: float) -> list[Decision]:
        """End all leases and requests of a session."""
        waiting = [each for each in self._queue if each.client == client]
        self._queue = [each for each in self._queue if each.client != client]
        made: list[Decision] = [Dequeue(client, each.number, why) for each in waiting]
        made += [self._end(lease, "failed", why) for lease in self.of(client)]
        return made + self._advance(now_s)

    def leave(self, client: Client, number: int, now_s: float) -> list[Decision] | None:
        """Remove a request from the queue; None if it is not there."""
        found = [waiting for waiting in self._queue if (waiting.client, waiting.number) == (client, number)]
        if not found:
            return None
        self._queue.remove(found[0])
        return self._advance(now_s)

    # ---- events of workers

    def worker_ended(self, lease: int, worker: int, now_s: float) -> list[Decision]:
        """Record that a worker of a lease ended by itself: its share is free, the lease goes on."""
        held = self._held.get(lease)
        if held is not None and not held.ending:
            held.shares.pop(worker, None)
        return self._advance(now_s)

    def failed(self, lease: int, why: str) -> list[Decision]:
        """Record that a worker of a lease could not be started."""
        held = self._held.get(lease)
        return [self._end(lease, "failed", why)] if held is not None and not held.ending else []

    def freed(self, lease: int, now_s: float) -> list[Decision]:
        """Record that all workers of an ending lease have ended."""
        self._held.pop(lease, None)
        return self._advance(now_s)

    # ---- time

    def tick(self, now_s: float) -> list[Decision]:
        """End the leases of clients that have been silent for too long, and those whose time is over."""
        made: list[Decision] = []
        for waiting in list(self._queue):
            if now_s - self._heard[waiting.client] > waiting.grace_s:
                self._queue.remove(waiting)
                made.append(Dequeue(waiting.client, waiting.number, DROPPED))
        for lease, held in self._held.items():
            silent_s = now_s - self._heard.get(held.client, now_s)
            if held.ending:
                continue
            if silent_s > held.grace_s:
                why = f"this client was silent for {silent_s:.1f} s; its grace was {held.grace_s:g} s"
                made.append(self._end(lease, "silent", why))
            elif silent_s > SILENT_S and self._waited_for_by_itself(held):
                why = f"this client was silent for {silent_s:.1f} s, and waits for these devices in another session"
                made.append(self._end(lease, "silent", why))
            elif self._limits.lease_s and now_s - held.since_s > self._limits.lease_s:
                made.append(self._end(lease, "time", f"its time is over: leases end after {self._limits.lease_s:g} s"))
        return made + self._advance(now_s)

    def forgive(self, seconds: float) -> None:
        """Extend every client's grace by a time in which this host itself was held up."""
        self._heard = {client: heard_s + seconds for client, heard_s in self._heard.items()}

    # ---- state

    def stock(self, now_s: float, load: Callable[[str], float]) -> tuple[tuple[Offer, ...], tuple[str, ...]]:
        """Return the offers with their holders, and the names of the waiting clients.

        Args:
            now_s: The time.
            load: Maps a device to the fraction of time that it was busy; -1 where unknown.
        """
        room = self._room()
        holders: dict[str, list[Holder]] = {device: [] for device in self._offers}
        for lease, held, share in self._shares():
            holders[share.device].append(
                Holder(
                    held.client.name,
                    lease,
                    share.memory_bytes,
                    max(0.0, now_s - held.since_s),
                    share.threads,
                    max(0.0, now_s - self._heard.get(held.client, now_s)),
                )
            )
        return (
            tuple(
                Offer(
                    offer.device,
                    offer.name,
                    offer.memory_bytes,
                    offer.threads,
                    room[offer.device].memory_bytes,
                    tuple(holders[offer.device]),
                    load(offer.device),
                    room[offer.device].threads,
                )
                for offer in self._offers.values()
            ),
            tuple(waiting.client.name for waiting in self._queue),
        )

    def busy(self, client: Client) -> bool:
        """Return whether a session has a lease, or waits for one."""
        return client in self._heard

    # ---- internals

    def _request(self, client: Client, number: int, wants: Sequence[Want], grace_s: float) -> _Waiting:
        """Return a request after checking the limits.

        Raises:
            UsageError: It exceeds a limit.
        """
        if not LEAST_GRACE_S <= grace_s <= self._limits.grace_s:
            raise UsageError(f"a grace of {grace_s} s; allowed are {LEAST_GRACE_S:g} to {self._limits.grace_s:g} s")
        if len(self._queue) >= QUEUE:
            raise UsageError(f"{QUEUE} requests wait already; try again later")
        mine = [held for held in self._held.values() if held.client.key == client.key and not held.ending]
        queued = [waiting for waiting in self._queue if waiting.client.key == client.key]
        if self._limits.requests and len(mine) + len(queued) >= self._limits.requests:
            raise UsageError(f"{client.name} has {len(mine) + len(queued)} leases and requests; no more are allowed")
        shares = [share for held in mine for share in held.shares.values()]
        shares += [share for waiting in queued for share in waiting.estimate]
        most_bytes = self._limits.memory_bytes
        left_bytes = max(1, most_bytes - sum(share.memory_bytes for share in shares)) if most_bytes else 0
        made = settled(wants, self._offers, left_bytes)
        estimate = fit(made, all_room(self._offers), self._offers)
        assert estimate is not None  # guaranteed by settled()
        over = self._over([*shares, *estimate])
        if over:
            had = f" with what {client.name} has or waits for already" if shares else ""
            raise UsageError(f"that is{had} {over} for one client: ask for less, or release some")
        return _Waiting(client, number, made, reach(made, self._offers), estimate, grace_s)

    def _over(self, shares: Sequence[Share]) -> str:
        """Describe the limit of a client that shares exceed; empty if none."""
        limits = self._limits
        used_bytes = sum(share.memory_bytes for share in shares)
        if limits.memory_bytes and used_bytes > limits.memory_bytes:
            return f"{size_text(used_bytes)} of memory; allowed are {size_text(limits.memory_bytes)}"
        sums = (
            (len(shares), limits.devices, "devices"),
            (sum(share.threads for share in shares), limits.threads, "cores"),
        )
        return next((f"{sum_} {what}; allowed are {most}" for sum_, most, what in sums if most and sum_ > most), "")

    def _shares(self) -> Iterable[tuple[int, _Held, Share]]:
        return ((lease, held, share) for lease, held in self._held.items() for share in held.shares.values())

    def _room(self) -> dict[str, Room]:
        return taken(all_room(self._offers), [share for _, _, share in self._shares()])

    def _fit(self, waiting: _Waiting) -> tuple[Share, ...] | None:
        """Return the shares that a request can get now, within its client's limits."""
        shares = fit(waiting.wants, self._room(), self._offers)
        mine = [share for _, held, share in self._shares() if held.client.key == waiting.client.key and not held.ending]
        return None if shares is None or self._over([*mine, *shares]) else shares

    def _could_be_next(self, request: _Waiting) -> bool:
        """Return whether a request would be granted at once."""
        first = all(request.reach.isdisjoint(waiting.reach) for waiting in self._queue)
        return first and self._fit(request) is not None

    def _advance(self, now_s: float) -> list[Decision]:
        """Grant the requests that fit, and report new queue positions."""
        made: list[Decision] = []
        kept: set[str] = set()
        for waiting in list(self._queue):
            shares = self._fit(waiting) if kept.isdisjoint(waiting.reach) else None
            if shares is None:
                kept |= waiting.reach
                continue
            self._queue.remove(waiting)
            self._last += 1
            self._held[self._last] = _Held(
                waiting.client, waiting.number, dict(enumerate(shares)), waiting.grace_s, now_s
            )
            made.append(Grant(waiting.client, waiting.number, self._last, shares))
        moved = [(place, waiting) for place, waiting in enumerate(self._queue, 1) if waiting.place != place]
        moved.sort(key=lambda each: each[1].place != 0)  # who has just asked is told at once
        for place, waiting in moved[:TOLD]:
            waiting.place = place
            made.append(self._wait(waiting))
        self._forget()
        return made

    def _wait(self, waiting: _Waiting) -> Wait:
        return Wait(waiting.client, waiting.number, waiting.place, self._behind(waiting), self._lacking(waiting))

    def _behind(self, waiting: _Waiting) -> str:
        """Name the holders of, and the earlier requests for, the devices that a request could use."""
        mine = waiting.reach
        names = [held.client.name for _, held, share in self._shares() if share.device in mine]
        for other in self._queue:
            if other is waiting:
                break
            if not mine.isdisjoint(other.reach):
                names.append(other.client.name)
        names = list(dict.fromkeys(names))
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        return ", ".join(names[:_LISTED]) + more

    def _lacking(self, waiting: _Waiting) -> str:
        """Describe what a request lacks; empty where it waits for its turn only."""
        lack = lacking(waiting.wants, self._room(), self._offers)
        if lack:
            return lack
        shares = [share for _, held, share in self._shares() if held.client.key == waiting.client.key]
        over = self._over([*shares, *waiting.estimate])
        return f"room within your limits (with what you have, {over})" if over else ""

    def _waited_for_by_itself(self, held: _Held) -> bool:
        """Return whether another session of a lease's client waits for its devices."""
        devices = {share.device for share in held.shares.values()}
        return any(
            waiting.client.key == held.client.key
            and waiting.client != held.client
            and not devices.isdisjoint(waiting.reach)
            for waiting in self._queue
        )

    def _end(self, lease: int, cause: Literal["released", "silent", "time", "failed"], why: str) -> End:
        held = self._held[lease]
        held.ending = True
        return End(held.client, lease, cause, why)

    def _forget(self) -> None:
        """Remove the heartbeat times of clients without leases or requests."""
        here = {waiting.client for waiting in self._queue} | {held.client for held in self._held.values()}
        self._heard = {client: heard_s for client, heard_s in self._heard.items() if client in here}


__all__ = ["Client", "ClientLimits", "Decision", "Dequeue", "End", "Grant", "Leases", "Offered", "Refuse", "Wait"]
