"""Groups over TCP, the ranks being threads: sums and their bits, connections when they are needed, and peers that end
in the middle or say what no worker says."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from onebox.wire import TensorSpec, spec_of
from onebox.wire.protocol.groups import FormGroup
from onebox.worker.comm import group as group_module
from onebox.worker.comm.api import RankLost, WorkerGroup
from onebox.worker.comm.group import SHARED_BYTES, CarriedGroup
from onebox.worker.comm.tcp import carrier as tcp_carrier
from onebox.worker.comm.tcp.carrier import TcpCarrier
from onebox.worker.comm.tcp.messages import WINDOW_BYTES, MessageHeader
from onebox.worker.progress import WorkerProgress
from tests.kit.waiting import until
from tests.unit.programs import HOST
from tests.unit.ranks import Keys, in_group, in_threads
from tests.unit.worker.comm.tcp.meshes import HERE, WITHIN_S, Ends, announced, closing, connect_mesh

FLOAT = TensorSpec("float32", (4,))


def tcp_group(form: FormGroup, store: Keys) -> CarriedGroup:
    """Join a group all of whose ranks are reached by TCP."""
    progress = WorkerProgress()
    return CarriedGroup(form, [TcpCarrier(form, store, HOST, progress, HERE, encrypted=True)], HOST, progress)


def run(
    size: int, rank: Callable[[CarriedGroup], Any], *, store: Keys | None = None, timeout_s: float = 20.0
) -> list[Any]:
    """Form a group of threads, and run a function in each."""
    store, done = store or Keys(), threading.Barrier(size)

    def one(number: int) -> Any:
        form = FormGroup(3, number, size, "tls", HERE, 20.0)
        return in_group(tcp_group(form, store), rank, done)

    return in_threads(size, one)


def test_a_sum_goes_on_whatever_ranks_do_before_they_wait_for_it() -> None:
    """One waits for what the other sends when it has its sum."""
    count = SHARED_BYTES

    def rank(group: CarriedGroup) -> list[float]:
        first, second = (group.reduce([torch.full((count,), float(group.rank))]) for _ in range(2))
        if group.rank == 0:
            group.receive(FLOAT, 1, 5)()
            return [float(first().tensor[0]), float(second().tensor[-1])]
        found = [float(second().tensor[0]), float(first().tensor[-1])]
        if group.rank == 1:
            group.send(torch.ones(4), 0, 5)
        return found

    assert run(3, rank) == [[3.0, 3.0]] * 3


def test_a_large_group_connects_those_that_exchange_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sums, as steps have to vote, are the first rank's; a sender connects to who receives."""
    for module in (tcp_carrier, group_module):
        monkeypatch.setattr(module, "FEW_RANKS", 1)
    size, made = 5, list[int]()
    connect = tcp_carrier.Mesh.connect

    def noted(self: tcp_carrier.Mesh, rank: int, *args: Any) -> Any:
        made.append(rank)
        return connect(self, rank, *args)

    monkeypatch.setattr(tcp_carrier.Mesh, "connect", noted)

    def rank(group: CarriedGroup) -> Tensor | None:
        came = group.receive(FLOAT, group.rank - 1, 0)().tensor if group.rank else torch.zeros(4)
        if group.rank + 1 < size:
            group.send(came + 1, group.rank + 1, 0)
        return came + group.reduce([torch.full((4,), float(group.rank))])().tensor

    assert [float(found[0]) for found in run(size, rank)] == [10.0, 11.0, 12.0, 13.0, 14.0]
    assert Counter(made) == {0: 4, 1: 1, 2: 2, 3: 2, 4: 2}


def test_a_wait_for_one_that_left_without_a_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_carrier, "FEW_RANKS", 1)
    store = Keys()

    def rank(group: CarriedGroup) -> None:
        if group.rank == 0:
            wait = group.receive(FLOAT, 1, 0)
            store.dissolved = True  # as the client does when rank 1 says that it leaves
            with pytest.raises(RankLost, match="has left the group"):
                wait()

    run(2, rank, store=store)


