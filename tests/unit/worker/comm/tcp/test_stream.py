"""One stream of bytes over one or several connections."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

import pytest

from onebox.worker.comm.tcp import stream
from onebox.worker.comm.tcp.connection import TcpConnection
from onebox.worker.comm.tcp.meter import LinkMeter
from onebox.worker.comm.tcp.stream import ConnectionReader, ConnectionWriter


@contextlib.contextmanager
def pairs(count: int) -> Iterator[tuple[list[TcpConnection], list[TcpConnection]]]:
    """Connections of this process with itself: the ends to write to, and those to read from."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        ends: tuple[list[TcpConnection], list[TcpConnection]] = ([], [])
        for _ in range(count):
            near = stack.enter_context(socket.create_connection(listener.getsockname()))
            far = stack.enter_context(listener.accept()[0])
            ends[0].append(TcpConnection(near, None, serving=False))
            ends[1].append(TcpConnection(far, None, serving=True))
        yield ends


class Scattering(LinkMeter):
    """A meter that sends each chunk by another connection."""

    def __init__(self, connections: list[TcpConnection]) -> None:
        super().__init__(connections, 1, 1)
        self._all = connections
        self._chance = random.Random(1)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send by any of them."""
        self._chance.choice(self._all).send(*parts)


@pytest.mark.parametrize("count", [1, 3])
def test_bytes_come_in_order_by_any_connections(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(stream, "SPREAD_BYTES", 3000)
    chance = random.Random(count)
    sent = [
        (chance.randbytes(chance.randrange(1, 90)), chance.randbytes(chance.choice([0, 7, 20_000]))) for _ in range(60)
    ]
    with pairs(count) as (near, far):
        writer = ConnectionWriter(near, Scattering(near))

        def write() -> None:
            for head, body in sent:
                writer.write(head, memoryview(body))
            for each in near:
                each.close()

        thread = threading.Thread(target=write)
        thread.start()
        reader = ConnectionReader(far)
        for head, body in sent:
            assert reader.read(len(head)) == head
            target = memoryview(bytearray(len(body)))
            for start in range(0, len(target), 3000):
                assert reader.read_into(target[start : start + 3000])
            assert target == body
            assert reader.read(0) == b""
        assert reader.read(1) is None
        thread.join()


@pytest.mark.parametrize("said", [b"\0\0\0\0\0\0\0\0", b"\0\0\0\0\xff\xff\xff\xff", b"\0\0\0\0\x04\0\0\0ab", b"\0\0"])
def test_a_connection_without_whole_chunks_fails(said: bytes) -> None:
    with pairs(1) as (near, far):
        near[0].send(said)
        near[0].close()
        with pytest.raises(ConnectionError):
            ConnectionReader(far).read_into(memoryview(bytearray(4)))


def test_two_chunks_of_one_number_fail() -> None:
    with pairs(2) as (near, far):
        for each in near:
            each.send(b"\1\0\0\0\1\0\0\0a")
        with pytest.raises(ConnectionError, match="two chunks of one number"):
            ConnectionReader(far).read_into(memoryview(bytearray(4)))
