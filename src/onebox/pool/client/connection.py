"""The connection to one worker: its sockets at the client, and the messages received over them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import zmq

from onebox.pool.backends.base import WorkerHandle
from onebox.pool.client.clock_offset import ClockOffset
from onebox.pool.client.socket_poller import SocketPoller, Source, has_input
from onebox.wire import (
    SMALL_BYTES,
    Connection,
    KeyPair,
    Overrun,
    ReceiveWatch,
    configure,
    detect_dead_peers,
    encode,
    held_bytes,
    receive,
    send,
    send_tracked,
)
from onebox.wire.protocol.groups import LeaveGroup
from onebox.wire.protocol.requests import Envelope, ReadClock
from onebox.wire.protocol.responses import Hello, LinkTraffic, MessageTimes, Result
from onebox.worker import Ports

HEARTBEATS = 16
"""Most heartbeats of a worker that are processed in one turn of the client's loop."""

_NOTICE_S = 0.2
"""Seconds for which an answer that may have been taken is waited for before a worker is given up."""


@dataclass(frozen=True)
class WorkerReply:
    """A worker's reply.

    Args:
        results: Results of the instructions that have one, in order.
        frames: Raw elements of the tensors among them.
        times_ns: Start and end of each instruction of a traced routine, in nanoseconds.
        used_bytes: For each of them, the peak of bytes in use while it ran, and the bytes in use after it.
        traffic: With them, what the worker has carried to workers of other hosts.
        clock_ns: How far the worker's clock, which the times are of, is ahead of the client's.
        messages: The messages of the script's stream that were executed, with times on the client's clock.
    """

    results: tuple[Result, ...]
    frames: Sequence[Any]
    times_ns: tuple[int, ...]
    used_bytes: tuple[int, ...] = ()
    traffic: tuple[LinkTraffic, ...] = ()
    clock_ns: int = 0
    messages: tuple[MessageTimes, ...] = ()

    @property
    def own_times_ns(self) -> tuple[int, ...]:
        """``times_ns`` on the client's clock."""
        offset_ns = self.clock_ns
        return tuple(time_ns - offset_ns for time_ns in self.times_ns) if offset_ns else self.times_ns