def test_the_reader_of_one_channel_is_not_held_up_by_what_nobody_reads_in_another() -> None:
    half = torch.zeros(WINDOW_BYTES // 8)  # of a window

    def rank(group: CarriedGroup) -> int:
        if group.rank == 0:
            for _ in range(4):
                group.send(half, 1, 1)
            group.send(torch.ones(4), 1, 2)
            group.receive(FLOAT, 1, 0)()
            return 0
        assert group.receive(FLOAT, 0, 2)().tensor.tolist() == [1.0] * 4
        group.send(torch.ones(4), 0, 0)
        return sum(len(group.receive(spec_of(half), 0, 1)().tensor) for _ in range(4))

    assert run(2, rank) == [0, 4 * len(half)]


def test_a_wait_that_is_given_up_ends_and_nothing_more_is_sent() -> None:
    def rank(group: CarriedGroup) -> None:
        wait = group.receive(FLOAT, 1 - group.rank, 0)
        timer = threading.Timer(0.05, group.interrupt)
        timer.start()
        with pytest.raises(RankLost, match=r"given up|not connected any more|has left"):
            wait()
        timer.join()
        with pytest.raises(RankLost):
            group.send(torch.ones(4), 1 - group.rank, 0)

    run(2, rank)


# ---- a peer that is none


@contextlib.contextmanager
def beside_a_peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CarriedGroup, Ends]]:
    """A group of two, and the connections of its rank 1, which is the test."""
    monkeypatch.setattr(tcp_carrier, "FEW_RANKS", 1)
    store = Keys()
    with ThreadPoolExecutor(1) as threads:
        peer = threads.submit(connect_mesh, 1, 2, HERE, store)
        form = FormGroup(3, 0, 2, "tls", HERE, 20.0)
        group = tcp_group(form, store)
        try:
            group.send(torch.zeros(1), 1, 0)
            ends = peer.result(WITHIN_S)
            with closing(ends):
                yield group, ends[0]
        finally:
            group.close()


def chunk(number: int, data: bytes) -> bytes:
    """Return a chunk of a stream."""
    return number.to_bytes(4, "little") + len(data).to_bytes(4, "little") + data


def test_the_wait_for_a_tensor_ends_when_its_sender_ends_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    with beside_a_peer(monkeypatch) as (group, peer):
        finish = group.receive(TensorSpec("uint8", (1000,)), 1, 0)
        head = MessageHeader(0, 0, 0, 1000, TensorSpec("uint8", (1000,))).encode()
        peer.outgoing[0].send(chunk(0, head + bytes(500)))
        peer.close()
        with pytest.raises(RankLost, match=r"rank 1 is not connected any more: .*in the middle of a message"):
            finish()


def test_what_came_whole_before_the_end_is_received_and_a_wait_for_more_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with beside_a_peer(monkeypatch) as (group, peer):
        head = MessageHeader(0, 0, 0, 3, TensorSpec("uint8", (3,))).encode()
        peer.outgoing[0].send(chunk(0, head + b"abc"))
        peer.close()
        found, more = (group.receive(TensorSpec("uint8", (3,)), 1, 0) for _ in range(2))
        assert bytes(found().tensor.tolist()) == b"abc"
        with pytest.raises(RankLost, match="rank 1 has left the group"):
            more()


@pytest.mark.parametrize(
    "said",
    [
        bytes(100).replace(b"\0", b"\xff"),
        MessageHeader(0, 0, 5, 1, TensorSpec("uint8", (9,))).encode(),
        MessageHeader(0, 0, 0, 9, TensorSpec("uint8", (8,))).encode(),
        MessageHeader(0, 0, 0, 1 << 40, None).encode(),
    ],
    ids=["noise", "part", "size", "leave"],
)
def test_what_no_worker_says_ends_the_group_of_this_one_alone(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with beside_a_peer(monkeypatch) as (group, peer):
        finish = group.receive(TensorSpec("uint8", (9,)), 1, 0)
        peer.outgoing[0].send(chunk(0, said))
        with pytest.raises(RankLost, match="rank 1 is not connected any more"):
            finish()


def test_a_group_of_one_kind_is_any_worker_group() -> None:
    def rank(group: CarriedGroup) -> bool:
        found: WorkerGroup = group
        return found.check() == 0 and not found.attend()

    assert run(2, rank) == [True, True]


def test_threads_of_a_group_that_was_left_end() -> None:
    def rank(group: CarriedGroup) -> None:
        group.reduce([torch.ones(SHARED_BYTES)])()

    run(3, rank)
    names = ("onebox-to", "onebox-from", "onebox-accept", "onebox-sums")
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith(names)])


def test_a_peer_that_cannot_be_reached_is_named_to_who_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what was sent: the client is told when this worker has nothing else to do."""
    monkeypatch.setattr(tcp_carrier, "FEW_RANKS", 1)
    connect = tcp_carrier.Mesh.connect
    monkeypatch.setattr(tcp_carrier.Mesh, "connect", lambda self, rank: connect(self, rank, 0.1))
    store = Keys()
    store.set("tcp/1", announced(HERE, 9))
    group = tcp_group(FormGroup(3, 0, 2, "tls", HERE, 20.0), store)
    try:
        assert not group.attend(), "nothing is to be sent yet"
        group.send(torch.ones(4), 1, 0)
        with pytest.raises(RankLost, match=r"rank 1 of the group cannot be reached at 127\.0\.0\.1, port 9"):
            until(lambda: not group.attend())
        with pytest.raises(RankLost, match="cannot be reached"):
            group.receive(FLOAT, 1, 0)()
    finally:
        group.close()
