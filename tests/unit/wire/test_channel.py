"""The channel: keys, security, limits. Two sockets in one process; a stranger is turned away."""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
import zmq.auth
from hypothesis import given
from hypothesis import strategies as st
from zmq.auth.thread import ThreadAuthenticator

from onebox.errors import UsageError, WireError
from onebox.wire import KeyPair, channel, configure, held_bytes, listen, new_keys, receive, send


class Socket:
    """Takes down the options that it is given."""

    def __init__(self) -> None:
        self.options: dict[int, int] = {}

    def setsockopt(self, option: int, value: int) -> None:
        self.options[option] = value


def test_keys_are_new_each_time_and_fit_together() -> None:
    one, other = new_keys(), new_keys()
    assert one != other
    assert zmq.curve_public(one.secret.encode()).decode() == one.public


def test_a_key_pair_does_not_show_its_secret() -> None:
    keys = new_keys()
    for text in (repr(keys), str(keys), f"{keys}", f"{[keys]}"):
        assert keys.secret not in text
        assert keys.public in text


@pytest.mark.parametrize("server_key", [None, new_keys().public], ids=["server", "client"])
def test_both_sides_are_encrypted_and_limited(server_key: str | None) -> None:
    socket: Any = Socket()
    keys = new_keys()
    configure(socket, keys, server_key=server_key, queue=5)
    assert socket.curve_secretkey == keys.secret.encode()
    assert socket.curve_publickey == keys.public.encode()
    if server_key is None:
        assert socket.curve_server is True
        assert socket.zap_domain, "without a domain libzmq asks nobody whom to let in"
    else:
        assert socket.curve_serverkey == server_key.encode()
    assert channel.PART_BYTES < socket.options[zmq.MAXMSGSIZE] < 2 * channel.PART_BYTES, "what a stranger can announce"
    assert 0 < socket.options[zmq.HANDSHAKE_IVL] <= 5000
    assert socket.options[zmq.LINGER] == 0, "a closing process does not wait for a peer"
    assert (socket.options[zmq.SNDHWM], socket.options[zmq.RCVHWM]) == (5, 5)


def test_a_pair_of_keys_is_immutable() -> None:
    with pytest.raises(AttributeError):
        KeyPair("a", "b").secret = "c"  # type: ignore[misc]


# ---- parts


@pytest.mark.parametrize(
    ("frames", "parts"),
    [
        ([b"ab", b""], [b"ab", b""]),
        ([b"abc"], [b"abc", b""]),
        ([b"abcd", b"x"], [b"abc", b"d", b"x"]),
        ([b"", b"abcdef", b"abcdefg"], [b"", b"abc", b"def", b"", b"abc", b"def", b"g"]),
    ],
)
def test_long_frames_travel_in_parts_that_a_shorter_one_ends(frames: list[bytes], parts: list[bytes]) -> None:
    assert [bytes(part) for part in channel.cut(frames, 3)] == parts
    assert [bytes(frame) for frame in channel.join(list(parts), 3)] == frames


@given(st.lists(st.binary(max_size=14), min_size=1, max_size=6), st.integers(1, 5))
def test_what_is_cut_is_joined_again(frames: list[bytes], size: int) -> None:
    parts = channel.cut(frames, size)
    assert max(map(len, parts)) <= size
    assert [bytes(frame) for frame in channel.join(parts, size)] == frames


@pytest.mark.parametrize("parts", [[b"abc"], [b"a", b"abc"], [b"abc", b"abc"], [b"abc", b"abcd", b""], [b"abcd"]])
def test_a_message_that_ends_within_a_frame_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(WireError, match="ends within a frame"):
        channel.join(parts, 3)


def test_whole_frames_are_handed_on_as_they_are() -> None:
    parts = [memoryview(b"header"), memoryview(bytes(1000))]
    assert channel.join(channel.cut(parts)) == parts


