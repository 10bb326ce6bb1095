"""The connection to one worker: its sockets at the client, and the messages received over them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from onebox.pool.backends.base import WorkerHandle
from onebox.wire import Connection, KeyPair, configure, detect_dead_peers, encode, receive, send
from onebox.wire.protocol.groups import LeaveGroup
from onebox.wire.protocol.requests import Envelope
from onebox.wire.protocol.responses import Hello, Result


@dataclass(frozen=True)
class WorkerReply:
    """A worker's reply.

    Args:
        results: Results of the instructions that have one, in order.
        frames: Raw elements of the tensors among them.
        times_ns: Start and end of each instruction of a traced routine, in nanoseconds.
        used_bytes: For each of them, the peak of bytes in use while it ran, and the bytes in use after it.
    """

    results: tuple[Result, ...]
    frames: Sequence[Any]
    times_ns: tuple[int, ...]
    used_bytes: tuple[int, ...] = ()


class WorkerConnection:
    """The sockets of one worker.

    Args:
        context: ZeroMQ context of the sockets.
        handle: Handle of the worker's process.
        keys: The client's keys.
        server_key: The worker's public key.

    Raises:
        PoolError: The worker could not be started.
        WorkerDied: It ended during the start.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], handle: WorkerHandle, keys: KeyPair, server_key: str
    ) -> None:
        ports = handle.ports()
        self.handle = handle
        self.place = handle.place
        self.hello: Future[Hello] = Future()
        self.hello_message: Hello | None = None
        self.heartbeat_seen = False
        self.commands = context.socket(zmq.DEALER)
        self.heartbeat_socket = context.socket(zmq.DEALER)
        for socket, endpoint in ((self.commands, ports.commands), (self.heartbeat_socket, ports.heartbeats)):
            configure(socket, keys, server_key=server_key, queue=0)
            socket.setsockopt(zmq.IPV6, "[" in endpoint)
            if endpoint.startswith("tcp://"):
                detect_dead_peers(socket, heartbeats=socket is self.heartbeat_socket)
        self.link = Connection(self.commands, partial(send, self.commands, copy=False), ports.commands)
        self._handshakes = self.commands.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._heartbeat_handshakes = self.heartbeat_socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.commands.connect(ports.commands)
        self.heartbeat_socket.connect(ports.heartbeats)

    def messages(self, ready: dict[Any, int]) -> Iterator[Sequence[Any]]:
        """Yield the messages that have come, except heartbeats.

        Args:
            ready: Result of the poller.

        Raises:
            Restarted: Another worker answers at the address.
            WireError: A message violates the protocol.
        """
        if self._handshakes in ready:
            _drain(self._handshakes)
            self.link.connected()
        if self.commands in ready:
            while self.commands.poll(0):
                yield from self.link.receive()

    def reconnected(self, ready: dict[Any, int]) -> bool:
        """Return whether the heartbeat connection was made again, which counts as a heartbeat: the worker has accepted
        it.

        Args:
            ready: Result of the poller.
        """
        if self._heartbeat_handshakes in ready:
            _drain(self._heartbeat_handshakes)
            return self.hello.done()
        return False

    def heartbeats(self, ready: dict[Any, int]) -> Iterator[Sequence[Any]]:
        """Yield the heartbeats that have come.

        Args:
            ready: Result of the poller.

        Raises:
            WireError: A message violates the protocol.
        """
        if self.heartbeat_socket in ready:
            while self.heartbeat_socket.poll(0):
                yield receive(self.heartbeat_socket)

    def interrupt(self, groups: Sequence[int]) -> None:
        """Interrupt the worker's waits in some groups, whatever it executes: it reads this between its heartbeats."""
        envelope = Envelope(0, False, tuple(LeaveGroup(group) for group in groups))
        with contextlib.suppress(zmq.Again):
            send(self.heartbeat_socket, [encode(envelope)], zmq.NOBLOCK)

    def register(self, poller: zmq.Poller) -> None:
        """Register the sockets and the process with a poller."""
        for source in (*self._sockets, self.handle.descriptor):
            poller.register(source, zmq.POLLIN)

    @property
    def _sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        return self._handshakes, self._heartbeat_handshakes, self.commands, self.heartbeat_socket

    def close(self, poller: zmq.Poller) -> None:
        """Unregister and close the sockets; unsent messages are dropped."""
        for source in (*self._sockets, self.handle.descriptor):
            with contextlib.suppress(KeyError):  # the descriptor of a process that has ended
                poller.unregister(source)
        for socket in (self.commands, self.heartbeat_socket):
            socket.disable_monitor()
        for socket in self._sockets:
            socket.close(0)

    def complete_hello(self) -> None:
        """Complete the hello future, once both sockets have received something."""
        if self.hello_message is not None and self.heartbeat_seen and not self.hello.done():
            self.hello.set_result(self.hello_message)


def _drain(monitor: zmq.Socket[bytes]) -> None:
    """Discard all events of a socket's monitor."""
    while monitor.poll(0):
        monitor.recv_multipart()
