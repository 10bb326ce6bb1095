"""The line to one worker: its sockets at the client, and what comes over it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from onebox.pool.member import Member
from onebox.wire import KeyPair, Link, configure, endure, receive, send
from onebox.wire.sayings import Hello, Result


@dataclass(frozen=True)
class Answer:
    """What a worker answered.

    Args:
        results: One for each instruction that answers.
        frames: Elements of the tensors among them.
        times_ns: Start and end of each instruction of a traced routine.
    """

    results: tuple[Result, ...]
    frames: Sequence[Any]
    times_ns: tuple[int, ...]


class Line:
    """The sockets of one worker.

    Args:
        context: For them.
        member: The worker's process.
        keys: The client's keys.
        server_key: The worker's public key.

    Raises:
        PoolError: The worker could not be started.
        WorkerDied: It ended instead.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], member: Member, keys: KeyPair, server_key: str) -> None:
        ports = member.ports()
        self.member = member
        self.place = member.place
        self.hello: Future[Hello] = Future()
        self.words: Hello | None = None
        self.beating = False
        self.commands = context.socket(zmq.DEALER)
        self.beats = context.socket(zmq.DEALER)
        for socket, endpoint in ((self.commands, ports.commands), (self.beats, ports.beats)):
            configure(socket, keys, server_key=server_key, queue=0)
            if endpoint.startswith("tcp://"):
                endure(socket, beats=socket is self.beats)
        self.link = Link(self.commands, partial(send, self.commands, copy=False), ports.commands)
        self._connections = self.commands.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.commands.connect(ports.commands)
        self.beats.connect(ports.beats)

    def come(self, ready: dict[Any, int]) -> Iterator[Sequence[Any]]:
        """Yield the messages that have come, signs of life apart.

        Args:
            ready: What a poller has found.

        Raises:
            Restarted: The worker is not the one that it was.
            WireError: What came breaks the protocol.
        """
        if self._connections in ready:
            while self._connections.poll(0):
                self._connections.recv_multipart()
                self.link.connected()
        if self.commands in ready:
            while self.commands.poll(0):
                yield from self.link.receive()

    def beaten(self, ready: dict[Any, int]) -> Iterator[Sequence[Any]]:
        """Yield the signs of life that have come.

        Args:
            ready: What a poller has found.

        Raises:
            WireError: What came breaks the protocol.
        """
        if self.beats in ready:
            while self.beats.poll(0):
                yield receive(self.beats)

    def listen(self, poller: zmq.Poller) -> None:
        """Let a poller watch the sockets and the process."""
        for source in (self.commands, self.beats, self._connections, self.member.descriptor):
            poller.register(source, zmq.POLLIN)

    def cut(self, poller: zmq.Poller) -> None:
        """Let nobody watch any more, and close the sockets; what has not gone does not go."""
        for source in (self.commands, self.beats, self._connections, self.member.descriptor):
            with contextlib.suppress(KeyError):  # the descriptor of a process that has ended
                poller.unregister(source)
        self.commands.disable_monitor()
        for socket in (self._connections, self.commands, self.beats):
            socket.close(0)

    def greet(self) -> None:
        """Hand on the worker's first words, once both sockets have brought something."""
        if self.words is not None and self.beating and not self.hello.done():
            self.hello.set_result(self.words)
