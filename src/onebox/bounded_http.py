"""A server of HTTP for small answers, whose clients cannot keep each other out.

Connections are bounded in number and in the time that their request may take, and the oldest one that has asked for
nothing yet makes room for a new one. A name that is not of this server in the header ``Host`` is refused, so that no
page of a browser reaches it under a name of its own (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from socketserver import TCPServer
from typing import Any

CONNECTIONS = 64
"""The most connections at once."""

REQUEST_S = 10.0
"""Longest time from a connection to its whole request, however slowly that comes, and longest wait while it takes its
answer."""

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
"""Names of this machine for itself; a tunnel may have another port."""


def names_host(header: str, names: frozenset[str], *, addresses: bool = False) -> bool:
    """Return whether a header ``Host`` has one of some names, with any port.

    Args:
        header: The header; empty where there is none.
        names: The names, in lower case.
        addresses: Whether every IP address will do, too: no foreign page has one as its name.

    Example:
        >>> names_host("LOCALHOST:8080", LOOPBACK), names_host("[::1]", LOOPBACK), names_host("a.example", LOOPBACK)
        (True, True, False)
    """
    bare = header.strip().lower()
    host, _, port = bare.rpartition(":")
    if not (port.isascii() and port.isdigit()) or (":" in host and not host.endswith("]")):
        host = bare
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if host in names:
        return True
    with contextlib.suppress(ValueError):
        return addresses and bool(ip_address(host))
    return False


class BoundedServer(ThreadingHTTPServer):
    """The server; each connection has a thread, which ends with it.

    Args:
        address: IP address and port.
        handler: Its requests; it calls :meth:`accept` for one that is answered.
    """

    daemon_threads = True
    request_queue_size = 32
    allow_reuse_address = os.name != "nt"  # on Windows two servers would get the same port

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._asking: dict[socket.socket, float] = {}  # since when, the oldest first
        self._accepted: set[socket.socket] = set()
        self._lock = threading.Condition()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without asking for the host's name, as the base class does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def accept(self, request: socket.socket) -> None:
        """Let a connection take the time that its answer takes: what it has asked for is granted."""
        with self._lock:
            if self._asking.pop(request, None) is not None:
                self._accepted.add(request)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread of its own; where there are too many, hang up on the oldest that has asked
        for nothing yet, or else on this one."""
        with self._lock:
            if len(self._asking) + len(self._accepted) >= CONNECTIONS:
                if not self._asking:
                    self.shutdown_request(request)
                    return
                _hang_up(next(iter(self._asking)))
                del self._asking[next(iter(self._asking))]
            self._asking[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Hang up on those whose request takes too long; called regularly."""
        with self._lock:
            late_s = time.monotonic() - REQUEST_S
            for request in [one for one, since_s in self._asking.items() if since_s < late_s]:
                _hang_up(request)

    def close_request(self, request: Any) -> None:
        """Close a connection."""
        super().close_request(request)
        with self._lock:
            self._asking.pop(request, None)
            self._accepted.discard(request)
            self._lock.notify_all()

    def end_connections(self, within_s: float) -> None:
        """Let the connections end by themselves for a moment, then hang up.

        Args:
            within_s: Longest wait.
        """

        def none_left() -> bool:
            return not self._asking and not self._accepted

        with self._lock:
            if not self._lock.wait_for(none_left, within_s / 5):
                for request in (*self._asking, *self._accepted):
                    _hang_up(request)
                self._lock.wait_for(none_left, within_s)


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


__all__ = ["CONNECTIONS", "LOOPBACK", "REQUEST_S", "BoundedServer", "names_host"]
