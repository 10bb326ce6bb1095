"""Messages over a stream socket between two processes of one user: for a worker or from it, each with its frames."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from onebox.errors import WireError
from onebox.portable import after_fork_in_child
from onebox.wire.protocol.codec import FRAME_BYTES, FRAMES, HEADER_BYTES

_PREFIX = struct.Struct("<III")
"""The worker, bytes of the header, and number of frames, whose sizes follow."""

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
    """One end of a stream: a thread passes what comes to :meth:`received`, another one sends.

    Args:
        connection: The socket, which is closed once both have ended.
        name: Name of the threads.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        close_in_forks(connection)
        self._connection = connection
        self._outgoing: SimpleQueue[tuple[int, bytes, Sequence[Any]] | None] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"{name}-sender", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        self._reader.start()
        self._writer.start()

    def send(self, worker: int, header: bytes, frames: Sequence[Any] = ()) -> None:
        """Send a message after the earlier ones, without waiting for it; both are within the limits."""
        self._outgoing.put((worker, header, frames))

    def finish(self) -> None:
        """End the connection once the earlier messages are sent."""
        self._outgoing.put(None)

    def end(self) -> None:
        """End the connection, and all waits of both sides."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._connection.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float) -> None:
        """Wait a while for the end of the connection and of the threads."""
        self._reader.join(timeout_s)
        self._writer.join(timeout_s)

    def received(self, worker: int, header: bytearray, frames: Sequence[Any]) -> bool:
        """Process a message; return whether another one may follow. A ``WireError`` ends the connection."""
        raise NotImplementedError

    def ended(self, error: WireError | None) -> None:
        """Process the end of what comes: by the peer, unless there is an error."""
        raise NotImplementedError

    def transmit(self, worker: int, header: bytes, frames: Sequence[Any] = ()) -> None:
        """Send a message; waits while the peer does not read, and raises ``OSError`` when it has gone."""
        views = [memoryview(frame).cast("B") for frame in frames]
        sizes = struct.pack(f"<{len(views)}Q", *map(len, views))
        parts: list[Any] = [_PREFIX.pack(worker, len(header), len(views)) + sizes + header, *views]
        for part in [b"".join(parts)] if sum(map(len, parts)) <= _SMALL_BYTES else parts:
            self._connection.sendall(part)

    def receive(self) -> tuple[int, bytearray, list[bytearray]]:
        """Wait for a message; raises ``OSError`` when the peer has gone.

        Raises:
            WireError: It exceeds the limits.
        """
        worker, size, count = _PREFIX.unpack(self._exactly(_PREFIX.size))
        if size > HEADER_BYTES or count >= FRAMES:
            raise WireError(f"a message of {size} bytes and {count} tensors is over the limits")
        sizes = struct.unpack(f"<{count}Q", self._exactly(8 * count))
        if max(sizes, default=0) > FRAME_BYTES:
            raise WireError(f"a tensor of {max(sizes)} bytes; allowed are {FRAME_BYTES}")
        return worker, self._exactly(size), [self._exactly(each) for each in sizes]

    def _exactly(self, size: int) -> bytearray:
        found = bytearray(size)
        left = memoryview(found)
        while left:
            count = self._connection.recv_into(left)
            if not count:
                raise ConnectionError("the connection has ended")
            left = left[count:]
        return found

    # ---- the threads

    def _read(self) -> None:
        broken = None
        try:
            while self.received(*self.receive()):
                pass
        except WireError as error:
            broken = error
        except OSError:
            pass
        finally:
            self.ended(broken)
            self.finish()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the peer has gone, which the reader finds, too
            while (message := self._outgoing.get()) is not None:
                self.transmit(*message)
        self.end()
        self._reader.join()
        self._connection.close()
