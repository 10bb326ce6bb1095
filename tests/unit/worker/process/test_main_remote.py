"""The server of a worker whose client is on another host: what it says and hears is numbered and acknowledged."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq

from onebox.wire import (
    Connection,
    TensorSpec,
    configure,
    decode_worker_message,
    encode,
    from_frame,
    new_keys,
    receive,
    send,
    to_frame,
)
from onebox.wire.protocol.instructions import Ask, Call, Free, Get
from onebox.wire.protocol.requests import Envelope, Instruction, Put, Shutdown
from onebox.wire.protocol.responses import Hello, Left, Reply
from onebox.worker import WorkerConfig
from onebox.worker.process import main
from onebox.worker.process.main import WorkerServer
from onebox.worker.progress import WorkerProgress
from tests.kit.waiting import until
from tests.unit.machines import define, elementwise

SPEC = TensorSpec("float32", (2,))
FRAME = bytes(to_frame(torch.tensor([1.0, -2.0])))
SOON_S = 30.0


class Client:
    """A client of one worker over TCP, which may lose what it sends.

    Attributes:
        sent: What it has put into its socket.
        lossy: Whether it puts nothing into its socket.
    """

    def __init__(self) -> None:
        keys, server_keys = new_keys(), new_keys()
        self.lifeline, self.owner = os.pipe()
        config = WorkerConfig("cpu", 1, server_keys.public, server_keys.secret, keys.public)
        self.server = WorkerServer(config, (self.lifeline,))
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        configure(self.socket, keys, server_key=server_keys.public, queue=0)
        self.socket.connect(self.server.ports.commands)
        self.link = Connection(self.socket, self._transmit, self.server.ports.commands)
        self.sent: list[list[Any]] = []
        self.lossy = False
        self.number = 0

    def tell(self, *instructions: Instruction, frames: Sequence[Any] = (), answer: bool = False) -> int:
        self.number += 1
        self.link.send([encode(Envelope(self.number, answer, instructions)), *frames])
        return self.number

    def receive(self) -> tuple[Any, Sequence[Any]]:
        """Return the next saying, acknowledging and repeating what is to be."""
        found: list[Any] = []
        self.until(lambda: bool(found), found)
        (parts,) = found
        return decode_worker_message(parts)

    def until(self, done: Callable[[], bool], found: list[Any] | None = None) -> None:
        """Take what comes until something is so."""

        def turn() -> None:
            self.link.flush(time.monotonic())
            if self.socket.poll(20):
                messages = self.link.receive()
                (found if found is not None else []).extend(messages)

        until(done, turn=turn)

    def close(self) -> None:
        self.lossy = False
        self.tell(Shutdown())
        self.thread.join(SOON_S)
        assert not self.thread.is_alive()
        self.context.destroy(linger=0)
        os.close(self.lifeline)
        os.close(self.owner)

    def _transmit(self, frames: list[Any]) -> None:
        self.sent.append(frames)
        if not self.lossy:
            send(self.socket, frames)


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client()
    message, _ = made.receive()
    assert isinstance(message, Hello)
    yield made
    made.close()


def put(number: int) -> Put:
    return Put((number,), (SPEC,))


def test_what_is_told_is_done_and_answered(client: Client) -> None:
    client.tell(put(1), Get((1,)), frames=[FRAME], answer=True)
    _, frames = client.receive()
    assert from_frame(SPEC, frames[0]).tolist() == [1.0, -2.0]


def test_a_worker_acknowledges_although_it_has_nothing_to_say(client: Client) -> None:
    client.tell(put(1), frames=[FRAME])
    client.until(lambda: client.link.progress == (1, 1))


def test_what_is_lost_is_sent_again_and_done_in_order(client: Client) -> None:
    client.lossy = True
    client.tell(put(1), frames=[FRAME])
    client.lossy = False
    client.tell(Get((1,)), answer=True)
    client.link.connected()
    _, frames = client.receive()
    assert from_frame(SPEC, frames[0]).tolist() == [1.0, -2.0]


def test_what_comes_twice_is_done_once(client: Client) -> None:
    client.tell(define(9, elementwise("aten.add.Tensor", SPEC, 2)), put(1), frames=[FRAME])
    client.tell(Call(9, (1, 1), (2,)), Free((1,)), Get((2,)), answer=True)
    for parcel in client.sent[-2:] * 2:
        send(client.socket, parcel)
    reply, frames = client.receive()
    assert isinstance(reply, Reply)
    assert from_frame(SPEC, frames[0]).tolist() == [2.0, -4.0]
    number = client.tell(Ask("scalars", ()), answer=True)
    reply, _ = client.receive()
    assert (reply.number, reply.failure) == (number, None), "and the buffer that was freed is not missed"


def test_what_a_worker_said_and_was_lost_is_said_again(client: Client) -> None:
    client.tell(put(1), Get((1,)), frames=[FRAME], answer=True)
    lost: list[Any] = []
    while len(lost) < 2:  # an acknowledgement has one frame, the answer has two
        assert client.socket.poll(int(1000 * SOON_S))
        lost = receive(client.socket)
    client.link.connected()
    _, frames = client.receive()
    assert from_frame(SPEC, frames[0]).tolist() == [1.0, -2.0]


def test_a_message_without_a_number_is_answered(client: Client) -> None:
    send(client.socket, [encode(Envelope(7, True, ())), b"more"])
    reply, _ = client.receive()
    assert reply.number == 0
    assert "same version" in reply.failure.message


class Full:
    """A link on which nothing is acknowledged."""

    full = True

    def send(self, frames: list[Any]) -> None:
        """Take something."""


def test_a_client_that_acknowledges_nothing_ends_the_worker(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bool] = []
    ends: list[float] = []

    def receive(end_s: float) -> bool:
        ends.append(end_s)
        heard.append(client.server.machine.progress.waiting)
        return len(heard) < 3

    with monkeypatch.context() as patch:
        patch.setattr(main, "time", SimpleNamespace(monotonic=lambda: 100.0))
        patch.setattr(client.server, "_link", Full())
        patch.setattr(client.server, "_receive", receive)
        patch.setattr(client.server.machine, "progress", WorkerProgress())  # its own thread waits for messages
        with pytest.raises(SystemExit, match="has taken nothing"):
            client.server.send_to_client(Left(1))
    assert heard == [True] * 3, "which is no stall"
    assert ends == [100.0 + main.SEND_TIMEOUT_S] * 3
