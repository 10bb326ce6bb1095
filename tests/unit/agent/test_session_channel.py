"""Messages of clients: a turn takes some of them, and odd ones cost nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from onebox.agent.log_rate_limit import Reporter
from onebox.agent.session_channel import TURN_S, SessionChannel
from onebox.wire.protocol.agents import TOKEN_BYTES
from tests.unit.wire.test_receive_watch import Server

TOKEN = bytes(TOKEN_BYTES)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def channel(server: Server) -> SessionChannel:
    def tell(event: str, **fields: Any) -> None:
        pass

    return SessionChannel(server.socket, lambda key: "ana", lambda client: False, Reporter(tell), server.watch)


def test_a_turn_takes_messages_for_a_bounded_time(server: Server) -> None:
    client, made = server.client(), channel(server)
    for _ in range(90):
        client.send_multipart([TOKEN, b"x"])
    time.sleep(0.3)
    taken = [0, 0]
    for turn in range(2):
        began_s = time.monotonic()
        for _ in made.take(began_s):
            taken[turn] += 1
            time.sleep(TURN_S / 8)
        assert time.monotonic() - began_s < 2 * TURN_S
    assert all(1 <= count <= 9 for count in taken)
    assert len(list(made.take(time.monotonic()))) == 90 - sum(taken), "none is lost"


def test_of_a_message_of_many_parts_a_few_are_looked_at(server: Server) -> None:
    client, made = server.client(), channel(server)
    client.send_multipart([TOKEN, *[b"x"] * 5000])
    client.send_multipart([TOKEN])
    client.send_multipart([TOKEN, b"this one"])
    assert server.socket.poll(5000)
    time.sleep(0.3)
    assert [message for _, _, message in made.take(time.monotonic())] == [b"this one"]