class WorkerConnection:
    """The sockets of one worker.

    Args:
        context: ZeroMQ context of the sockets.
        handle: Handle of the worker's process.
        ports: The worker's endpoints.
        keys: The client's keys.
        server_key: The worker's public key.
        message_bytes: Most bytes that may come without a complete message, and most of answers that may wait until the
            worker takes them.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        handle: WorkerHandle,
        ports: Ports,
        keys: KeyPair,
        server_key: str,
        message_bytes: int,
    ) -> None:
        self.handle = handle
        self.place = handle.place
        self.hello: Future[Hello] = Future()
        self.hello_message: Hello | None = None
        self.heartbeat_seen = False
        self.clock = ClockOffset()
        self.commands = context.socket(zmq.DEALER)
        self.heartbeat_socket = context.socket(zmq.DEALER)
        for socket, endpoint in ((self.commands, ports.commands), (self.heartbeat_socket, ports.heartbeats)):
            configure(socket, keys, server_key=server_key, queue=0)
            socket.setsockopt(zmq.IPV6, "[" in endpoint)
            if endpoint.startswith("tcp://"):
                detect_dead_peers(socket)
        self.watch = ReceiveWatch(self.commands, message_bytes, events=zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._message_bytes = message_bytes
        self._answers: deque[tuple[int | zmq.MessageTracker, int]] = deque()  # not taken: number or tracker, and bytes
        self._answer_bytes = 0
        self._heartbeat_watch = ReceiveWatch(self.heartbeat_socket, SMALL_BYTES, events=zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._poller: SocketPoller | None = None
        self.link = Connection(self.commands, self._transmit, ports.commands, watch=self.watch)
        self.commands.connect(ports.commands)
        self.heartbeat_socket.connect(ports.heartbeats)

    def _transmit(self, frames: list[Any]) -> None:
        send(self.commands, frames, copy=False)
        self._touch(self.commands)

    def _touch(self, socket: zmq.Socket[bytes]) -> None:
        if self._poller is not None:
            self._poller.touch(socket)

    def _settle(self, socket: zmq.Socket[bytes]) -> None:
        if self._poller is not None:
            self._poller.settle(socket)

    def answer(self, parts: list[Any]) -> bool:
        """Send an answer to what the worker has asked of the client; return whether it takes its answers.

        A message of a few bytes may ask for an answer of any size, so that one that asks and does not read would fill
        the client's memory. Over TCP a worker has taken what it has acknowledged; between processes of one machine,
        what has left ZeroMQ's queue, whose end the worker reads.
        """
        size_bytes = held_bytes(parts)
        while self._answers and self._taken(self._answers[0][0]):
            self._answer_bytes -= self._answers.popleft()[1]
        while self._answers and self._answer_bytes + size_bytes > self._message_bytes:
            if not self._taken(self._answers[0][0], _NOTICE_S):
                return False
            self._answer_bytes -= self._answers.popleft()[1]
        if self.link.keeps:
            self.link.send(parts)
            mark: int | zmq.MessageTracker = self.link.progress[0]
        else:
            mark = send_tracked(self.commands, parts)
            self._touch(self.commands)
        self._answers.append((mark, size_bytes))
        self._answer_bytes += size_bytes
        return True

    def _taken(self, mark: int | zmq.MessageTracker, wait_s: float = 0.0) -> bool:
        """Return whether the worker has taken an answer; a thread of pyzmq's notices a while later that ZeroMQ has."""
        if isinstance(mark, int):
            return mark <= self.link.progress[1]
        if wait_s and not mark.done:
            with contextlib.suppress(zmq.NotDone):
                mark.wait(wait_s)
        return mark.done

    def messages(self, ready: Collection[Source], turn_s: float) -> Iterator[Sequence[Any]]:
        """Yield the messages that have come, except heartbeats, for a while; the rest next time.

        Args:
            ready: The sources that are ready.
            turn_s: Time after which no further message is received.

        Raises:
            Restarted: Another worker answers at the address.
            WireError: A message violates the protocol.
        """
        if self.watch.monitor in ready and _has_shaken_hands(self.watch):
            self.link.connected()
        if self.commands in ready:
            end_s = time.monotonic() + turn_s
            yield from self.link.receive()
            while time.monotonic() < end_s:
                if not has_input(self.commands):
                    self._settle(self.commands)
                    break
                yield from self.link.receive()

    def reconnected(self, ready: Collection[Source]) -> bool:
        """Return whether the heartbeat connection was made again, which counts as a heartbeat: the worker has accepted
        it.

        Args:
            ready: The sources that are ready.
        """
        if self._heartbeat_watch.monitor in ready and _has_shaken_hands(self._heartbeat_watch):
            return self.hello.done()
        return False

    def heartbeats(self, ready: Collection[Source]) -> Iterator[Sequence[Any]]:
        """Yield heartbeats that have come, up to a limit; the rest next time.

        Args:
            ready: The sources that are ready.

        Raises:
            WireError: A message violates the protocol.
        """
        if self.heartbeat_socket in ready:
            for number in range(HEARTBEATS):
                if number and not has_input(self.heartbeat_socket):
                    self._settle(self.heartbeat_socket)
                    break
                yield receive(self.heartbeat_socket, self._heartbeat_watch)

    def overruns(self, now_s: float) -> list[Overrun]:
        """Shut down the connections over which too much came without completing a message, and return them."""
        return [*self.watch.check(now_s), *self._heartbeat_watch.check(now_s)]

    def interrupt(self, groups: Sequence[int]) -> None:
        """Interrupt the worker's waits in some groups, whatever it executes: it reads this between its heartbeats."""
        envelope = Envelope(0, False, tuple(LeaveGroup(group) for group in groups))
        with contextlib.suppress(zmq.Again):
            send(self.heartbeat_socket, [encode(envelope)], zmq.NOBLOCK)
        self._touch(self.heartbeat_socket)

    def ask_clock(self) -> None:
        """Ask for the time of the worker's clock; it answers whatever it executes."""
        with contextlib.suppress(zmq.Again):
            send(self.heartbeat_socket, [encode(Envelope(0, False, (ReadClock(time.monotonic_ns()),)))], zmq.NOBLOCK)
        self._touch(self.heartbeat_socket)

    def register(self, poller: SocketPoller) -> None:
        """Register the sockets and the process with a poller, as those of this connection."""
        self._poller = poller
        for source in self._sources:
            poller.register(source, self)

    @property
    def _sources(self) -> tuple[Source, ...]:
        sockets = self.watch.monitor, self._heartbeat_watch.monitor, self.commands, self.heartbeat_socket
        return *sockets, self.handle.descriptor

    def close(self, poller: SocketPoller) -> None:
        """Unregister and close the sockets; unsent messages are dropped."""
        for source in self._sources:
            with contextlib.suppress(KeyError):  # the descriptor of a process that has ended
                poller.unregister(source)
        self.close_watches()
        for socket in (self.commands, self.heartbeat_socket):
            socket.close(0)

    def close_watches(self) -> None:
        """End the watches of the connections, before the sockets are closed. Idempotent."""
        self.watch.close()
        self._heartbeat_watch.close()

    def complete_hello(self) -> None:
        """Complete the hello future, once both sockets have received something."""
        if self.hello_message is not None and self.heartbeat_seen and not self.hello.done():
            self.hello.set_result(self.hello_message)


def _has_shaken_hands(watch: ReceiveWatch) -> bool:
    """Process the events of a connection; return whether a handshake has succeeded."""
    return any(event.kind == zmq.EVENT_HANDSHAKE_SUCCEEDED for event in watch.attend())
