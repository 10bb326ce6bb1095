"""A part of ``benchmarks/security.py``, always the same: mutated messages, and intruders that are to be noticed."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import security
from intruders import got_in
from mutations import Mutator, envelopes, requests

MEMORY_BYTES = 64 << 20
"""More than what a target may grow by: its allocator keeps some of what it has used."""


def test_decoders_refuse_what_is_no_message_and_stay_as_they_are() -> None:
    found = security.decoders(30_000, seed=11)
    assert (found["messages"], found["crashes"], found["hangs"]) == (30_000, 0, 0), found["examples"]
    assert found["read"] > 2_000, "some mutations are messages, too"
    assert found["refused"] > 15_000
    assert found["grown_bytes"] < MEMORY_BYTES


@pytest.mark.feature("Security: Survive malicious messages")
def test_a_worker_survives_what_its_client_says() -> None:
    found = security.worker(400, seed=12)
    assert (found["messages"], found["crashes"], found["hangs"]) == (400, 0, 0), found["examples"]
    assert found["grown_bytes"] < security.QUOTA_BYTES + MEMORY_BYTES


@pytest.mark.feature("Security: Survive malicious messages")
def test_an_agent_survives_what_its_client_says() -> None:
    found = security.agent(180, seed=13)
    assert (found["messages"], found["crashes"], found["hangs"]) == (180, 0, 0), found["examples"]
    assert found["grown_bytes"] < MEMORY_BYTES


def test_a_client_survives_what_its_agent_says() -> None:
    found = security.client(900, seed=14)
    assert (found["messages"], found["crashes"], found["hangs"]) == (900, 0, 0), found["examples"]
    assert found["grown_bytes"] < MEMORY_BYTES


@pytest.mark.parametrize("samples", [envelopes(waiting=True), requests()], ids=["worker", "agent"])
def test_a_seed_says_which_messages_come(samples: list[bytes]) -> None:
    one, same, other = (Mutator(seed, samples) for seed in (1, 1, 2))
    made = [one.next() for _ in range(200)]
    assert made == [same.next() for _ in range(200)]
    assert made != [other.next() for _ in range(200)]
    assert len(set(made)) > 150


# ---- the benchmark sees what it is to see


def test_a_target_that_crashes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "TARGETS", Path(__file__).with_name("no such file.py"))
    found = security.decoders(10, seed=1)
    assert found["crashes"] == 1
    assert "status 2" in found["examples"][0]


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Answer the first connection with some bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with listening.accept()[0] as connection:
                connection.recv(100)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(30)


GREETING = bytes(64)
WELCOME = b"\x04\xa8\x07WELCOME" + bytes(160)
REFUSAL = b"\x04\x0a\x05ERROR\x03400"


@pytest.mark.parametrize(
    ("answer", "inside"),
    [
        (b"", False),
        (GREETING, False),
        (GREETING + WELCOME, False),
        (GREETING + WELCOME + REFUSAL, False),
        (GREETING + WELCOME + b"\x04\x0e\x05READY" + bytes(8), True),
        (GREETING + WELCOME + b"\x04\x10\x07MESSAGE" + bytes(8), True),
        (GREETING + b"\x00\x05hello", True),
        (GREETING + b"\x02" + (5).to_bytes(8, "big") + b"hello", True),
    ],
    ids=["nothing", "greeting", "welcome", "refusal", "ready", "encrypted", "plain", "long plain"],
)
def test_who_is_in_is_told_from_who_is_not(answer: bytes, inside: bool) -> None:
    with answering(answer) as endpoint:
        assert got_in(security.replay(endpoint, b"hello")) is inside
