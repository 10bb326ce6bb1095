"""The loop of a fork server, in a thread of this process: replies to requests that it cannot fulfil, and its end."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.forking import (
    ForkServer,
    ForkServerReady,
    ForkServerReply,
    SpawnRefused,
    SpawnRequest,
    decode_fork_reply,
    encode,
    pack_status,
    read_status,
)

WAIT_S = 30.0


@dataclass
class ServerThread:
    """A fork server in a thread, and the client's end of its socket.

    Args:
        channel: The client's end.
        client: What stands for the client's process; closing it is the client's end.
        results: What the loop has returned.
    """

    channel: socket.socket
    client: int
    results: list[list[int] | None] = field(default_factory=list)
    thread: threading.Thread = field(default_factory=threading.Thread)

    def ends(self) -> bool:
        """Tell whether the loop ends by itself."""
        self.thread.join(WAIT_S)
        return self.results == [None]

    def receive(self) -> ForkServerReply:
        return decode_fork_reply(self.channel.recv(1 << 16))


@pytest.fixture
def server_thread(request: pytest.FixtureRequest) -> Iterator[ServerThread]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(WAIT_S)
    watched, client = os.pipe()
    made = ServerThread(mine, client)
    server = ForkServer(theirs, watched, 4, idle_s=getattr(request, "param", WAIT_S))
    made.thread = threading.Thread(target=lambda: made.results.append(server.serve()))
    made.thread.start()
    assert made.receive() == ForkServerReady()
    yield made
    mine.close()
    assert made.ends()
    theirs.close()
    os.close(watched)
    if made.client >= 0:
        os.close(made.client)


def test_importing_it_changes_nothing_here() -> None:
    assert gc.isenabled()


def test_what_is_no_request_is_refused_and_the_next_is_answered(server_thread: ServerThread) -> None:
    for packet in (b"nothing", b'{"type":"spawn"}', encode(ForkServerReady())):
        server_thread.channel.send(packet)
        answer = server_thread.receive()
        assert isinstance(answer, SpawnRefused) and answer.number == 0 and "no request" in answer.why


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_request_has_four_descriptors_and_none_stays_open(server_thread: ServerThread, count: int) -> None:
    ends = [os.pipe() for _ in range(count)]
    socket.send_fds(server_thread.channel, [encode(SpawnRequest(7, (0,)))], [write for _, write in ends])
    assert server_thread.receive() == SpawnRefused(7, f"{count} descriptors came with the request, which takes 4")
    for read, write in ends:
        os.close(write)
        assert os.read(read, 1) == b"", "nobody has the other end"
        os.close(read)


def test_a_process_with_threads_is_not_forked(server_thread: ServerThread) -> None:
    """Such as this one, of which the loop is a thread."""
    ends = [os.pipe() for _ in range(4)]
    socket.send_fds(server_thread.channel, [encode(SpawnRequest(8, (0,)))], [write for _, write in ends])
    answer = server_thread.receive()
    assert isinstance(answer, SpawnRefused) and answer.number == 8 and "started threads" in answer.why
    for read, write in ends:
        os.close(write)
        os.close(read)


def test_it_ends_with_its_socket(server_thread: ServerThread) -> None:
    server_thread.channel.close()
    assert server_thread.ends()


def test_it_ends_with_its_client_though_a_fork_of_that_holds_the_socket(server_thread: ServerThread) -> None:
    os.close(server_thread.client)
    server_thread.client = -1
    assert server_thread.ends()


@pytest.mark.parametrize("server_thread", [0.01], indirect=True)
def test_it_ends_when_nobody_is_here_for_long(server_thread: ServerThread) -> None:
    assert server_thread.ends()


@given(status=st.integers(-64, 255))
def test_a_status_is_read_as_it_was(status: int) -> None:
    assert read_status(pack_status(status)) == status


@pytest.mark.parametrize("packed", [b"", b"\0", b"\0\0\0"])
def test_no_status_is_none(packed: bytes) -> None:
    assert read_status(packed) is None
