"""Connections between workers that cannot connect to each other, which the client relays.

It connects to the listeners of both and hands on the bytes of their TLS, which only they can read: in threads, one for
each direction, that hold one chunk each. As long as one end does not read, nothing is read from the other, whose TCP
then waits. So the workers' own limits are those of a direct connection.
"""

from __future__ import annotations

import hmac
import logging
import math
import mmap
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

from onebox.pool.errors import WorkerLocation
from onebox.wire.group_listener import PROOF_BYTES, Greeting, GroupListener, greeting_reply

_LOG = logging.getLogger("onebox")

CHUNK_BYTES = 1 << 18
"""Most bytes that wait in one direction of a connection."""

MOST_CONNECTIONS = 1024
"""Most connections that are relayed at a time."""

ATTEMPTS = 8
"""Most connections from one rank of a group to another one, of which all but the last have failed."""

ATTEMPT_S = 2.5
"""Time limit of one attempt to connect to both workers: less than the first one waits for its peer to begin."""

OPEN_S = 20.0
"""Time after which a connection that could not be made is given up: as long as its workers wait for it."""

LINGER_S = 10.0
"""Time for which what was sent before a group's end is still handed on."""

_RETRY_S = 0.2
_THREAD = "onebox-relay"

_IDLE_OPTIONS = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))
"""Keep the connection in the tables of routers and firewalls on the way."""


class RelayEnd(NamedTuple):
    """One end of a relayed connection.

    Args:
        place: The worker.
        rank: Its rank in the group.
        address: The address of its host by which the client reaches it.
        listener: Its listener.
    """

    place: WorkerLocation
    rank: int
    address: str
    listener: GroupListener


class _RelayedConnection:
    """A connection between two workers.

    Args:
        group: The group.
        source: The worker that has asked for it, and writes to it.
        target: Its peer.
    """

    def __init__(self, group: int, source: RelayEnd, target: RelayEnd) -> None:
        self.group, self.source, self.target = group, source, target
        self.established = False
        self.end_s = math.inf
        """Time at which it is closed, whatever happens."""
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._closed = threading.Event()

    def close(self) -> None:
        """End the waits of the threads that use it. Idempotent."""
        with self._lock:
            self._closed.set()
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def connect(self) -> bool:
        """Connect to the target, and then to the source, which goes on with it; return whether that was possible."""
        source, target, give_up_s = self.source, self.target, time.monotonic() + OPEN_S
        greetings = (target, Greeting(False, source.rank)), (source, Greeting(True, target.rank))
        while True:
            end_s, why = time.monotonic() + ATTEMPT_S, ""
            for end, greeting in greetings:
                where = f"{end.address}, port {end.listener.port}"
                try:
                    self._greet(end, greeting, end_s)
                except TimeoutError:
                    why = f"no answer at {where}"
                    break
                except OSError as error:
                    why = f"{where}: {error.strerror or error}"
                    break
            if not why:
                self.established = True
                return True
            self.drop()
            if time.monotonic() > give_up_s:
                _LOG.warning("this client cannot connect %s with %s either: %s", source.place, target.place, why)
                return False
            if self._closed.wait(_RETRY_S):
                return False

    def _greet(self, end: RelayEnd, greeting: Greeting, end_s: float) -> None:
        """Connect to a worker.

        Raises:
            OSError: Nobody is there in time, or another than the worker.
        """
        said, reply = greeting.encode(end.listener.secret), b""
        found = socket.socket(socket.AF_INET6 if ":" in end.address else socket.AF_INET)
        with self._lock:
            self._sockets.append(found)
            if self._closed.is_set():
                raise ConnectionError("the group has ended")
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in _IDLE_OPTIONS:
            if hasattr(socket, name):
                found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        found.settimeout(_left_s(end_s))
        found.connect((end.address, end.listener.port))
        found.sendall(said)
        while len(reply) < PROOF_BYTES:
            found.settimeout(_left_s(end_s))
            received = found.recv(PROOF_BYTES - len(reply))
            if not received:
                raise ConnectionError("it closes the connection")
            reply += received
        if not hmac.compare_digest(reply, greeting_reply(end.listener.secret, said)):
            raise ConnectionError("another program listens there")
        found.settimeout(None)

    def carry(self) -> int:
        """Hand on what both send, until both have ended; return the bytes from the source to the target."""
        target, source = self._sockets
        back = threading.Thread(target=self._carry, args=(target, source), name=_THREAD, daemon=True)
        back.start()
        carried = self._carry(source, target)
        back.join()
        return carried

    def _carry(self, source: socket.socket, target: socket.socket) -> int:
        """Hand on what one end sends, and its end; return the bytes."""
        buffer, carried = memoryview(mmap.mmap(-1, CHUNK_BYTES)), 0  # takes memory as far as it is used
        try:
            while count := source.recv_into(buffer):
                target.sendall(buffer[:count])
                carried += count
            target.shutdown(socket.SHUT_WR)
        except OSError:  # one end is gone, which is the end for the other one
            self.close()
        return carried

    def drop(self) -> None:
        """Close its sockets, which no thread uses any more."""
        with self._lock:
            for each in self._sockets:
                each.close()
            self._sockets.clear()


