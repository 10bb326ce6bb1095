"""A poller of many ZeroMQ sockets, in which a turn costs what the ready ones cost.

ZeroMQ's own poller asks each of its sockets in each turn, which makes the messages of `n` workers cost `n` squared. A
socket of ZeroMQ has a descriptor that is readable from a change of its state on until the socket is used or asked for
its events (``ZMQ_FD`` in ``zmq_getsockopt(3)``). So a socket is asked only after its descriptor was readable, and once
more after it was ready, unless its owner has done so, since messages may be left, or used otherwise, since that may
have hidden a change. After a
turn without anything all are asked, so that nothing waits longer than a turn.
"""

from __future__ import annotations

import selectors
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import zmq

Source = zmq.Socket[Any] | int
"""A socket of ZeroMQ, or a descriptor."""

_INPUT = int(zmq.POLLIN)

_FEW = 4
"""Most sockets that are asked one by one."""


class SocketPoller:
    """Poller of sockets and descriptors, each with an owner; used by one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._owners: dict[Source, Hashable] = {}
        self._descriptors: dict[zmq.Socket[Any], int] = {}
        self._doubtful: set[zmq.Socket[Any]] = set()

    def register(self, source: Source, owner: Hashable) -> None:
        """Poll a source for input from now on."""
        descriptor = source if isinstance(source, int) else int(source.getsockopt(zmq.FD))
        self._selector.register(descriptor, selectors.EVENT_READ, source)
        self._owners[source] = owner
        if not isinstance(source, int):
            self._descriptors[source] = descriptor
            self._doubtful.add(source)

    def unregister(self, source: Source) -> None:
        """Poll a source no longer; before it is closed.

        Raises:
            KeyError: It is not registered.
        """
        del self._owners[source]
        self._selector.unregister(source if isinstance(source, int) else self._descriptors.pop(source))
        if not isinstance(source, int):
            self._doubtful.discard(source)

    def touch(self, socket: zmq.Socket[Any]) -> None:
        """Note that a socket was used otherwise than to receive what was ready."""
        if socket in self._owners:
            self._doubtful.add(socket)

    def settle(self, socket: zmq.Socket[Any]) -> None:
        """Note that a socket was asked since it was used, and had nothing."""
        self._doubtful.discard(socket)

    def poll(self, timeout_ms: float) -> Mapping[Hashable, Collection[Source]]:
        """Wait until a source is ready, at most for a time; return the ready sources of each owner that has some."""
        ready = with_input(self._doubtful)
        found: dict[Hashable, set[Source]] = defaultdict(set)
        readable = self._selector.select(0 if ready else timeout_ms / 1000)
        changed: list[zmq.Socket[Any]] = []
        for key, _ in readable:
            source: Source = key.data
            if isinstance(source, int):
                found[self._owners[source]].add(source)
            else:
                changed.append(source)
        ready |= with_input(changed)
        idle = not readable and not ready
        self._doubtful = set(self._descriptors) if idle else ready
        for socket in ready:
            found[self._owners[socket]].add(socket)
        return found

    def close(self) -> None:
        """Free the poller's own descriptor. Idempotent."""
        self._selector.close()


def with_input(sockets: Collection[zmq.Socket[Any]]) -> set[zmq.Socket[Any]]:
    """Return the sockets for which a message has come: many by one call, a third of what it takes to ask each; few one
    by one, as that call lets go of the interpreter's lock."""
    if len(sockets) <= _FEW:
        return {socket for socket in sockets if has_input(socket)}
    return {socket for socket, _ in zmq.zmq_poll([(socket, _INPUT) for socket in sockets], 0)}


def has_input(socket: zmq.Socket[Any]) -> bool:
    """Return whether a message has come; the socket's own ``poll`` would make a poller for it."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _INPUT)
