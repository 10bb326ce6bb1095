"""Who is let in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from onebox.agent.reporter import Reporter
from onebox.agent.zap_auth import HANDSHAKE_S, HandshakeCount, ZapAuthenticator
from onebox.wire import new_keys


class Knocking:
    """ZeroMQ's side of the door."""

    def __init__(self, name_of: Callable[[str], str | None]) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.door = ZapAuthenticator(self.context, name_of, Reporter(self.tell))

    def tell(self, event: str, **fields: Any) -> None:
        self.told.append((event, fields))

    def knock(self, *request: bytes) -> list[bytes]:
        with self.context.socket(zmq.REQ) as socket:
            socket.linger = 0
            socket.connect("inproc://zeromq.zap.01")
            socket.send_multipart(request)
            self.door.socket.poll(60_000)
            self.door.attend(0.0)
            assert socket.poll(60_000)
            return socket.recv_multipart()

    def close(self) -> None:
        self.door.close()
        self.context.term()


def test_a_known_key_comes_in_and_is_its_user_id() -> None:
    keys = new_keys()
    knocking = Knocking({keys.public: "ana"}.get)
    raw = z85.decode(keys.public)
    try:
        answer = knocking.knock(b"1.0", b"7", b"onebox", b"10.0.0.1", b"", b"CURVE", raw)
        assert answer == [b"1.0", b"7", b"200", b"OK", keys.public.encode(), b""]
        assert knocking.told == []
    finally:
        knocking.close()


@pytest.mark.parametrize(
    "request_",
    [
        (b"1.0", b"7", b"onebox", b"10.0.0.1", b"", b"CURVE", bytes(32)),
        (b"1.0", b"7", b"onebox", b"10.0.0.1", b"", b"CURVE", b"short"),
        (b"1.0", b"7", b"onebox", b"10.0.0.1", b"", b"NULL"),
        (b"1.0", b"7", b"onebox", b"10.0.0.1", b"", b"PLAIN", b"name", b"word"),
        (b"2.0", b"7", b"onebox", b"10.0.0.1", b"", b"CURVE", bytes(32)),
    ],
)
def test_all_else_is_refused(request_: tuple[bytes, ...]) -> None:
    knocking = Knocking({}.get)
    try:
        assert knocking.knock(*request_)[2:5] == [b"400", b"refused", b""]
        assert knocking.told == [("handshake-refused", {"address": "10.0.0.1"})]
    finally:
        knocking.close()


def test_a_request_of_one_frame_is_refused() -> None:
    knocking = Knocking({}.get)
    try:
        assert knocking.knock(b"?")[2] == b"400"
    finally:
        knocking.close()


def test_a_list_of_clients_that_fails_lets_nobody_in_and_the_door_goes_on() -> None:
    keys, known = new_keys(), {}
    knocking = Knocking(lambda key: known[key])
    request = (b"1.0", b"7", b"onebox", b"10.0.0.1", b"", b"CURVE", z85.decode(keys.public))
    try:
        assert knocking.knock(*request)[2] == b"400"
        assert [event for event, _ in knocking.told] == ["failed", "handshake-refused"]
        known[keys.public] = "ana"
        assert knocking.knock(*request)[2] == b"200"
    finally:
        knocking.close()


def test_connections_that_end_without_a_handshake_are_counted_and_no_others() -> None:
    count = HandshakeCount()
    for descriptor in range(10):  # of which the first four are clients'
        count.accepted(descriptor, 1.0)
    for _ in range(4):
        count.answered()
    assert count.take(1.0) == 0, "they may still be in their handshake"
    for descriptor in range(4, 10):
        count.ended(descriptor)
    assert count.take(2.0) == 2, "four that are open might be the ones that said nothing"
    assert count.take(1.1 + HANDSHAKE_S) == 4
    assert count.take(1.2 + HANDSHAKE_S) == 0
    for descriptor in range(4):
        count.ended(descriptor)
    assert count.take(99.0) == 0


def test_an_end_that_is_told_twice_counts_once() -> None:
    count = HandshakeCount()
    count.accepted(7, 0.0)
    count.ended(7)
    count.ended(7)
    assert (count.take(0.0), count.take(0.0)) == (1, 0)