class Pair:
    """A server that binds an address and lets everybody in who knows its key, and its client."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.gate = ThreadAuthenticator(self.context)
        self.gate.start()
        self.gate.configure_curve(domain="*", location=zmq.auth.CURVE_ALLOW_ANY)
        keys = new_keys()
        self.server, self.client = (self.context.socket(zmq.DEALER) for _ in range(2))
        configure(self.server, keys, server_key=None)
        self.endpoint = listen(self.server, address)
        configure(self.client, new_keys(), server_key=keys.public)
        self.client.connect(self.endpoint)
        for socket in (self.server, self.client):
            socket.rcvtimeo = socket.sndtimeo = 10_000

    def close(self) -> None:
        self.gate.stop()
        self.context.destroy(linger=0)


@pytest.fixture(params=["tcp", "ipc"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair("127.0.0.1" if request.param == "tcp" else str(tmp_path_factory.mktemp("s")))
    yield made
    made.close()


def test_endpoints_are_of_the_address(pair: Pair) -> None:
    assert pair.endpoint.startswith(("tcp://127.0.0.1:", "ipc:///"))
    if pair.endpoint.startswith("ipc"):
        assert Path(pair.endpoint.removeprefix("ipc://")).is_socket()


@pytest.mark.parametrize("copy", [True, False])
def test_messages_of_any_size_arrive_whole(pair: Pair, copy: bool) -> None:
    part = channel.PART_BYTES
    frames = [b"header", os.urandom(part), os.urandom(3 * part + 5), b"", os.urandom(part - 1), os.urandom(2 * part)]
    sender = threading.Thread(target=lambda: send(pair.client, frames, copy=copy))
    sender.start()
    came = receive(pair.server)
    sender.join()
    assert [bytes(frame) for frame in came] == frames


def test_what_is_longer_than_a_part_closes_the_connection(pair: Pair) -> None:
    send(pair.client, [b"first"])
    assert bytes(receive(pair.server)[0]) == b"first"
    pair.client.send(bytes(channel.PART_BYTES + 4096))
    pair.server.rcvtimeo = 300
    with pytest.raises(zmq.Again):
        receive(pair.server)


def test_of_some_ports_the_first_that_is_free_is_taken() -> None:
    with zmq.Context() as context:
        sockets = [context.socket(zmq.DEALER) for _ in range(4)]
        try:
            first = int(listen(sockets[0], "127.0.0.1").rpartition(":")[2])
            ports = range(first, min(first + 40, 65535))
            found = [listen(socket, "127.0.0.1", ports) for socket in sockets[1:3]]
            taken = [int(endpoint.rpartition(":")[2]) for endpoint in found]
            assert len({first, *taken}) == 3 and all(port in ports for port in taken)
            with pytest.raises(UsageError, match=f"no port from {first} to {first} is free at 127.0.0.1"):
                listen(sockets[3], "127.0.0.1", range(first, first + 1))
        finally:
            for socket in sockets:
                socket.close(0)


def test_the_memory_of_a_message_of_empty_frames_is_not_underestimated() -> None:
    kept = []
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://frames")
        other.connect("inproc://frames")
        before_bytes = psutil.Process().memory_info().rss
        for _ in range(3):
            one.send_multipart([b"header", *[b""] * 30_000])
            kept.append(channel.receive(other))
        grown_bytes = psutil.Process().memory_info().rss - before_bytes
        assert grown_bytes < 1.25 * sum(map(held_bytes, kept))
        kept.clear()


class Relay:
    """Whoever is on the wire: carries all connections to an endpoint, and sees and may change what passes.

    Args:
        endpoint: Where they lead.
    """

    def __init__(self, endpoint: str) -> None:
        self.seen = bytearray()
        self.changes = False
        self.changed = 0
        self._target = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self._listener = sockets.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                self._threads.append(threading.Thread(target=self._serve, args=(near,)))
                self._threads[-1].start()

    def _serve(self, near: sockets.socket) -> None:
        with near, sockets.create_connection(self._target) as far:
            back = threading.Thread(target=self._carry, args=(far, near))
            back.start()
            self._carry(near, far)
            back.join()

    def _carry(self, source: sockets.socket, target: sockets.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                self.seen += data
                if self.changes and len(data) > 100:
                    data[-10] ^= 1
                    self.changed += 1
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(sockets.SHUT_RDWR)

    def close(self) -> None:
        """End, once nobody is connected."""
        self._listener.shutdown(sockets.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


def test_who_is_on_the_wire_reads_nothing_and_what_is_changed_there_does_not_arrive() -> None:
    server_keys, client_keys, secret = new_keys(), new_keys(), b"a tensor's bytes" * 64
    with zmq.Context() as context, context.socket(zmq.DEALER) as server, context.socket(zmq.DEALER) as client:
        configure(server, server_keys, server_key=None)
        relay = Relay(listen(server, "127.0.0.1"))
        configure(client, client_keys, server_key=server_keys.public)
        client.connect(relay.endpoint)
        send(client, [b"1", secret])
        assert server.poll(10_000) and [bytes(each) for each in receive(server)] == [b"1", secret]
        assert len(relay.seen) > len(secret) and secret[:16] not in relay.seen
        relay.changes = True
        send(client, [b"2", secret])
        assert not server.poll(1000) and relay.changed
        relay.changes = False
        send(client, [b"3", secret])
        assert server.poll(10_000), "another connection has been made"
        assert bytes(receive(server)[0]) == b"3"
    relay.close()
