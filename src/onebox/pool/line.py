"""The line to one worker: its sockets at the client, and what comes over it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import zmq

from onebox.pool.member import Member
from onebox.wire import KeyPair, configure
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
            socket.connect(endpoint)

    def listen(self, poller: zmq.Poller) -> None:
        """Let a poller watch the sockets and the process."""
        for source in (self.commands, self.beats, self.member.descriptor):
            poller.register(source, zmq.POLLIN)

    def cut(self, poller: zmq.Poller) -> None:
        """Let nobody watch any more, and close the sockets; what has not gone does not go."""
        for source in (self.commands, self.beats, self.member.descriptor):
            with contextlib.suppress(KeyError):  # the descriptor of a process that has ended
                poller.unregister(source)
        self.commands.close(0)
        self.beats.close(0)

    def greet(self) -> None:
        """Hand on the worker's first words, once both sockets have brought something."""
        if self.words is not None and self.beating and not self.hello.done():
            self.hello.set_result(self.words)
