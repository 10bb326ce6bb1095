"""Connections that bring more than a message may have are shut down; others never are."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from onebox.errors import WireError
from onebox.wire import Overrun, ReceiveWatch, channel, configure, connection_of, new_keys, receive_watch, socket_of
from onebox.wire.channel import receive
from tests.kit import leaks
from tests.kit.waiting import until

KEYS, CLIENT = new_keys(), new_keys()
LIMIT = 1 << 20
PART = bytes(60_000)


class Server:
    """A socket that listens, its watch, and a thread that lets everybody in."""

    def __init__(self, **options: Any) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.zap = self.context.socket(zmq.REP)
        self.zap.bind("inproc://zeromq.zap.01")
        self.thread = threading.Thread(target=self._let_in, daemon=True)
        self.thread.start()
        self.socket = self.context.socket(zmq.ROUTER)
        configure(self.socket, KEYS, server_key=None)
        self.watch = ReceiveWatch(self.socket, LIMIT, **options)
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.clients: list[zmq.Socket[bytes]] = []
        self.cut: list[Overrun] = []
        self.accepted: list[int] = []
        self.messages: list[list[Any]] = []
        self.takes = True

    def _let_in(self) -> None:
        try:
            while True:
                request = self.zap.recv_multipart()
                self.zap.send_multipart([b"1.0", request[1], b"200", b"OK", b"somebody", b""])
        except zmq.ZMQError:
            self.zap.close(0)

    def client(self) -> zmq.Socket[bytes]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        self.clients.append(socket)
        configure(socket, CLIENT, server_key=KEYS.public)
        socket.connect(self.endpoint)
        return socket

    def turn(self, now_s: float | None = None) -> None:
        """Do what a loop does: take what has come, then check."""
        poller = zmq.Poller()
        for source in (self.socket, self.watch.monitor, self.watch.descriptor):
            poller.register(source, zmq.POLLIN)
        poller.poll(50)
        while self.takes and self.socket.poll(0):
            frames = self.socket.recv_multipart(copy=False)
            self.watch.delivered(connection_of(frames[0]))
            self.messages.append([bytes(frame.buffer) for frame in frames[1:]])
        now_s = time.monotonic() if now_s is None else now_s
        self.accepted += [event.value for event in self.watch.attend() if event.kind == zmq.EVENT_ACCEPTED]
        self.cut += self.watch.check(now_s)

    def until(self, condition: Callable[[], object]) -> None:
        until(condition, turn=self.turn)

    def close(self) -> None:
        for client in self.clients:
            end(client)
        self.watch.close()
        self.watch.close()
        self.socket.close(0)
        self.context.term()


def end(client: zmq.Socket[bytes]) -> None:
    """Close a client's socket and its context."""
    context = client.context
    client.close(0)
    context.term()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_a_message_of_many_parts_is_cut_off_early_and_others_go_on(server: Server) -> None:
    good, bad = server.client(), server.client()
    good.send(b"hello")
    server.until(lambda: server.messages)
    bad.send_multipart([PART] * 3500, copy=False)
    server.until(lambda: server.cut)
    assert server.cut[0].address == "127.0.0.1"
    assert LIMIT < server.cut[0].size_bytes < 64 * LIMIT, "of 200 MiB that were sent"
    good.send(b"still here")
    server.until(lambda: len(server.messages) == 2)
    assert server.messages == [[b"hello"], [b"still here"]]


def test_complete_messages_are_never_too_many(server: Server) -> None:
    client = server.client()
    for number in range(200):
        client.send(PART)
        if number % 10 == 9:
            server.until(lambda: len(server.messages) > number)  # noqa: B023
    assert not server.cut and server.watch.pending_bytes <= LIMIT


def test_what_waits_while_nobody_looks_is_taken_before_it_is_counted(server: Server) -> None:
    client = server.client()
    for _ in range(100):
        client.send(PART)
    time.sleep(0.3)
    server.until(lambda: len(server.messages) == 100)
    assert not server.cut


def test_many_connections_share_a_limit() -> None:
    server = Server(total_bytes=2 * LIMIT)
    server.takes = False
    try:
        for number in range(1, 4):
            server.client().send(bytes(LIMIT * 3 // 4))
            server.until(lambda: server.cut or server.watch.pending_bytes >= LIMIT * 3 // 4 * number)  # noqa: B023
        assert len(server.cut) == 1 and server.cut[0].size_bytes < LIMIT
        assert server.watch.pending_bytes <= 2 * LIMIT
    finally:
        server.close()


def test_a_message_of_too_many_parts_is_refused_and_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "PARTS", 100)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    one.bind("inproc://parts")
    other.connect("inproc://parts")
    try:
        one.send_multipart([b"x"] * 101)
        one.send_multipart([b"y"] * 100)
        with pytest.raises(WireError, match="more than 100 parts"):
            receive(other)
        assert receive(other) == [b"y"] * 100
    finally:
        context.destroy(linger=0)


def test_a_descriptor_that_has_become_a_file_leaves_no_copy(server: Server) -> None:
    """libzmq may close a connection, and another thread open a file, before it is shut down."""
    client = server.client()
    client.send(b"hello")
    server.until(lambda: bool(server.messages))
    (number,) = server.accepted
    server.takes = False
    client.send(PART)
    server.until(lambda: server.watch.pending_bytes)
    end(server.clients.pop())
    until(lambda: not os.path.exists(f"/proc/self/fd/{number}"))
    with leaks.nothing_left():
        file = os.memfd_create("onebox-test")
        if file != number:
            os.dup2(file, number)
            os.close(file)
        assert server.watch.cut_largest() == []
        with pytest.raises(OSError):
            socket_of(number)
        os.close(number)


@pytest.mark.parametrize("when", ["while it was watched", "before it was seen to begin"])
def test_a_socket_that_has_taken_the_number_of_an_ended_connection_is_let_alone(
    server: Server, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive_watch, "_BATCH", 1)  # others' events come before that of the end
    seen = when == "while it was watched"
    client = server.client()
    client.send_multipart([b"x", b"hello"])
    if seen:
        server.until(lambda: bool(server.messages and server.accepted))
        (number,) = server.accepted
    else:
        assert server.socket.poll(20_000)
        number = connection_of(server.socket.recv_multipart(copy=False)[0])
    end(server.clients.pop())
    until(lambda: not os.path.exists(f"/proc/self/fd/{number}"))
    near, far = _connected()
    if far.fileno() == number:
        near, far = far, near
    elif near.fileno() != number:
        near = socket.socket(fileno=os.dup2(near.detach(), number))
    with near, far:
        near.settimeout(20)
        sending = threading.Thread(target=far.sendall, args=(bytes(4 * LIMIT),))
        sending.start()
        got = sum(len(near.recv(1 << 16)) for _ in range(60))
        if not seen:
            server.watch.attend()
        for turn in range(1, 3):
            assert server.watch.check(time.monotonic() + turn) == []
        while got < 4 * LIMIT:
            part = near.recv(1 << 16)
            assert part, "it was shut down"
            got += len(part)
        sending.join(20)


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def test_a_connection_is_cut_off_also_where_there_is_no_descriptor_left(server: Server) -> None:
    client = server.client()
    client.send(b"a message")
    server.until(lambda: bool(server.messages))
    with leaks.no_descriptors():
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        for _ in range(3):
            server.turn()
        client.send_multipart([PART] * 100, zmq.NOBLOCK, copy=False)
        server.until(lambda: bool(server.cut))
    assert server.cut[0].size_bytes > LIMIT
