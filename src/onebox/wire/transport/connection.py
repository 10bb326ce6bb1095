"""One end of the channel of commands: a socket, and, where connections may break, what makes good what they lose.

Between processes of one machine nothing is lost, and messages go as they are. Both ends know which it is by the
address of the worker.
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
    """Sends and receives messages over a socket that somebody else owns.

    Args:
        socket: The socket.
        transmit: Puts frames into it.
        endpoint: The address that the worker listens at: over TCP a connection may break.
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
        """When :meth:`flush` is to be called, on the monotonic clock; infinite when not until something comes."""
        return math.inf if self._reliable is None else self._reliable.due_s

    @property
    def keeps(self) -> bool:
        """Whether frames are kept until they have arrived: they do not change, and need not be copied once more."""
        return self._reliable is not None

    @property
    def full(self) -> bool:
        """Whether messages wait until the other side has acknowledged others."""
        return self._reliable is not None and self._reliable.full

    def send(self, frames: list[Any]) -> None:
        """Send a message, now or as soon as there is room."""
        if self._reliable is None:
            self._transmit(frames)
            return
        if self._own:
            frames = [frame if isinstance(frame, bytes) else bytes(frame) for frame in frames]
        self._reliable.post(frames)
        self._flush(time.monotonic())

    def connected(self) -> None:
        """Take the news that a new connection has been made."""
        if self._reliable is not None:
            self._reliable.connected()

    def flush(self, now_s: float) -> None:
        """Send what is due."""
        if self.due_s <= now_s:
            self._flush(now_s)

    def receive(self) -> list[Frames]:
        """Receive from the socket and return the messages that are next in order, if any.

        Raises:
            zmq.Again: There is nothing to receive within the socket's limit of time.
            Restarted: The other side is not the one that it was.
            WireError: What came breaks the protocol.
        """
        frames = receive(self._socket)
        return [frames] if self._reliable is None else self._reliable.take(frames, time.monotonic())

    def _flush(self, now_s: float) -> None:
        assert self._reliable is not None
        for frames in self._reliable.outgoing(now_s):
            self._transmit(frames)
