"""One end of the command channel: a socket, with retransmission if connections may break.

Between processes of one machine nothing is lost, and messages are sent unchanged. Both ends derive the mode from the
worker's address.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from typing import Any

import zmq

from onebox.wire.transport.channel import Frames, receive
from onebox.wire.transport.reliable import Reliable


class Connection:
    """Sends and receives messages over a socket owned by the caller.

    Args:
        socket: The socket.
        transmit: Sends frames through it.
        endpoint: The worker's address: a TCP connection may break.
        own: Whether frames may change as soon as :meth:`send` returns, and are copied.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        transmit: Callable[[list[Any]], None],
        endpoint: str,
        *,
        own: bool = False,
    ) -> None:
        self._socket = socket
        self._transmit = transmit
        self._own = own
        self._reliable = Reliable(secrets.randbits(64)) if endpoint.startswith("tcp://") else None

    @property
    def due_s(self) -> float:
        """Time at which :meth:`flush` is due, on the monotonic clock; infinite if not before the next receipt."""
        return math.inf if self._reliable is None else self._reliable.due_s

    @property
    def keeps(self) -> bool:
        """True if frames are kept until they have arrived: they must not change, and need no other copy."""
        return self._reliable is not None

    @property
    def full(self) -> bool:
        """True if messages wait for acknowledgements of others."""
        return self._reliable is not None and self._reliable.full

    def send(self, frames: list[Any]) -> None:
        """Send a message, now or as soon as the window allows."""
        if self._reliable is None:
            self._transmit(frames)
            return
        if self._own:
            frames = [frame if isinstance(frame, bytes) else bytes(frame) for frame in frames]
        self._reliable.post(frames)
        self._flush(time.monotonic())

    def connected(self) -> None:
        """Record that a new connection has been established."""
        if self._reliable is not None:
            self._reliable.connected()

    def flush(self, now_s: float) -> None:
        """Send due messages."""
        if self.due_s <= now_s:
            self._flush(now_s)

    def receive(self) -> list[Frames]:
        """Receive from the socket and return the messages that are next in order, if any.

        Raises:
            zmq.Again: There is nothing to receive within the socket's timeout.
            Restarted: The peer has restarted.
            WireError: The received data breaks the protocol.
        """
        frames = receive(self._socket)
        return [frames] if self._reliable is None else self._reliable.take(frames, time.monotonic())

    def _flush(self, now_s: float) -> None:
        assert self._reliable is not None
        for frames in self._reliable.outgoing(now_s):
            self._transmit(frames)
