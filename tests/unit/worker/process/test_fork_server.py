"""The loop of a nursery, in a thread of this process: what it answers to wishes that it cannot fulfil, and its end."""

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

from onebox.worker.process.fork_messages import (
    ForkServerReady,
    ForkServerReply,
    SpawnRefused,
    SpawnRequest,
    decode_fork_reply,
    encode,
    pack_status,
    read_status,
)
from onebox.worker.process.fork_server import ForkServer

WAIT_S = 30.0


@dataclass
class Ward:
    """A nursery in a thread, and the client's end of its socket.

    Args:
        channel: The client's end.
        client: What stands for the client's process; closing it is the client's end.
        results: What the loop has returned.
    """

    channel: socket.socket
    client: int
    results: list[bool] = field(default_factory=list)
    thread: threading.Thread = field(default_factory=threading.Thread)

    def ends(self) -> bool:
        """Tell whether the loop ends by itself."""
        self.thread.join(WAIT_S)
        return self.results == [False]

    def hear(self) -> ForkServerReply:
        return decode_fork_reply(self.channel.recv(1 << 16))


@pytest.fixture
def ward(request: pytest.FixtureRequest) -> Iterator[Ward]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(WAIT_S)
    watched, client = os.pipe()
    made = Ward(mine, client)
    nursery = ForkServer(theirs, watched, idle_s=getattr(request, "param", WAIT_S))
    made.thread = threading.Thread(target=lambda: made.results.append(nursery.serve()))
    made.thread.start()
    assert made.hear() == ForkServerReady()
    yield made
    mine.close()
    assert made.ends()
    theirs.close()
    os.close(watched)
    if made.client >= 0:
        os.close(made.client)


def test_to_import_it_changes_nothing_here() -> None:
    assert gc.isenabled()


def test_what_is_no_wish_is_refused_and_the_next_is_heard(ward: Ward) -> None:
    for packet in (b"nothing", b'{"type":"birth"}', encode(ForkServerReady())):
        ward.channel.send(packet)
        answer = ward.hear()
        assert isinstance(answer, SpawnRefused) and answer.number == 0 and "no wish" in answer.why


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_wish_has_four_descriptors_and_none_stays_open(ward: Ward, count: int) -> None:
    ends = [os.pipe() for _ in range(count)]
    socket.send_fds(ward.channel, [encode(SpawnRequest(7, (0,)))], [write for _, write in ends])
    assert ward.hear() == SpawnRefused(7, f"{count} descriptors came with the wish for a worker, which takes 4")
    for read, write in ends:
        os.close(write)
        assert os.read(read, 1) == b"", "nobody has the other end"
        os.close(read)


def test_a_process_with_threads_is_not_forked(ward: Ward) -> None:
    """Such as this one, of which the loop is a thread."""
    ends = [os.pipe() for _ in range(4)]
    socket.send_fds(ward.channel, [encode(SpawnRequest(8, (0,)))], [write for _, write in ends])
    answer = ward.hear()
    assert isinstance(answer, SpawnRefused) and answer.number == 8 and "started threads" in answer.why
    for read, write in ends:
        os.close(write)
        os.close(read)


def test_it_ends_with_its_socket(ward: Ward) -> None:
    ward.channel.close()
    assert ward.ends()


def test_it_ends_with_its_client_though_a_fork_of_that_holds_the_socket(ward: Ward) -> None:
    os.close(ward.client)
    ward.client = -1
    assert ward.ends()


@pytest.mark.parametrize("ward", [0.01], indirect=True)
def test_it_ends_when_nobody_is_here_for_long(ward: Ward) -> None:
    assert ward.ends()


@given(status=st.integers(-64, 255))
def test_a_status_is_read_as_it_was(status: int) -> None:
    assert read_status(pack_status(status)) == status


@pytest.mark.parametrize("packed", [b"", b"\0", b"\0\0\0"])
def test_no_status_is_none(packed: bytes) -> None:
    assert read_status(packed) is None
