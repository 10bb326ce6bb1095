"""Relayed connections that workers ask for: which listeners of a group the client connects with each other. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from onebox.errors import WireError
from onebox.pool.errors import WorkerLocation
from onebox.wire.protocol.responses import Listening, RelayRequest
from onebox.wire.relay_greeting import TOKEN_BYTES, Greeting

ATTEMPTS = 8
"""Most connections from one rank of a group to another one, of which all but the last have failed."""

_PORTS = range(1024, 1 << 16)  # a confined worker listens at none below


class RelayEnd(NamedTuple):
    """One end of a relayed connection: a worker's listener, and the greeting there.

    Args:
        place: The worker.
        address: The address of its host by which the client reaches it.
        port: The port of its listener.
        token: The listener's token.
        greeting: The greeting.
    """

    place: WorkerLocation
    address: str
    port: int
    token: bytes
    greeting: Greeting

    def __repr__(self) -> str:  # without the token
        return f"RelayEnd({self.place}, {self.address}, {self.port})"


class RelayRoute(NamedTuple):
    """A connection that the client relays.

    Args:
        group: The group.
        source: The worker that has asked for it, and writes to it.
        target: Its peer.
    """

    group: int
    source: RelayEnd
    target: RelayEnd


class _Listener(NamedTuple):
    place: WorkerLocation
    address: str
    port: int
    token: bytes


@dataclass
class RelayRoutes:
    """Listeners and requests by group; a request is served once both ends listen, a few times in all."""

    _listeners: dict[int, dict[int, _Listener]] = field(default_factory=dict)
    _waiting: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    _served: dict[int, Counter[tuple[int, int]]] = field(default_factory=dict)

    def take(
        self, place: WorkerLocation, address: str, members: Sequence[int], message: Listening | RelayRequest
    ) -> list[RelayRoute]:
        """Process a worker's message and return the connections that can be relayed now.

        Args:
            place: The worker.
            address: The address of its host by which the client reaches it.
            members: The workers of the group, by rank; empty if it is dissolved.
            message: The message.

        Raises:
            WireError: It names a port that no worker listens at, another listener than before, or a peer that is none.
        """
        group = message.group
        if place.worker not in members:
            return []  # of a group that was dissolved meanwhile
        rank = members.index(place.worker)
        if isinstance(message, Listening):
            listeners = self._listeners.setdefault(group, {})
            if message.port not in _PORTS or len(message.token) != TOKEN_BYTES or rank in listeners:
                raise WireError(f"{place} does not say once where it listens for group {group}: port {message.port}")
            listeners[rank] = _Listener(place, address, message.port, message.token)
        else:
            if message.peer == rank or not 0 <= message.peer < len(members):
                raise WireError(f"{place}, rank {rank} of {len(members)}, asks for a relay to rank {message.peer}")
            self._waiting.setdefault(group, set()).add((rank, message.peer))
        return self._ready(group)

    def forget(self, group: int) -> None:
        """Drop a group."""
        self._listeners.pop(group, None)
        self._waiting.pop(group, None)
        self._served.pop(group, None)

    def _ready(self, group: int) -> list[RelayRoute]:
        listeners, served = self._listeners.get(group, {}), self._served.setdefault(group, Counter())
        waiting = self._waiting.get(group, set())
        ready = sorted(pair for pair in waiting if all(rank in listeners for rank in pair))
        waiting.difference_update(ready)
        routes = []
        for source, target in ready:
            if served[source, target] < ATTEMPTS:
                served[source, target] += 1
                ends = (
                    RelayEnd(*listeners[source], Greeting(True, target)),
                    RelayEnd(*listeners[target], Greeting(False, source)),
                )
                routes.append(RelayRoute(group, *ends))
        return routes


@dataclass
class RelayFlow:
    """One direction of a relayed connection: nothing is read from one end before all has been written to the other."""

    waiting: memoryview = field(default_factory=lambda: memoryview(b""))
    """Bytes that have been read and not yet written."""
    ended: bool = False
    """Set once the end that is read has closed its side."""

    @property
    def readable(self) -> bool:
        """True while more may be read."""
        return not self.ended and not self.waiting

    @property
    def finished(self) -> bool:
        """True once everything has been read and written."""
        return self.ended and not self.waiting

    def read(self, data: bytes) -> None:
        """Take what was read; nothing at the end."""
        self.waiting, self.ended = memoryview(data), not data

    def written(self, count: int) -> None:
        """Drop what was written."""
        self.waiting = self.waiting[count:]
