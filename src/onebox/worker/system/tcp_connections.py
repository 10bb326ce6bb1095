"""Sockets of groups, which can be shut down from another thread to end waits for a silent peer.

Gloo waits for a peer until its connection ends, which does not happen if the host is disconnected or the process is
stopped. Aborting a group does not end its waits; shutting down its connections does, but for a tensor of which a part
has come, whose wait nothing ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from onebox.wire import socket_of

_FOLDER = "/proc/self/fd"

_MOVED = struct.Struct("=120xQQ")
"""Of ``struct tcp_info`` in ``linux/tcp.h``: bytes_acked and bytes_received."""

_scanning = threading.RLock()
"""Held while one thread looks at the sockets by duplicates of their descriptors: another one might find these in place
of the originals, and nothing a moment later."""

Address = tuple[Any, ...]
"""An address with a port, as of :meth:`socket.socket.getsockname`."""


class ConnectionState(NamedTuple):
    """State of the connections of a group.

    Args:
        ended: Whether one of them has ended.
        moved_bytes: Bytes that have come over the others, and that their other ends have acknowledged.
    """

    ended: bool
    moved_bytes: int


class GroupSockets:
    """TCP connections of this process by group: those that are new after the group has been formed.

    One thread forms groups in sequence; another may shut them down meanwhile.

    Example:
        >>> sockets = GroupSockets()
        >>> with sockets.making(1):
        ...     ours, theirs = socket.socketpair()
        >>> sockets.shut(1)
        0
        >>> ours.close(), theirs.close()
        (None, None)
    """

    def __init__(self) -> None:
        self._made: dict[int, dict[str, int]] = {}
        self._connected: dict[int, frozenset[str]] = {}
        self._before: dict[str, int] = {}
        self._ports: set[int] = set()
        self._making: int | None = None

    @contextlib.contextmanager
    def making(self, group: int) -> Iterator[None]:
        """Assign sockets created in the context to a group."""
        with _scanning:
            self._before = _open()
            self._ports = {port for port, listens in map(_port, self._before.values()) if listens}
        self._making = group
        try:
            yield
            self._made[group] = made = self._new()
            self._connected[group] = frozenset(own_connections().keys() & made.keys())
        finally:
            self._making = None

    def forget(self, group: int) -> None:
        """Record that a group has been closed."""
        self._made.pop(group, None)
        self._connected.pop(group, None)

    def state(self, group: int) -> ConnectionState:
        """Return the state of a group's connections."""
        made, open_ = self._made.get(group, {}), dict[str, int]()
        with _scanning:
            for name, descriptor in made.items():
                with contextlib.suppress(OSError):
                    if os.readlink(f"{_FOLDER}/{descriptor}") == name:
                        open_[name] = descriptor
            moved = sum(map(_moved_bytes, open_.values()))
        return ConnectionState(not self._connected.get(group, frozenset()) <= open_.keys(), moved)

    def shut(self, group: int) -> int:
        """Shut down the connections of a group, and return their number; callable from any thread."""
        mine = self._new() if group == self._making else self._made.get(group, {})
        with _scanning:
            return sum(_shut(name, descriptor) for name, descriptor in mine.items())

    def _new(self) -> dict[str, int]:
        """Return the sockets created since the latest group was begun; the client may have reconnected meanwhile."""
        with _scanning:
            new = {name: descriptor for name, descriptor in _open().items() if name not in self._before}
            return {name: descriptor for name, descriptor in new.items() if _port(descriptor)[0] not in self._ports}


def own_connections() -> dict[str, tuple[Address, Address]]:
    """Return the TCP connections of this process: from unique name to the addresses of both ends."""
    found = {}
    with _scanning:
        for name, descriptor in _open().items():
            with contextlib.suppress(OSError), socket_of(descriptor) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6):
                    found[name] = (each.getsockname(), each.getpeername())
    return found


def shut_down(name: str) -> bool:
    """Shut down a connection of :func:`own_connections` if it still exists."""
    with _scanning:
        descriptor = _open().get(name)
        return descriptor is not None and _shut(name, descriptor)


def listeners(address: str) -> dict[str, int]:
    """Return the sockets of this process that listen at an IP address: from unique name to descriptor."""
    found = {}
    with _scanning:
        for name, descriptor in _open().items():
            with contextlib.suppress(OSError), socket_of(descriptor) as each:
                if _port(descriptor)[1] and each.getsockname()[0] == address:
                    found[name] = descriptor
    return found


def epoll_sets() -> dict[int, set[int]]:
    """Return the epoll instances of this process: from descriptor to the descriptors that are watched."""
    found = {}
    for entry in os.listdir(_FOLDER):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"{_FOLDER}/{entry}") == "anon_inode:[eventpoll]":
                lines = Path(f"/proc/self/fdinfo/{entry}").read_text(encoding="ascii").splitlines()
                found[int(entry)] = {int(line.split()[1]) for line in lines if line.startswith("tfd:")}
    return found


def _moved_bytes(descriptor: int) -> int:
    """Return the bytes that have come over a TCP connection, and that its other end has acknowledged; 0 for others."""
    with contextlib.suppress(OSError, struct.error), socket_of(descriptor) as found:
        return sum(_MOVED.unpack(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MOVED.size)))
    return 0


def _port(descriptor: int) -> tuple[int, bool]:
    """Return the local port of a TCP socket, 0 for none; and whether it is listening."""
    with contextlib.suppress(OSError), socket_of(descriptor) as found:
        if found.family in (socket.AF_INET, socket.AF_INET6):
            return found.getsockname()[1], bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return 0, False


def _open() -> dict[str, int]:
    """Return the sockets of this process: from unique name to descriptor."""
    found: dict[str, int] = {}
    for entry in os.listdir(_FOLDER):
        with contextlib.suppress(OSError):  # closed meanwhile
            name = os.readlink(f"{_FOLDER}/{entry}")
            if name.startswith("socket:"):
                found[name] = int(entry)
    return found


def _shut(name: str, descriptor: int) -> bool:
    """Shut down a TCP connection if it still exists; listening sockets are left alone, as Gloo would abort."""
    with contextlib.suppress(OSError), socket_of(descriptor) as found:
        if os.readlink(f"{_FOLDER}/{found.fileno()}") != name or found.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        found.shutdown(socket.SHUT_RDWR)
        return True
    return False
