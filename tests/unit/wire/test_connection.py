"""The end of a channel: what it keeps, and where it keeps nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import zmq

from onebox.wire import Connection, detect_dead_peers
from onebox.wire.reliable import Reliable
from tests.unit.wire.test_channel import Socket


class Wire:
    """Stands in for a socket: frames in, frames out."""

    def __init__(self) -> None:
        self.sent: list[list[Any]] = []

    def recv(self, *, copy: bool) -> bytes:
        raise zmq.Again


def link_over(endpoint: str, **options: bool) -> tuple[Connection, Wire]:
    """Return a link, and what it is over."""
    wire: Any = Wire()
    return Connection(wire, wire.sent.append, endpoint, **options), wire


def test_on_one_machine_messages_go_as_they_are() -> None:
    link, wire = link_over("ipc:///tmp/socket", own=True)
    frame = bytearray(b"abc")
    link.send([frame])
    assert wire.sent == [[b"abc"]]
    assert wire.sent[0][0] is frame
    link.connected()
    link.flush(1e9)
    assert len(wire.sent) == 1
    assert (link.due_s, link.full, link.keeps) == (math.inf, False, False)


@pytest.mark.parametrize("own", [False, True])
def test_what_changes_after_it_was_sent_is_copied_and_nothing_else(own: bool) -> None:
    link, wire = link_over("tcp://127.0.0.1:1", own=own)
    head, frame = b"head", bytearray(b"abc")
    link.send([head, frame])
    [[first, second]] = wire.sent
    assert first.endswith(head)
    assert (second is frame) is not own
    frame[:] = b"xyz"
    assert bytes(second) == (b"abc" if own else b"xyz")
    assert link.keeps


def test_a_new_connection_is_followed_by_a_question() -> None:
    link, wire = link_over("tcp://127.0.0.1:1")
    link.send([b"lost"])
    link.connected()
    assert link.due_s < 0
    link.flush(0.0)
    peer = Reliable(1)
    assert peer.take(wire.sent[-1], 0.0) == []
    assert len(peer.outgoing(0.0)) == 1, "the answer"


def test_nothing_to_receive_is_told() -> None:
    link, _ = link_over("tcp://127.0.0.1:1")
    with pytest.raises(zmq.Again):
        link.receive()


def test_each_start_has_its_own_epoch() -> None:
    heads = set()
    for _ in range(2):
        link, wire = link_over("tcp://127.0.0.1:1")
        link.send([b"x"])
        heads.add(wire.sent[0][0][:-1])
    assert len(heads) == 2


def test_dead_connections_are_noticed_before_a_worker_is_taken_for_hung() -> None:
    socket = Socket()
    detect_dead_peers(socket)  # type: ignore[arg-type]
    assert 0 < socket.options[zmq.RECONNECT_IVL] <= socket.options[zmq.RECONNECT_IVL_MAX] <= 500
    assert 0 < socket.options[zmq.CONNECT_TIMEOUT] <= 1000
    assert socket.options[zmq.TCP_KEEPALIVE] == 1
    assert 0 < socket.options[zmq.TCP_MAXRT] < 3500
