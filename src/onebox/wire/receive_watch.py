"""Limit of the bytes that a peer sends without completing a message.

libzmq hands over a message of several parts when the last one has come, and until then counts neither its parts nor its
bytes: its limits are those of one part, and of complete messages in a queue. So the kernel's count of the bytes that
came over a TCP connection is read, and a connection that brings too many of them without a message is shut down, on
which libzmq frees what it holds of it. Sockets of one machine have no such count: at their other end is a process that
the user of this one has started. Descriptors are numbers that other sockets take once a connection has ended, before
the monitor says so; so each connection is known by the cookie that the kernel gives it, besides.

Connections on another system than Linux have no count either: a client there leaves it to the workers that it has
leased to complete their messages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import math
import os
import select
import socket as sockets
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

SMALL_BYTES = 1 << 20
"""Limit for channels of small messages: the agent's, and heartbeats."""

_BEGINNINGS = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_BATCH = 64
_CHECK_S = 1e-4  # time for each connection from one check to the next: some twenty times what it takes

_COOKIE = 57  # SO_COOKIE, since Linux 4.6

_RECEIVED = slice(128, 136)  # tcpi_bytes_received of struct tcp_info (linux/tcp.h), since Linux 4.1


class ConnectionEvent(NamedTuple):
    """An event of the monitor.

    Args:
        kind: One of ZeroMQ's ``EVENT_`` constants.
        value: The connection's descriptor, for most kinds; otherwise a number of ZeroMQ's.
    """

    kind: int
    value: int


class Overrun(NamedTuple):
    """A connection that has been shut down.

    Args:
        address: The peer's IP address.
        size_bytes: Bytes that came without a complete message.
    """

    address: str
    size_bytes: int


