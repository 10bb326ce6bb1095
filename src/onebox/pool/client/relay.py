"""The thread of a client that relays connections between workers which cannot connect to each other.

It connects to the listeners of both and hands on the bytes of their TLS, which only they can read. A connection holds
at most one chunk for each direction: as long as one end does not read, nothing is read from the other, whose TCP then
waits. So the workers' own limits are those of a direct connection.
"""

from __future__ import annotations

import errno
import hmac
import logging
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from onebox.pool.client.relay_routes import RelayEnd, RelayFlow, RelayRoute
from onebox.wire.relay_greeting import REPLY_BYTES, greeting_reply

_LOG = logging.getLogger("onebox")

CHUNK_BYTES = 1 << 18
"""Most bytes that wait in one direction of a connection."""

MOST_CONNECTIONS = 1024
"""Most connections that are relayed at a time."""

ATTEMPT_S = 2.5
"""Time limit of one attempt to connect to both workers: less than a handshake at the second one may take."""

OPEN_S = 20.0
"""Time after which a connection that could not be made is given up: as long as its workers wait for it."""

LINGER_S = 10.0
"""Time for which what was sent before a group's end is still handed on."""

_RETRY_S = 0.2
_TICK_S = 0.1

_IDLE_OPTIONS = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))
"""Keep the connection in the tables of routers and firewalls on the way."""


class _Side:
    """The connection to one of the two workers.

    Args:
        end: The worker.
    """

    def __init__(self, end: RelayEnd) -> None:
        self.end = end
        self.greeted = False
        """True if the worker has replied to the greeting."""
        self._sent = False
        self._reply = b""
        self.socket = socket.socket(socket.AF_INET6 if ":" in end.address else socket.AF_INET)

    def begin(self) -> None:
        """Begin to connect.

        Raises:
            OSError: It cannot.
        """
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in _IDLE_OPTIONS:
            if hasattr(socket, name):
                self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        begun = self.socket.connect_ex((self.end.address, self.end.port))
        if begun not in (0, errno.EINPROGRESS):
            raise OSError(begun, errno.errorcode.get(begun, "error"))

    @property
    def events(self) -> int:
        """The events to wait for until the worker has replied."""
        return selectors.EVENT_READ if self._sent else selectors.EVENT_WRITE

    def go_on(self) -> None:
        """Go on with the greeting.

        Raises:
            OSError: Nobody is there, or another than the worker.
        """
        greeting = self.end.greeting.encode(self.end.token)
        if not self._sent:
            failed = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, errno.errorcode.get(failed, "error"))
            self.socket.send(greeting)
            self._sent = True
            return
        received = self.socket.recv(REPLY_BYTES - len(self._reply))
        self._reply += received
        if not received:
            raise ConnectionError("it closes the connection")
        if len(self._reply) == REPLY_BYTES:
            if not hmac.compare_digest(self._reply, greeting_reply(self.end.token, greeting)):
                raise ConnectionError("another program listens there")
            self.greeted = True


class _RelayedConnection:
    """A connection between two workers.

    Args:
        route: Its ends.
        selector: Where its sockets are registered.
        established: Called once both ends are connected.
    """

    def __init__(
        self, route: RelayRoute, selector: selectors.BaseSelector, established: Callable[[RelayRoute], None]
    ) -> None:
        self.route = route
        self.end_s = time.monotonic() + OPEN_S
        """Time at which it is closed, whatever happens."""
        self.again_s = -math.inf
        """Time of the next attempt, or end of the present one, until it is established."""
        self.why = ""
        """The failure of the last attempt."""
        self._selector = selector
        self._established = established
        self._sides: list[_Side] = []
        self._flows: tuple[RelayFlow, RelayFlow] = RelayFlow(), RelayFlow()  # to the target, and back
        self._events: dict[socket.socket, int] = {}

    @property
    def open(self) -> bool:
        """True once both ends are connected."""
        return self.again_s == math.inf

    @property
    def finished(self) -> bool:
        """True once both directions have ended."""
        return all(flow.finished for flow in self._flows)

    def attempt(self, now_s: float) -> None:
        """Begin to connect to the source; it waits then until the target is connected, too."""
        if self._sides:
            end = self._sides[-1].end
            self.why = f"no answer at {end.address}, port {end.port}"
        self._drop_sides()
        self.again_s = now_s + ATTEMPT_S
        self._guarded(lambda: self._connect(self.route.source))

    def ready(self, which: socket.socket, events: int) -> None:
        """Go on with a socket that is ready."""
        if self._events.get(which):  # else it was closed meanwhile
            self._guarded(lambda: self._forward(which, events) if self.open else self._greet())

    def close(self) -> None:
        """Close it. Idempotent."""
        self._drop_sides()
        self.end_s = -math.inf

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._register()
        except BlockingIOError:
            pass
        except OSError as error:
            was_open = self.open
            if not was_open and self._sides:
                end = self._sides[-1].end
                self.why = f"{end.address}, port {end.port}: {error.strerror or error}"
            self._drop_sides()
            if was_open:
                self.end_s = -math.inf
            else:
                self.again_s = min(self.again_s, time.monotonic() + _RETRY_S)

    def _connect(self, end: RelayEnd) -> None:
        side = _Side(end)
        self._sides.append(side)
        side.begin()

    def _greet(self) -> None:
        side = self._sides[-1]
        side.go_on()
        if side.greeted and len(self._sides) == 1:
            self._connect(self.route.target)
        elif side.greeted:
            self.again_s = self.end_s = math.inf
            self._established(self.route)

    def _forward(self, which: socket.socket, events: int) -> None:
        """Read from a socket, or write to it, or both."""
        number = 0 if which is self._sides[0].socket else 1
        outward, inward = self._flows[number], self._flows[1 - number]  # from it, and to it
        other = self._sides[1 - number].socket
        if events & selectors.EVENT_WRITE:
            self._write(inward, which)
        if events & selectors.EVENT_READ and outward.readable:
            outward.read(which.recv(CHUNK_BYTES))
            self._write(outward, other)

    def _write(self, flow: RelayFlow, to: socket.socket) -> None:
        if flow.waiting:
            with suppress(BlockingIOError):
                flow.written(to.send(flow.waiting))
        if flow.finished:
            to.shutdown(socket.SHUT_WR)

    def _register(self) -> None:
        """Wait for what each socket has to do next."""
        wanted: dict[socket.socket, int] = {}
        if self.open:
            for number, side in enumerate(self._sides):
                reads, writes = self._flows[number].readable, bool(self._flows[1 - number].waiting)
                wanted[side.socket] = selectors.EVENT_READ * reads | selectors.EVENT_WRITE * writes
        elif self._sides:
            wanted[self._sides[-1].socket] = self._sides[-1].events
        for each in [*self._events, *wanted]:
            before, now = self._events.get(each, 0), wanted.get(each, 0)
            if before and not now:
                self._selector.unregister(each)
            elif now and not before:
                self._selector.register(each, now, self)
            elif now != before:
                self._selector.modify(each, now, self)
            self._events[each] = now

    def _drop_sides(self) -> None:
        for each, events in self._events.items():
            if events:
                self._selector.unregister(each)
        self._events.clear()
        for side in self._sides:
            side.socket.close()
        self._sides.clear()


