"""The relay of a client, between listeners of threads: what it hands on, how much it holds, and whom it refuses."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from onebox.pool.client import relay as relays
from onebox.pool.client.relay import ATTEMPTS, CHUNK_BYTES, Relay, RelayEnd
from onebox.pool.errors import WorkerLocation
from onebox.wire.group_listener import (
    GREETING_BYTES,
    SECRET_BYTES,
    Greeting,
    GroupListener,
    decode_greeting,
    greeting_reply,
)
from tests.kit.waiting import until

WITHIN_S = 30.0
HERE = "127.0.0.1"
GROUP = 3


@pytest.fixture
def relay() -> Iterator[Relay]:
    made = Relay()
    yield made
    made.close()
    assert not relaying()


class Ends(NamedTuple):
    """The listeners of two workers, and the way between them."""

    source: socket.socket
    target: socket.socket
    ends: tuple[RelayEnd, RelayEnd]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with socket.create_server((HERE, 0)) as source, socket.create_server((HERE, 0)) as target:
        source.settimeout(WITHIN_S)
        target.settimeout(WITHIN_S)
        yield Ends(source, target, (end(source, 0), end(target, 1)))


def end(listener: socket.socket, number: int) -> RelayEnd:
    place = WorkerLocation(worker=number, host=f"host{number}", device="cpu")
    port = listener.getsockname()[1]
    return RelayEnd(place, number, HERE, GroupListener("10.0.0.7", port, secret(number), b"certificate"))


def secret(number: int) -> bytes:
    return bytes([number]) * SECRET_BYTES


def accept(listener: socket.socket, secret: bytes) -> tuple[socket.socket, Greeting | None]:
    """Accept the client and reply as a worker does."""
    found, _ = listener.accept()
    found.settimeout(WITHIN_S)
    greeting = b""
    while len(greeting) < GREETING_BYTES:
        greeting += found.recv(GREETING_BYTES - len(greeting))
    found.sendall(greeting_reply(secret, greeting))
    return found, decode_greeting(secret, greeting)


@contextlib.contextmanager
def connected(relay: Relay, ends: Ends) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Relay between the two, and return the workers' sockets."""
    relay.open(GROUP, *ends.ends)
    target, said = accept(ends.target, secret(1))
    assert said == Greeting(False, 0)
    source, said = accept(ends.source, secret(0))
    assert said == Greeting(True, 1)
    with source, target:
        target.sendall(b"!")
        assert source.recv(1) == b"!"
        yield source, target


def relaying() -> int:
    """Return the number of threads that relay."""
    return sum(thread.name == "onebox-relay" for thread in threading.enumerate())


def read_all(connection: socket.socket) -> bytes:
    found = bytearray()
    while data := connection.recv(1 << 16):
        found += data
    return bytes(found)


def test_bytes_go_both_ways_and_so_does_the_end(relay: Relay, ends: Ends) -> None:
    with connected(relay, ends) as (source, target):
        sent = bytes(range(256)) * (1 << 13)
        thread = threading.Thread(target=lambda: (source.sendall(sent), source.shutdown(socket.SHUT_WR)))
        thread.start()
        assert read_all(target) == sent
        thread.join()
        target.sendall(b"after its end")
        target.shutdown(socket.SHUT_WR)
        assert read_all(source) == b"after its end"


def test_a_worker_that_does_not_read_stops_the_other_one_and_the_client_holds_a_chunk(relay: Relay, ends: Ends) -> None:
    with connected(relay, ends) as (source, target):
        source.settimeout(0.3)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while True:
                sent += source.send(bytes(1 << 16))
                assert sent < 64 << 20, "somebody takes it all"
        assert sent > CHUNK_BYTES
        source.shutdown(socket.SHUT_WR)
        assert len(read_all(target)) == sent


def test_a_connection_that_breaks_ends_the_other_one(relay: Relay, ends: Ends) -> None:
    with connected(relay, ends) as (source, target):
        target.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        target.close()  # a reset
        with contextlib.suppress(ConnectionError):
            assert source.recv(1) == b""
        until(lambda: not relaying())


def test_the_end_of_a_group_ends_its_connections_after_what_was_sent(
    relay: Relay, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "LINGER_S", 0.5)
    with connected(relay, ends) as (source, target):
        relay.end(GROUP + 1)
        source.sendall(b"last")
        relay.end(GROUP)
        now_s = time.monotonic()
        relay.look(now_s)
        assert target.recv(4) == b"last"
        relay.look(now_s + 1.0)
        assert read_all(target) == b"", "closed, though the source has not closed it"
        assert source.recv(1) == b""


def test_the_end_of_a_group_ends_attempts_to_connect(relay: Relay, ends: Ends) -> None:
    ends.target.close()
    relay.open(GROUP, *ends.ends)
    relay.end(GROUP)
    relay.look(time.monotonic())
    until(lambda: not relaying())


def test_the_end_of_the_client_is_that_of_all(relay: Relay, ends: Ends) -> None:
    with connected(relay, ends) as (source, target):
        relay.close()
        assert source.recv(1) == b"" and target.recv(1) == b""
        relay.open(GROUP, *ends.ends)  # too late


def test_the_client_ends_also_while_somebody_does_not_answer(relay: Relay, ends: Ends) -> None:
    relay.open(GROUP, *ends.ends)
    with ends.target.accept()[0]:
        relay.close()
        assert not relaying()


def test_another_program_at_the_port_gets_a_greeting_and_no_byte_of_a_worker(relay: Relay, ends: Ends) -> None:
    """A worker may name any port of its host."""
    relay.open(GROUP, *ends.ends)
    with ends.target.accept()[0] as other:
        other.settimeout(WITHIN_S)
        assert len(other.recv(1 << 16)) == GREETING_BYTES
        other.sendall(b"220 mail.example.org ESMTP".ljust(100))
        with contextlib.suppress(ConnectionError):
            assert other.recv(1) == b""
    ends.source.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        ends.source.accept()


def test_it_is_tried_again_for_a_while_and_then_given_up_with_a_reason(
    relay: Relay, ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relays, "OPEN_S", 0.6)
    relay.open(GROUP, *ends.ends)
    for _ in range(2):
        ends.target.accept()[0].close()
    ends.target.close()
    until(lambda: not relaying())
    port = ends.ends[1].listener.port
    assert (
        f"cannot connect worker 0 (cpu on host0) with worker 1 (cpu on host1) either: {HERE}, port {port}"
        in caplog.text
    )


def test_a_pair_is_connected_a_few_times_in_a_group(relay: Relay, ends: Ends) -> None:
    for _ in range(ATTEMPTS):
        with connected(relay, ends):
            pass
    relay.open(GROUP, *ends.ends)
    until(lambda: not relaying())
    relay.end(GROUP)
    with connected(relay, ends):
        pass


def test_there_is_a_limit(
    relay: Relay, ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relays, "MOST_CONNECTIONS", 1)
    with connected(relay, ends):
        relay.open(GROUP, *ends.ends)
        assert "no more" in caplog.text


def test_a_pair_of_hosts_is_told_of_once_and_each_connection_with_what_it_has_carried(
    relay: Relay, ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for _ in range(2):
        with connected(relay, ends) as (source, target):
            source.sendall(b"x")
            assert target.recv(1) == b"x"
    until(lambda: not relaying())
    assert caplog.text.count("workers of host0 cannot connect to those of host1") == 1
    assert caplog.text.count("relayed 1 bytes from worker 0 (cpu on host0) to worker 1 (cpu on host1)") == 2