class ReceiveWatch:
    """Watch of the connections of one socket, to be made before it binds or connects.

    One thread owns it; :meth:`delivered` may be called from another one.

    Args:
        socket: The socket; it has no other monitor.
        connection_bytes: Limit of each connection.
        total_bytes: Limit of all connections; by default that of one.
        events: Further events of the monitor that :meth:`attend` returns.
    """

    def __init__(
        self,
        socket: zmq.Socket[Any],
        connection_bytes: int,
        *,
        total_bytes: int = 0,
        events: int = 0,
    ) -> None:
        self._socket = socket
        self._connection_bytes = connection_bytes
        self._total_bytes = max(total_bytes, connection_bytes)
        self._closed = False
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._base: dict[int, int] = {}  # bytes up to the last message, by descriptor
        self._cookies: dict[int, int] = {}
        self._pending: dict[int, int] = {}
        self._fresh: set[int] = set()
        self._any_fresh = False
        self._next_s = -math.inf
        self.monitor: zmq.Socket[Any] = socket.get_monitor_socket(events | _BEGINNINGS | _ENDS)

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable when many bytes come over a connection, until :meth:`check`; a few may come
        unnoticed. Linux only."""
        assert self._epoll is not None
        return self._epoll.fileno()

    @property
    def several(self) -> bool:
        """True if there are several connections: then :meth:`delivered` needs to know which one a message came over."""
        return len(self._base) > 1

    @property
    def pending_bytes(self) -> int:
        """Bytes that came without a complete message, over all connections."""
        return sum(self._pending.values())

    def delivered(self, connection: int | None = None) -> None:
        """Record that a message has been received.

        Args:
            connection: Its connection, see :func:`connection_of`; not needed for the only one.
        """
        if connection is None:
            self._any_fresh = True
        else:
            self._fresh.add(connection)

    def attend(self) -> list[ConnectionEvent]:
        """Process the monitor's events up to a limit, and return them."""
        events: list[ConnectionEvent] = []
        while len(events) < _BATCH and self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            kind, descriptor = int(event["event"]), int(event["value"])
            events.append(ConnectionEvent(kind, descriptor))
            if kind & (_BEGINNINGS | _ENDS):
                self._forget(descriptor)
            if kind & _BEGINNINGS and _is_of(descriptor, kind, event["endpoint"]):
                self._add(descriptor)
        return events

    def check(self, now_s: float) -> list[Overrun]:
        """Shut down the connections that are over a limit, and return them; best after messages have been received.

        Many connections are not looked at each time, as each takes some microseconds.
        """
        if self._epoll is None:
            return []
        self._epoll.poll(0)
        if now_s < self._next_s:
            return []
        self._next_s = now_s + _CHECK_S * len(self._base)
        fresh, self._fresh = self._fresh, set()
        any_fresh, self._any_fresh = self._any_fresh, False
        if any_fresh and not self.several:
            fresh |= self._base.keys()
        for descriptor in list(self._base):
            received = _received_bytes(descriptor)
            if received is None or _cookie(descriptor) != self._cookies[descriptor]:
                self._forget(descriptor)
                continue
            if descriptor in fresh:
                self._base[descriptor] = received
            self._pending[descriptor] = received - self._base[descriptor]
        found: list[Overrun] = []
        while max(self._pending.values(), default=0) > self._connection_bytes or self.pending_bytes > self._total_bytes:
            found += self.cut_largest()
        return found

    def cut_largest(self) -> list[Overrun]:
        """Shut down the connection that has brought most without a message; return it, unless it has ended."""
        if not self._pending:
            return []
        descriptor, size_bytes = max(self._pending.items(), key=lambda item: item[1])
        address = _shut(descriptor, self._cookies[descriptor])
        self._forget(descriptor)
        return [] if address is None else [Overrun(address, size_bytes)]

    def close(self) -> None:
        """End the monitor; before the socket is closed. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._epoll is not None:
                self._epoll.close()
            self._socket.disable_monitor()
            self.monitor.close(0)

    def _add(self, descriptor: int) -> None:
        if self._epoll is None or _received_bytes(descriptor) is None:
            return
        with contextlib.suppress(OSError):  # closed meanwhile
            self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)
            self._base[descriptor] = 0
            self._cookies[descriptor] = _cookie(descriptor)

    def _forget(self, descriptor: int) -> None:
        self._base.pop(descriptor, None)
        self._cookies.pop(descriptor, None)
        self._pending.pop(descriptor, None)
        if self._epoll is not None:
            with contextlib.suppress(OSError, ValueError):  # the kernel forgets a closed descriptor by itself
                self._epoll.unregister(descriptor)


def connection_of(part: zmq.Frame) -> int:
    """Return the descriptor of the connection that a part came over; -1 if libzmq does not tell."""
    try:
        return int(part.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError, TypeError):
        return -1


def socket_of(descriptor: int) -> sockets.socket:
    """Return a socket object for a connection that a library or another thread owns, to be closed by the caller.

    Raises:
        OSError: The owner has closed it; the descriptor may be that of a file by now.
    """
    copy = os.dup(descriptor)
    try:
        return sockets.socket(fileno=copy)  # of the right family, which addresses depend on
    except OSError:
        os.close(copy)
        raise


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _received_bytes(descriptor: int) -> int | None:
    """Return the bytes that a TCP connection has brought; ``None`` if it has ended, or is a socket of this machine.

    No object is made for it, which would need another descriptor: a stranger may have used them up.
    """
    info, size = ctypes.create_string_buffer(_RECEIVED.stop), ctypes.c_uint32(_RECEIVED.stop)
    failed = _libc().getsockopt(descriptor, sockets.IPPROTO_TCP, sockets.TCP_INFO, info, ctypes.byref(size))
    return None if failed or size.value < _RECEIVED.stop else int.from_bytes(info.raw[_RECEIVED], "little")


def _cookie(descriptor: int) -> int:
    """Return what the kernel tells a socket apart by, from all others that there are or were; 0 for no socket."""
    cookie, size = ctypes.c_uint64(), ctypes.c_uint32(ctypes.sizeof(ctypes.c_uint64))
    failed = _libc().getsockopt(descriptor, sockets.SOL_SOCKET, _COOKIE, ctypes.byref(cookie), ctypes.byref(size))
    return 0 if failed else cookie.value


def _is_of(descriptor: int, kind: int, endpoint: bytes) -> bool:
    """Return whether a descriptor still is what an event tells of, by the port of the event's endpoint; another socket
    may have it by now. Without a port, or a descriptor to look with, it is taken for that."""
    _, _, port = endpoint.rpartition(b":")
    if not port.isdigit():
        return True
    try:
        copy = os.dup(descriptor)
    except OSError as error:
        return error.errno != errno.EBADF
    try:
        with sockets.socket(fileno=copy) as found:
            address = found.getsockname() if kind & zmq.EVENT_ACCEPTED else found.getpeername()
    except OSError:
        return False
    return isinstance(address, tuple) and address[1] == int(port)


def _shut(descriptor: int, cookie: int) -> str | None:
    """Shut down a connection; return the peer's address, or ``None`` if it has ended."""
    try:
        with socket_of(descriptor) as found:  # which stays what it is
            if _cookie(found.fileno()) != cookie or found.getsockopt(sockets.SOL_SOCKET, sockets.SO_ACCEPTCONN):
                return None
            address = str(found.getpeername()[0])
            found.shutdown(sockets.SHUT_RDWR)
            return address
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE) or _cookie(descriptor) != cookie:
            return None
        return None if _libc().shutdown(descriptor, sockets.SHUT_RDWR) else "unknown"


__all__ = ["SMALL_BYTES", "ConnectionEvent", "Overrun", "ReceiveWatch", "connection_of", "socket_of"]
