"""Who is let in, and how often somebody may do something."""

from __future__ import annotations

from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from onebox.agent.door import ADDRESSES, Door, Rate, Strangers
from onebox.wire import new_keys


@given(st.lists(st.floats(0, 3, allow_nan=False), max_size=40))
def test_a_rate_holds_over_any_time(pauses: list[float]) -> None:
    rate, now_s, allowed = Rate(3, 2.0, 0.0), 0.0, []
    for pause in pauses:
        now_s += pause
        if rate.allows(now_s):
            allowed.append(now_s)
    for start in range(len(allowed)):
        for end in range(start, len(allowed)):
            assert end - start + 1 <= 3 + (allowed[end] - allowed[start]) / 2.0 + 1e-6


def test_a_clock_that_goes_back_gives_nothing() -> None:
    rate = Rate(1, 1.0, 10.0)
    assert rate.allows(10.0) and not rate.allows(5.0) and not rate.allows(5.9) and rate.allows(6.1)


def test_of_one_address_a_few_failures_are_told_and_the_rest_later() -> None:
    strangers = Strangers()
    assert [strangers.failed("x", 0.0) for _ in range(8)] == [1, 1, 1, 1, 1, 0, 0, 0]
    assert strangers.failed("y", 0.0) == 1
    assert strangers.failed("x", 11.0) == 4


def test_of_many_addresses_not_too_many_are_told_nor_remembered() -> None:
    strangers = Strangers()
    assert sum(bool(strangers.failed(str(number), 0.0)) for number in range(5000)) == 50
    assert len(strangers) == ADDRESSES


class Knocking:
    """ZeroMQ's side of the door."""

    def __init__(self, known: dict[str, str]) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.door = Door(self.context, known.get, lambda event, **fields: self.told.append((event, fields)))

    def knock(self, *request: bytes) -> list[bytes]:
        with self.context.socket(zmq.REQ) as socket:
            socket.linger = 0
            socket.connect("inproc://zeromq.zap.01")
            socket.send_multipart(request)
            self.door.socket.poll(1000)
            self.door.attend(0.0)
            assert socket.poll(1000)
            return socket.recv_multipart()

    def close(self) -> None:
        self.door.close()
        self.context.term()


def test_a_known_key_comes_in_and_is_its_user_id() -> None:
    keys = new_keys()
    knocking = Knocking({keys.public: "ana"})
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
    knocking = Knocking({})
    try:
        assert knocking.knock(*request_)[2:5] == [b"400", b"refused", b""]
        assert knocking.told == [("handshake-refused", {"address": "10.0.0.1", "times": 1})]
    finally:
        knocking.close()


def test_a_request_of_one_frame_is_refused() -> None:
    knocking = Knocking({})
    try:
        assert knocking.knock(b"?")[2] == b"400"
    finally:
        knocking.close()