class Relay:
    """The relayed connections of a client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[_RelayedConnection, threading.Thread] = {}
        self._attempts: Counter[tuple[int, int, int]] = Counter()  # by group and ranks
        self._hosts: set[tuple[str, str]] = set()  # pairs that the user knows of
        self._closed = False

    def open(self, group: int, source: RelayEnd, target: RelayEnd) -> None:
        """Begin to relay a connection of a group, from one end to the other, unless that was tried too often."""
        pair = group, source.rank, target.rank
        with self._lock:
            if self._closed or self._attempts[pair] >= ATTEMPTS:
                return
            self._attempts[pair] += 1
            if len(self._connections) >= MOST_CONNECTIONS:
                _LOG.warning("this client relays %d connections between workers already; no more", MOST_CONNECTIONS)
                return
            made = _RelayedConnection(group, source, target)
            thread = threading.Thread(target=self._run, args=(made,), name=_THREAD, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # this host has no more threads
                _LOG.warning("this client cannot relay between workers: %s", error)
                return
            self._connections[made] = thread

    def end(self, group: int) -> None:
        """End the connections of a group, after what was sent before has been handed on."""
        with self._lock:
            for pair in [pair for pair in self._attempts if pair[0] == group]:
                del self._attempts[pair]
            for each in self._connections:
                if each.group == group:
                    each.end_s = min(each.end_s, time.monotonic() + (LINGER_S if each.established else 0.0))

    def look(self, now_s: float) -> None:
        """Close the connections whose group has ended, and whose workers do not; called now and then."""
        with self._lock:
            for each in self._connections:
                if now_s >= each.end_s:
                    each.close()

    def close(self) -> None:
        """End everything. Idempotent."""
        with self._lock:
            self._closed = True
            connections = self._connections.copy()
        for each in connections:
            each.close()
        end_s = time.monotonic() + LINGER_S
        for thread in connections.values():
            thread.join(_left_s(end_s))

    # ---- the threads

    def _run(self, made: _RelayedConnection) -> None:
        try:
            if made.connect():
                self._tell(made.source, made.target)
                carried = made.carry()
                _LOG.info("relayed %d bytes from %s to %s", carried, made.source.place, made.target.place)
        finally:
            made.drop()
            with self._lock:
                del self._connections[made]

    def _tell(self, source: RelayEnd, target: RelayEnd) -> None:
        """Log which hosts cannot reach each other, once."""
        hosts = source.place.host, target.place.host
        with self._lock:
            if hosts in self._hosts:
                return
            self._hosts.add(hosts)
        _LOG.warning(
            "workers of %s cannot connect to those of %s (%s): their tensors go through this client, which is "
            "slower and cannot read them; for the direct way let them through to the ports of workers there (a "
            "firewall), or advertise another address (onebox serve --advertise)",
            *hosts,
            target.address,
        )


def _left_s(end_s: float) -> float:
    """Return the seconds until a time, at least a few: with none a socket would not wait at all."""
    return max(0.001, end_s - time.monotonic())
