"""Descriptors that go from process to process, here from thread to thread."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from onebox.worker.comm.api import RankLost
from onebox.worker.comm.shm.descriptors import DescriptorExchange
from tests.kit import leaks


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail a test that leaves a descriptor open."""
    with leaks.nothing_left():
        yield


class Rank:
    """A post, and a file to hand over."""

    def __init__(self, stack: ExitStack, number: int) -> None:
        self.post = DescriptorExchange()
        stack.callback(self.post.close)
        self.file = os.memfd_create(f"test-{number}")
        stack.callback(os.close, self.file)
        os.write(self.file, f"of {number}".encode())

    @property
    def inode(self) -> int:
        """The inode of its file."""
        return os.fstat(self.file).st_ino

    def give(self, *files: int) -> None:
        """Send it descriptors, as anybody can."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as anybody:
            anybody.connect(b"\0" + bytes.fromhex(self.post.name))
            socket.send_fds(anybody, [b"x"], files)


def for_ever(peer: int) -> bool:
    """Let a peer take its time."""
    return True


def exchange(ranks: list[Rank], number: int) -> dict[int, str]:
    """Exchange files with all others and return what is in theirs."""
    peers = {peer: rank for peer, rank in enumerate(ranks) if peer != number}
    names = {peer: rank.post.name for peer, rank in peers.items()}
    inodes = {peer: rank.inode for peer, rank in peers.items()}
    came = ranks[number].post.exchange(ranks[number].file, names, inodes, for_ever)
    ranks[number].post.close()
    texts = {peer: os.pread(descriptor, 100, 0).decode() for peer, descriptor in came.items()}
    for descriptor in came.values():
        os.close(descriptor)
    return texts


@pytest.mark.parametrize("size", [1, 2, 5, 24])  # one process has all files of all, and may open 1,024
def test_everybody_gets_everybodys(size: int) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(size) as pool:
        ranks = [Rank(stack, number) for number in range(size)]
        for number, texts in enumerate(pool.map(lambda number: exchange(ranks, number), range(size))):
            assert texts == {peer: f"of {peer}" for peer in range(size) if peer != number}


def test_where_a_user_has_too_many_on_their_way_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    send, refused = socket.socket.sendmsg, iter(range(8))

    def sendmsg(self: socket.socket, *arguments: Any) -> int:
        if next(refused, None) is not None:
            raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")
        return send(self, *arguments)

    monkeypatch.setattr(socket.socket, "sendmsg", sendmsg)
    test_everybody_gets_everybodys(3)
    assert next(refused, None) is None


def test_what_a_stranger_sends_is_closed() -> None:
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        ranks = [Rank(stack, number) for number in range(3)]
        for _ in range(3):
            ranks[0].give(ranks[2].file, ranks[2].file)
            ranks[0].give()
        found = list(pool.map(lambda number: exchange(ranks[:2], number), range(2)))
    assert found == [{1: "of 1"}, {0: "of 0"}]


def test_a_file_of_that_inode_elsewhere_is_not_what_is_waited_for(tmp_path: Path) -> None:
    """Anybody may have one, on a file system of their own."""
    with ExitStack() as stack:
        ranks = [Rank(stack, number) for number in range(2)]
        other = stack.enter_context((tmp_path / "file").open("wb"))
        ranks[0].give(other.fileno())
        inode = os.fstat(other.fileno()).st_ino
        left = iter([True] * 3 + [False] * 9)
        names = {1: ranks[1].post.name}
        assert ranks[0].post.exchange(ranks[0].file, names, {1: inode}, lambda peer: next(left)) == {}


def test_a_peer_that_has_gone_is_noticed_at_once_and_the_others_are_not_held_up() -> None:
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        ranks = [Rank(stack, number) for number in range(3)]
        ranks[1].post.close()
        found = list(pool.map(lambda number: exchange(ranks, number), (0, 2)))
    assert found == [{2: "of 2"}, {0: "of 0"}]


def test_who_waits_asks_whether_the_other_may_still_come() -> None:
    asked = []

    def waiting(peer: int) -> bool:
        asked.append(peer)
        return len(asked) < 3

    with ExitStack() as stack:
        ranks = [Rank(stack, number) for number in range(2)]
        names, inodes = {1: ranks[1].post.name}, {1: ranks[1].inode}
        assert ranks[0].post.exchange(ranks[0].file, names, inodes, waiting) == {}
    assert asked == [1, 1, 1]


def test_what_came_is_closed_if_somebody_else_has_ended() -> None:
    def waiting(peer: int) -> bool:
        raise RankLost("it has ended")

    with ExitStack() as stack:
        ranks = [Rank(stack, number) for number in range(3)]
        ranks[0].give(ranks[1].file)
        names = {rank: ranks[rank].post.name for rank in (1, 2)}
        with pytest.raises(RankLost, match="it has ended"):
            ranks[0].post.exchange(ranks[0].file, names, {rank: ranks[rank].inode for rank in (1, 2)}, waiting)
