"""Messages over a stream socket: a header and any number of frames, each of a stated length."""

from __future__ import annotations

import contextlib
import socket
import struct
import weakref
from collections.abc import Sequence
from typing import Any

from onebox.errors import WireError
from onebox.portable import after_fork_in_child
from onebox.wire.protocol.codec import FRAME_BYTES, FRAMES, HEADER_BYTES

_PREFIX = struct.Struct("<II")
"""Bytes of the header, and number of frames."""

_SMALL_BYTES = 1 << 16
"""Messages up to this size are sent by one call."""


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_forks(connection: socket.socket) -> None:
    """Have a socket closed in forked processes, whose copies would keep it open after its owner was killed."""
    _sockets.add(connection)


def _close_copies() -> None:
    for each in list(_sockets):
        each.close()


after_fork_in_child(_close_copies)


class MessageStream:
    """Messages over a connected stream socket. One thread may send while another receives.

    Args:
        connection: The socket, owned by this object.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        close_in_forks(connection)

    def send(self, header: bytes, frames: Sequence[Any] = ()) -> None:
        """Send a message; waits while the peer does not read.

        Raises:
            OSError: The peer has gone.
            WireError: The message exceeds the limits.
        """
        views = [memoryview(frame).cast("B") for frame in frames]
        if len(header) > HEADER_BYTES or len(views) > FRAMES or any(len(view) > FRAME_BYTES for view in views):
            raise WireError(f"a message of {len(header)} bytes and {len(views)} tensors is over the limits")
        sizes = struct.pack(f"<{len(views)}Q", *(len(view) for view in views))
        start = _PREFIX.pack(len(header), len(views)) + sizes + header
        if len(start) + sum(len(view) for view in views) <= _SMALL_BYTES:
            self._connection.sendall(b"".join((start, *views)))
            return
        self._connection.sendall(start)
        for view in views:
            self._connection.sendall(view)

    def receive(self) -> tuple[bytearray, list[bytearray]] | None:
        """Wait for a message; return its header and frames, or ``None`` when the peer has gone.

        Raises:
            WireError: It exceeds the limits.
        """
        start = self._exactly(_PREFIX.size)
        if start is None:
            return None
        size, count = _PREFIX.unpack(start)
        if size > HEADER_BYTES or count > FRAMES:
            raise WireError(f"a message of {size} bytes and {count} tensors is over the limits")
        packed = self._exactly(8 * count)
        if packed is None:
            return None
        sizes = struct.unpack(f"<{count}Q", packed)
        if max(sizes, default=0) > FRAME_BYTES:
            raise WireError(f"a tensor of {max(sizes)} bytes; allowed are {FRAME_BYTES}")
        parts = [self._exactly(each) for each in (size, *sizes)]
        header, *frames = parts
        if header is None or any(frame is None for frame in frames):
            return None
        return header, [frame for frame in frames if frame is not None]

    def _exactly(self, size: int) -> bytearray | None:
        found = bytearray(size)
        view = memoryview(found)
        while view:
            try:
                count = self._connection.recv_into(view)
            except OSError:
                return None
            if not count:
                return None
            view = view[count:]
        return found

    def end(self) -> None:
        """End all waits of both sides, and what is not read yet."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, once no thread uses it."""
        self._connection.close()
