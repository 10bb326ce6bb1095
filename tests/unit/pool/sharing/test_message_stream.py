"""Messages over a stream socket: they arrive whole, are limited, and end with the peer."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from onebox.errors import WireError
from onebox.pool.sharing.message_stream import MessageStream
from onebox.wire.protocol.codec import FRAME_BYTES, FRAMES, HEADER_BYTES

Pair = tuple[MessageStream, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A stream, and the socket of its peer."""
    ours, peer = socket.socketpair()
    stream = MessageStream(ours)
    yield stream, peer
    stream.close()
    peer.close()


def sent(stream: MessageStream, *messages: tuple[bytes, list[bytes]]) -> threading.Thread:
    """Send messages by a thread, as a socket holds only so much."""

    def send() -> None:
        for header, frames in messages:
            stream.send(header, frames)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "frames",
    [[], [b""], [b"one", b"", b"three"], [bytes(range(256)) * 4096, b"x"], [bytes([n % 256]) for n in range(5000)]],
    ids=["none", "empty", "few", "large", "many"],
)
def test_messages_arrive_whole_and_in_order(pair: Pair, frames: list[bytes]) -> None:
    stream, peer = pair
    received = MessageStream(peer)
    thread = sent(stream, (b"first", frames), (b"", []), (b"last", frames[:1]))
    assert [received.receive() for _ in range(3)] == [(b"first", frames), (b"", []), (b"last", frames[:1])]
    thread.join()


def test_frames_of_any_element_type_are_sent_as_bytes(pair: Pair) -> None:
    stream, peer = pair
    stream.send(b"h", [memoryview(struct.pack("<3i", 1, 2, 3)).cast("i")])
    assert MessageStream(peer).receive() == (b"h", [struct.pack("<3i", 1, 2, 3)])


WHOLE = struct.pack("<II2Q", 3, 2, 4, 1) + b"abc" + b"defg" + b"h"


@pytest.mark.parametrize("size", range(len(WHOLE)))
def test_an_end_in_the_middle_of_a_message_is_an_end(pair: Pair, size: int) -> None:
    stream, peer = pair
    peer.sendall(WHOLE[:size])
    peer.close()
    assert stream.receive() is None


def test_a_message_in_pieces_is_one(pair: Pair) -> None:
    stream, peer = pair
    received: list[object] = []
    thread = threading.Thread(target=lambda: received.append(stream.receive()))
    thread.start()
    for each in WHOLE:
        peer.sendall(bytes([each]))
    thread.join()
    assert received == [(b"abc", [b"defg", b"h"])]


@pytest.mark.parametrize(
    "start",
    [
        struct.pack("<II", HEADER_BYTES + 1, 0),
        struct.pack("<II", 0, FRAMES + 1),
        struct.pack("<IIQ", 0, 1, FRAME_BYTES + 1),
    ],
    ids=["header", "frames", "frame"],
)
def test_a_message_over_the_limits_is_refused_before_it_is_read(pair: Pair, start: bytes) -> None:
    stream, peer = pair
    peer.sendall(start)
    with pytest.raises(WireError, match=r"over the limits|allowed are"):
        stream.receive()


def test_a_message_over_the_limits_is_not_sent(pair: Pair) -> None:
    stream, peer = pair
    with pytest.raises(WireError, match=f"{HEADER_BYTES + 1} bytes"):
        stream.send(bytes(HEADER_BYTES + 1))
    with pytest.raises(WireError, match=f"{FRAMES + 1} tensors"):
        stream.send(b"", [b""] * (FRAMES + 1))
    peer.setblocking(False)
    with pytest.raises(BlockingIOError):
        peer.recv(1)


def test_the_end_wakes_both_directions(pair: Pair) -> None:
    stream, _ = pair
    received: list[object] = [0]
    reader = threading.Thread(target=lambda: received.append(stream.receive()))
    writer = threading.Thread(target=lambda: received.append(refused(stream)))
    reader.start()
    writer.start()
    stream.end()
    reader.join()
    writer.join()
    assert sorted(map(str, received)) == ["0", "None", "True"]


def refused(stream: MessageStream) -> bool:
    """Return whether the peer goes while it reads nothing of a large message."""
    with pytest.raises(OSError):
        stream.send(b"", [bytes(1 << 24)])
    return True
