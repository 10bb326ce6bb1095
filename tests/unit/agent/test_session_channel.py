"""Messages of clients: a turn takes some of them, and odd ones cost nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from onebox.agent import session_channel
from onebox.agent.reporter import Reporter
from onebox.agent.session_channel import TURN_S, SessionChannel
from onebox.agent.sessions import SESSIONS_OF_ONE
from onebox.wire.protocol.agents import TOKEN_BYTES, Inspect, Refused, Renew, decode_agent_response, encode_agent
from tests.unit.wire.test_receive_watch import Server

TOKEN = bytes(TOKEN_BYTES)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def channel(server: Server, told: list[str] | None = None, *, busy: bool = False) -> SessionChannel:
    def tell(event: str, **fields: Any) -> None:
        if told is not None:
            told.append(event)

    return SessionChannel(server.socket, lambda key: "ana", lambda client: busy, Reporter(tell), server.watch)


def test_a_turn_takes_messages_for_a_bounded_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    client, made = server.client(), channel(server)
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(session_channel, "time", clock)
    for _ in range(90):
        client.send_multipart([TOKEN, b"x"])
    taken = list[int]()
    while sum(taken) < 90:
        assert server.socket.poll(20_000), "some are lost"
        taken.append(0)
        for _ in made.take(clock.now_s):
            taken[-1] += 1
            clock.now_s += TURN_S / 8
    assert sum(taken) == 90 and max(taken) <= 9


def test_of_a_message_of_many_parts_a_few_are_looked_at(server: Server) -> None:
    client, made = server.client(), channel(server)
    client.send_multipart([TOKEN, *[b"x"] * 5000])
    client.send_multipart([TOKEN])
    client.send_multipart([TOKEN, b"this one"])
    taken = list[bytes]()
    while not taken:
        assert server.socket.poll(20_000)
        taken += [message for _, _, message in made.take(time.monotonic())]
    assert taken == [b"this one"]


def test_of_too_many_sessions_each_learns_why_and_the_journal_is_told(server: Server) -> None:
    """Its client would wait for the end of its patience, and not know why."""
    client, told = server.client(), list[str]()
    made = channel(server, told, busy=True)
    for number in range(SESSIONS_OF_ONE + 10):
        client.send_multipart([b"%016d" % number, encode_agent(Inspect(number))])
    for number in range(10):
        client.send_multipart([b"%016d" % (SESSIONS_OF_ONE + number), encode_agent(Renew(1))])
        client.send_multipart([b"%016d" % (SESSIONS_OF_ONE + number), b"nonsense"])
    now_s, taken = time.monotonic(), 0
    end_s = now_s + 10
    while server.socket.poll(500) and time.monotonic() < end_s:
        taken += len(list(made.take(now_s)))
    assert (taken, set(told), len(told) <= 6) == (SESSIONS_OF_ONE, {"over-limit"}, True)
    answers = []
    while client.poll(500):
        answers.append(decode_agent_response(client.recv()))
    assert all(isinstance(answer, Refused) and "allowed are 64 of a client" in answer.reason for answer in answers)
    numbers = [answer.number for answer in answers if isinstance(answer, Refused)]
    assert numbers == [*range(SESSIONS_OF_ONE, SESSIONS_OF_ONE + 10)]
