"""A worker behind TCP as those of other hosts are, and channels to it that lack a part of the one it has.

Neither keys nor acknowledgements can be switched off in onebox. Here both ends get more sockets beside their own, in
processes that belong to a benchmark: the client's are added to an open pool, the worker's by this file, which is run in
its place. One process serves all channels, in turn, because two processes of one program differ by more than what is
measured: where their memory happens to lie makes some a tenth slower.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

import onebox
from onebox.pool.backends.base import WorkerHandle
from onebox.pool.client.socket_poller import SocketPoller
from onebox.pool.errors import WorkerLocation
from onebox.pool.launch.worker_process import WorkerProcess
from onebox.pool.open import connect_pool
from onebox.wire import Connection, KeyPair, configure, detect_dead_peers, new_keys, send
from onebox.worker import WorkerConfig
from onebox.worker.process import main as serve

LOOPBACK = "127.0.0.1"
_GO_TO = b"go to channel"
_JOIN_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Channel:
    """A channel from a client to a worker.

    Args:
        encrypted: Whether by CURVE; else anybody may connect and read.
        acknowledged: Whether messages are numbered, acknowledged and sent again.
    """

    encrypted: bool = True
    acknowledged: bool = True

    def socket(
        self, context: zmq.Context[zmq.Socket[bytes]], keys: KeyPair, server_key: str | None
    ) -> zmq.Socket[bytes]:
        """Return a socket for it; see :func:`onebox.wire.configure`."""
        made = context.socket(zmq.DEALER)
        configure(made, keys, server_key=server_key, queue=1000 if server_key is None else 0)
        detect_dead_peers(made)
        if not self.encrypted:
            made.setsockopt(zmq.CURVE_SERVER, 0)  # which leaves no mechanism at all
            assert made.getsockopt(zmq.MECHANISM) == zmq.NULL
        return made

    def link(self, over: Any, transmit: Callable[[list[Any]], None], *, own: bool) -> Connection:
        """Return its end; without acknowledgements it is that of a channel on one machine."""
        return Connection(over, transmit, "tcp://" if self.acknowledged else "ipc://", own=own)


CHANNELS = {
    "as it is": Channel(),
    "as it is, again": Channel(),
    "not encrypted": Channel(encrypted=False),
    "not acknowledged": Channel(acknowledged=False),
    "neither": Channel(encrypted=False, acknowledged=False),
}
"""The first is that of the pool; the second tells how far equals are apart by chance."""


# ---- at the client


class Client:
    """A pool of one CPU worker of one thread, and the channels to it; made by :func:`open_channels`.

    Args:
        pool: The pool.
        server_key: The worker's public key.
        ports: Where the worker listens for each channel but the first.
    """

    def __init__(self, pool: onebox.Pool, server_key: str, ports: Sequence[int]) -> None:
        self.pool = pool
        self._board = board = pool._client_loop
        (self._connection,) = board._connections.values()
        self._ends = [(self._connection.commands, self._connection.link)]
        for channel, port in zip(list(CHANNELS.values())[1:], ports, strict=True):
            made = channel.socket(board._context, board._keys, server_key)
            made.connect(f"tcp://{LOOPBACK}:{port}")
            self._ends.append((made, channel.link(made, partial(self._transmit, made), own=False)))

    def _transmit(self, made: zmq.Socket[bytes], frames: list[Any]) -> None:
        """Send a message as the pool's own connection does."""
        send(made, frames, copy=False)
        self._connection._touch(made)

    def use(self, name: str) -> None:
        """Let everything go by a channel from now on; nothing may be under way."""
        self._board._call_in_loop(partial(self._go_to, list(CHANNELS).index(name)))

    def _go_to(self, index: int, poller: SocketPoller) -> None:
        connection = self._connection
        connection.link.send([_GO_TO, bytes([index])])
        poller.unregister(connection.commands)
        connection.commands, connection.link = self._ends[index]
        poller.register(connection.commands, connection)

    def close(self) -> None:
        """Close the sockets that are not the pool's."""
        self.use(next(iter(CHANNELS)))
        for made, _ in self._ends[1:]:
            made.close(0)


@contextlib.contextmanager
def open_channels() -> Iterator[Client]:
    """Open a pool, and channels to its worker."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in list(CHANNELS)[1:]]
        ports = [each.getsockname()[1] for each in sockets]
    source = Source(__file__, *map(str, ports))
    with connect_pool([source]) as pool:
        client = Client(pool, source.keys.public, ports)
        try:
            yield client
        finally:
            client.close()


class Source:
    """One worker of one thread, run by a benchmark's script; a :class:`~onebox.pool.backends.base.WorkerSource`.

    Args:
        script: The script.
        *arguments: Its command line.
    """

    def __init__(self, script: str, *arguments: str) -> None:
        self.keys = new_keys()
        self._command = (sys.executable, script, *arguments)

    def start(self, first: int, client_key: str) -> Sequence[tuple[WorkerHandle, str]]:
        """Start it."""
        keys = self.keys
        config = WorkerConfig("cpu", 1, keys.public, keys.secret, client_key, LOOPBACK, owner=os.getpid())
        location = WorkerLocation(worker=first, host=LOOPBACK, device="cpu")
        return [(_Worker(location, config, self._command), keys.public)]

    def connected(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing is open."""


class _Worker(WorkerProcess):
    """A worker process with another command line."""

    def __init__(self, place: WorkerLocation, config: WorkerConfig, command: tuple[str, ...]) -> None:
        self.command = command  # type: ignore[assignment]
        super().__init__(place, config)


# ---- at the worker


class _Server(serve.WorkerServer):
    """A worker that listens for more channels."""

    def __init__(self, config: WorkerConfig, owner_descriptors: Sequence[int]) -> None:
        super().__init__(config, owner_descriptors)
        ends: Any = _Ends([self._socket], [self._link])
        self._socket, self._link = _Chosen(ends), ends  # type: ignore[assignment]
        for channel, port in zip(list(CHANNELS.values())[1:], sys.argv[1:], strict=True):
            made = channel.socket(self._context, KeyPair(config.public, config.secret), None)
            made.bind(f"tcp://{LOOPBACK}:{port}")
            ends.sockets.append(made)
            ends.links.append(channel.link(made, self._transmit, own=True))


class _Ends:
    """Links of several channels, of which one is in use, with their sockets: stands for a worker's link."""

    def __init__(self, sockets: list[zmq.Socket[bytes]], links: list[Connection]) -> None:
        self.sockets = sockets
        self.links = links
        self._index = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.links[self._index], name)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket that is in use."""
        return self.sockets[self._index]

    def send(self, frames: list[Any]) -> None:
        """Send a message."""
        self.links[self._index].send(frames)

    def receive(self) -> list[Sequence[Any]]:
        """Receive messages; go to another channel when that is what they say."""
        messages = self.links[self._index].receive()
        for message in messages:
            if bytes(message[0]) == _GO_TO:
                self._index = message[1][0]
        return [message for message in messages if bytes(message[0]) != _GO_TO]


class _Chosen:
    """The socket of the channel in use: stands for a worker's socket."""

    def __init__(self, ends: _Ends) -> None:
        self._ends = ends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ends.socket, name)

    def close(self, linger: int) -> None:
        """Close the sockets of all channels."""
        for each in self._ends.sockets:
            each.close(linger)


def main() -> None:
    """Be a worker: ``channels.py PORT …``, one for each channel but the first."""
    serve.WorkerServer = _Server  # type: ignore[misc]
    serve.main()


if __name__ == "__main__":
    main()
