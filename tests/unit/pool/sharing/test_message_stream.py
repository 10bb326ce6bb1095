"""Messages over a stream socket: they arrive whole, are limited, and end with the peer."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from onebox.errors import WireError
from onebox.pool.sharing.message_stream import MessageStream
from onebox.wire.protocol.codec import FRAME_BYTES, FRAMES, HEADER_BYTES

WITHIN_S = 20.0


class Recorder(MessageStream):
    """Keeps what comes, and how it ends."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, "recorder")
        self.messages: list[tuple[int, bytes, list[bytes]]] = []
        self.error: WireError | None = None
        self.over = threading.Event()

    def received(self, worker: int, header: bytearray, frames: Sequence[Any]) -> bool:
        self.messages.append((worker, bytes(header), [bytes(frame) for frame in frames]))
        return header != b"last"

    def ended(self, error: WireError | None) -> None:
        self.error = error
        self.over.set()


Pair = tuple[Recorder, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A stream with its threads, and the socket of its peer."""
    ours, peer = socket.socketpair()
    stream = Recorder(ours)
    stream.start()
    yield stream, peer
    stream.end()
    stream.join(WITHIN_S)
    peer.close()
    assert ours.fileno() == -1, "closed with its threads"


@pytest.mark.parametrize(
    "frames",
    [[], [b""], [b"one", b"", b"three"], [bytes(range(256)) * 4096, b"x"], [bytes([n % 256]) for n in range(5000)]],
    ids=["none", "empty", "few", "large", "many"],
)
def test_messages_arrive_whole_and_in_order(pair: Pair, frames: list[bytes]) -> None:
    stream, peer = pair
    sender = Recorder(peer)
    sender.start()
    messages = [(0, b"first", frames), (3, b"", []), (1, b"last", frames[:1])]
    for message in messages:
        sender.send(*message)
    assert stream.over.wait(WITHIN_S)
    assert stream.messages == messages and stream.error is None
    sender.join(WITHIN_S)  # which the end of the other one ends


def test_frames_of_any_element_type_are_sent_as_bytes(pair: Pair) -> None:
    stream, peer = pair
    stream.send(2, b"h", [memoryview(struct.pack("<3i", 1, 2, 3)).cast("i")])
    assert MessageStream(peer, "peer").receive() == (2, b"h", [struct.pack("<3i", 1, 2, 3)])


WHOLE = struct.pack("<III2Q", 1, 3, 2, 4, 1) + b"abc" + b"defg" + b"h"


@pytest.mark.parametrize("size", range(len(WHOLE)))
def test_an_end_in_the_middle_of_a_message_is_an_end(pair: Pair, size: int) -> None:
    stream, peer = pair
    peer.sendall(WHOLE[:size])
    peer.close()
    assert stream.over.wait(WITHIN_S)
    assert stream.messages == [] and stream.error is None


def test_a_message_in_pieces_is_one(pair: Pair) -> None:
    stream, peer = pair
    for each in WHOLE:
        peer.sendall(bytes([each]))
    peer.close()
    assert stream.over.wait(WITHIN_S)
    assert stream.messages == [(1, b"abc", [b"defg", b"h"])]


@pytest.mark.parametrize(
    "start",
    [
        struct.pack("<III", 0, HEADER_BYTES + 1, 0),
        struct.pack("<III", 0, 0, FRAMES),
        struct.pack("<IIIQ", 0, 0, 1, FRAME_BYTES + 1),
    ],
    ids=["header", "frames", "frame"],
)
def test_a_message_over_the_limits_is_refused_before_it_is_read(pair: Pair, start: bytes) -> None:
    stream, peer = pair
    peer.sendall(start)
    assert stream.over.wait(WITHIN_S)
    assert stream.messages == [] and stream.error is not None
    assert peer.recv(1) == b"", "the connection has ended"


def test_what_was_sent_before_the_end_arrives(pair: Pair) -> None:
    stream, peer = pair
    stream.send(0, b"header", [bytes(1 << 20)])
    stream.finish()
    other = MessageStream(peer, "peer")
    assert other.receive() == (0, b"header", [bytes(1 << 20)])
    with pytest.raises(ConnectionError):
        other.receive()


def test_the_end_wakes_both_directions(pair: Pair) -> None:
    stream, peer = pair
    stream.send(0, b"", [bytes(1 << 24)])  # more than a socket holds
    assert peer.recv(1)  # it is being sent
    stream.end()
    stream.join(WITHIN_S)
    assert stream.over.is_set()