class Relay:
    """Relayed connections, and the thread that serves them, which starts with the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._bell, self._heard = socket.socketpair()
        self._bell.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="onebox-relay", daemon=True)
        self._selector = selectors.DefaultSelector()
        self._connections: list[_RelayedConnection] = []
        self._hosts: set[tuple[str, str]] = set()  # pairs that the user knows of
        self._closed = False

    def open(self, route: RelayRoute) -> None:
        """Begin to relay a connection."""
        with self._lock:
            if not self._closed and self._thread.ident is None:
                self._thread.start()
        self._call(lambda: self._open(route))

    def end(self, group: int) -> None:
        """End the connections of a group, after what was sent before has been handed on."""
        self._call(lambda: self._end(group))

    def close(self) -> None:
        """End everything. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._thread.ident is not None:
            with suppress(BlockingIOError):  # it has been woken up then
                self._bell.send(b"\0")
            self._thread.join(LINGER_S)
        if not self._thread.is_alive():
            self._selector.close()
            self._bell.close()
            self._heard.close()

    def _call(self, action: Callable[[], None]) -> None:
        """Run a function in the thread, if it has been started."""
        with self._lock:
            if self._thread.ident is None or self._closed:
                return
            self._calls.append(action)
            with suppress(BlockingIOError):
                self._bell.send(b"\0")

    # ---- the thread

    def _run(self) -> None:
        self._selector.register(self._heard, selectors.EVENT_READ)
        try:
            while not self._closed:
                hurried = any(not each.open or each.end_s < math.inf for each in self._connections)
                for key, events in self._selector.select(_TICK_S if hurried else None):
                    if key.data is None:
                        self._heard.recv(CHUNK_BYTES)
                    else:
                        key.data.ready(key.fileobj, events)
                while self._calls:
                    self._calls.popleft()()
                self._look(time.monotonic())
        finally:
            for each in self._connections:
                each.close()

    def _open(self, route: RelayRoute) -> None:
        if len(self._connections) >= MOST_CONNECTIONS:
            _LOG.warning("this client relays %d connections between workers already; no more", MOST_CONNECTIONS)
            return
        made = _RelayedConnection(route, self._selector, self._tell)
        self._connections.append(made)
        made.attempt(time.monotonic())

    def _end(self, group: int) -> None:
        for each in self._connections:
            if each.route.group == group:
                each.end_s = min(each.end_s, time.monotonic() + (LINGER_S if each.open else 0.0))

    def _look(self, now_s: float) -> None:
        """End what is complete or late, and try again what has failed."""
        for each in list(self._connections):
            if each.finished or now_s >= each.end_s:
                if not each.open and each.why:
                    source, target = each.route.source.place, each.route.target.place
                    _LOG.warning("this client cannot connect %s with %s either: %s", source, target, each.why)
                each.close()
                self._connections.remove(each)
            elif now_s >= each.again_s:
                each.attempt(now_s)

    def _tell(self, route: RelayRoute) -> None:
        """Log which hosts cannot reach each other, once."""
        source, target = route.source.place.host, route.target.place.host
        if (source, target) not in self._hosts:
            self._hosts.add((source, target))
            _LOG.warning(
                "workers of %s cannot connect to those of %s (%s): their tensors go through this client, which is "
                "slower and cannot read them; for the direct way let them through to the ports of workers there (a "
                "firewall), or advertise another address (onebox serve --advertise)",
                source,
                target,
                route.target.address,
            )
