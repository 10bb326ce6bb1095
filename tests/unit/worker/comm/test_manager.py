"""Groups of workers, the ranks being threads: sums, transfers, and what a rank hears when another goes away."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import TensorSpec, spec_of, to_frame
from onebox.wire.protocol.groups import FormGroup, Reduced, Rendezvous
from onebox.wire.protocol.responses import LOOKUP_KEYS, Contribution, Left
from onebox.worker.comm.api import RankLost, ReceivedTensor, RowRange, WorkerGroup
from onebox.worker.comm.client import ChannelStore, ClientGroup
from onebox.worker.comm.manager import GroupManager, form_group
from onebox.worker.comm.tcp import carrier as tcp_carrier
from onebox.worker.comm.tcp.mesh import Mesh
from onebox.worker.execution.communication import PendingBucket
from onebox.worker.progress import WorkerProgress
from onebox.worker.system.network_interfaces import NoAddress
from tests.kit.waiting import until
from tests.unit.programs import HOST
from tests.unit.ranks import Hub, HubChannel


def run(
    size: int,
    rank: Callable[[int, WorkerGroup, WorkerProgress], Any],
    *,
    way: str,
    address: str = "127.0.0.1",
) -> list[Any]:
    """Form a group of threads and run a function in each."""
    hub = Hub()

    def one(number: int) -> Any:
        backend: Literal["tcp", "tls"] = "tls" if way == "encrypted" else "tcp"
        form = FormGroup(3, number, size, backend, address, 20.0, way == "memory")
        progress = WorkerProgress()
        progress.waiting = False
        group = form_group(form, hub.channel(number), HOST, progress)
        assert not progress.waiting
        try:
            return rank(number, group, progress)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(one, number) for number in range(size)]
        return [future.result(60) for future in futures]


WAYS = ("sockets", "encrypted", "memory")
all_ways = pytest.mark.parametrize("way", WAYS)


def listening() -> list[tuple[str, str]]:
    """Return the sockets of this process that listen at TCP: their inodes, and addresses as the kernel writes them."""
    mine = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            mine.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            parts = line.split()
            if parts[9] in mine and parts[3] == "0A":
                found.append((parts[9], parts[1].split(":")[0]))
    return found


def watched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set to which the addresses are added at which this process has begun to listen since, whenever a rank
    connects to another one, which listens then."""
    before, found, connect = set(listening()), set[str](), Mesh.connect

    def look(mesh: Mesh, rank: int) -> Any:
        found.update(address for inode, address in set(listening()) - before)
        return connect(mesh, rank)

    monkeypatch.setattr(Mesh, "connect", look)
    return found


def as_listed(address: str) -> str:
    """Return an address as the kernel lists it."""
    return format(int.from_bytes(socket.inet_aton(address), sys.byteorder), "08X")


@pytest.mark.parametrize("way", ["sockets", "encrypted"])
def test_a_group_listens_at_the_address_of_its_pool_and_only_while_it_forms(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at that of all networks of a host, where everybody could reach it."""
    before, seen = set(listening()), watched(monkeypatch)
    formed = threading.Barrier(2, timeout=20)

    def rank(number: int, group: WorkerGroup, progress: WorkerProgress) -> set[tuple[str, str]]:
        formed.wait()
        after = set(listening()) - before
        group.reduce([torch.ones(3)])()
        formed.wait()
        return after

    assert run(2, rank, way=way, address="127.0.0.2") == [set(), set()]
    assert seen == {as_listed("127.0.0.2")}


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "0", "::ffff:0.0.0.0", ""])
@pytest.mark.parametrize("backend", ["tcp", "tls"])
def test_an_address_that_stands_for_all_is_refused(backend: Literal["tcp", "tls"], address: str) -> None:
    before = set(listening())
    form = FormGroup(3, 0, 2, backend, address, 0.3)
    with pytest.raises(NoAddress, match="stands for all addresses"):
        form_group(form, Hub().channel(0), HOST, WorkerProgress())
    assert set(listening()) == before


def test_the_address_is_that_of_the_owner_of_the_host_and_not_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, before, seen = Hub(), set(listening()), watched(monkeypatch)

    def one(number: int) -> None:
        manager = GroupManager(hub.channel(number), HOST, WorkerProgress(), address="127.0.0.3")
        manager.form(FormGroup(3, number, 2, "tcp", "0.0.0.0", 20.0))
        manager.get(3).reduce([torch.ones(1)])()
        manager.close()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(one, range(2)))
    assert seen == {as_listed("127.0.0.3")} and set(listening()) == before


@pytest.mark.parametrize("size", [2, 3, 4])
def test_encrypted_groups_sum_to_the_same_bits(size: int) -> None:
    counts = [1, 7, 1000, 4099, 300_001]

    def rank(number: int, group: WorkerGroup, progress: WorkerProgress) -> list[Tensor]:
        generator = torch.Generator().manual_seed(number)
        sums = [group.reduce([torch.randn(count, generator=generator)])().tensor for count in counts]
        collected = [group.collect([torch.randn(count, generator=generator)], 1) for count in counts]
        return sums + [each().tensor for each in collected if not isinstance(each, int)]

    plain, encrypted = (run(size, rank, way=way) for way in ("sockets", "encrypted"))
    assert [len(found) for found in plain] == [len(found) for found in encrypted] and len(plain[1]) == 2 * len(counts)
    for one, other in zip(plain, encrypted, strict=True):
        assert all(map(torch.equal, one, other))


@all_ways
@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_several_buckets(size: int, way: str) -> None:
    def rank(number: int, group: WorkerGroup, progress: WorkerProgress) -> list[Tensor]:
        one = group.reduce([torch.full((2, 2), float(number)), torch.tensor(10.0)])
        other = group.reduce([torch.arange(3, dtype=torch.float64) * number])
        return [one().tensor, other().tensor]

    total = sum(range(size))
    for one, other in run(size, rank, way=way):
        assert one.tolist() == [total] * 4 + [10.0 * size]
        assert other.tolist() == [0.0, total, 2.0 * total]


@all_ways
@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ([torch.ones(4)], [torch.ones(4, dtype=torch.int32)]),
        ([torch.ones(4)], [torch.zeros(4, dtype=torch.int32)]),
        ([torch.ones(2), torch.ones(6)], [torch.ones(6), torch.ones(2)]),
        ([torch.ones(8, dtype=torch.bfloat16)], [torch.ones(8, dtype=torch.float16)]),
    ],
    ids=["types", "zeros", "order", "halves"],
)
def test_ranks_that_mean_different_sums_get_none(mine: list[Tensor], other: list[Tensor], way: str) -> None:
    def rank(number: int, group: WorkerGroup, progress: WorkerProgress) -> str:
        finish = group.reduce([mine, other][number])
        try:
            finish()
        except WireError as error:
            return str(error)
        return ""

    found = run(2, rank, way=way)
    assert any("disagree on collective 0" in error or "disagree on collective 1" in error for error in found)


@all_ways
def test_ranks_that_mean_different_gathers_get_none(way: str) -> None:
    def rank(number: int, group: WorkerGroup, progress: WorkerProgress) -> str:
        spec = TensorSpec(["float32", "int32"][number], (4,))
        try:
            group.gather(torch.ones(2, dtype=[torch.float32, torch.int32][number]), spec, 0, (2, 2))()
        except WireError as error:
            return str(error)
        return ""

    assert all("disagree on collective 1" in error for error in run(2, rank, way=way))


@all_ways
def test_what_is_reduced_stays_as_it_is(way: str) -> None:
    def rank(number: int, group: WorkerGroup, progress: WorkerProgress) -> Tensor:
        tensor = torch.ones(4)
        group.reduce([tensor])()
        return tensor

    assert all(tensor.tolist() == [1.0] * 4 for tensor in run(2, rank, way=way))


@all_ways
def test_tensors_go_from_rank_to_rank_by_channels(way: str) -> None:
    spec = TensorSpec("int64", (2, 2))
    arrived = threading.Event()

    def rank(number: int, group: WorkerGroup, progress: WorkerProgress) -> list[list[list[int]]]:
        if number == 0:
            group.send(torch.tensor([[1, 2], [3, 4]]).t(), 1, 5)  # not dense
            group.send(torch.tensor([[5, 6], [7, 8]]), 1, 4)
            group.receive(TensorSpec("bool", (1,)), 1, 0)()
            arrived.set()
            return []
        second, first = group.receive(spec, 0, 4), group.receive(spec, 0, 5)
        found = [first().tensor.tolist(), second().tensor.tolist()]
        group.send(torch.tensor([True]), 0, 0)
        arrived.wait(30)
        return found

    assert run(2, rank, way=way)[1] == [[[1, 3], [2, 4]], [[5, 6], [7, 8]]]


@all_ways
def test_a_tensor_that_is_sent_in_parts_comes_whole(way: str) -> None:
    whole, rows = torch.arange(28, dtype=torch.float64).view(7, 4), (3, 1, 3)
    other, spec = -whole, spec_of(whole)

    def rank(number: int, group: WorkerGroup, progress: WorkerProgress) -> list[Tensor]:
        if number == 0:
            first = 0
            for part in whole.split(rows):
                group.send(part, 1, 5, RowRange(spec, first))
                group.send(other[first : first + len(part)].t().contiguous().t(), 1, 6, RowRange(spec, first))
                first += len(part)
            group.send(whole, 1, 5)
            group.receive(TensorSpec("bool", (1,)), 1, 0)()
            return []
        finishes = [group.receive(spec, 0, 5, rows), group.receive(spec, 0, 6, rows), group.receive(spec, 0, 5)]
        found = [finish().tensor for finish in finishes]
        with pytest.raises(WireError, match="parts of 3, 3 rows are not"):
            group.receive(spec, 0, 5, (3, 3))
        group.send(torch.tensor([True]), 0, 0)
        return found

    assert all(map(torch.equal, run(2, rank, way=way)[1], (whole, other, whole)))


@all_ways
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_different_sizes_are_put_together(dim: int, way: str) -> None:
    whole = torch.arange(24, dtype=torch.int16).view(4, 6)
    sizes = [[2, 0, 2], [1, 3, 2]][dim]

    def rank(number: int, group: WorkerGroup, progress: WorkerProgress) -> list[Tensor]:
        part = whole.split(sizes, dim)[number]
        first = group.gather(part, TensorSpec("int16", (4, 6)), dim, sizes)
        total = group.reduce([torch.ones(2)])
        again = group.gather(torch.tensor([number]), TensorSpec("int64", (3,)), 0, (1, 1, 1))
        return [again().tensor, total().tensor, first().tensor]

    for again, total, first in run(3, rank, way=way):
        assert torch.equal(first, whole)
        assert total.tolist() == [3.0, 3.0]
        assert again.tolist() == [0, 1, 2]


@all_ways
def test_a_gather_that_comes_to_something_else(way: str) -> None:
    def rank(number: int, group: WorkerGroup, progress: WorkerProgress) -> str:
        with pytest.raises(WireError) as caught:
            group.gather(torch.ones(2), TensorSpec("float32", (5,)), 0, (2, 2))
        with pytest.raises(WireError, match=r"float32\[2\] is not part . of a gather along dimension 0 of sizes"):
            group.gather(torch.ones(2), TensorSpec("float32", (5,)), 0, (2, 3) if number else (3, 2))
        return str(caught.value)

    for message in run(2, rank, way=way):
        assert "float32[4] comes of a gather" in message


@all_ways
def test_what_was_sent_can_be_read_when_the_sender_has_left(way: str) -> None:
    left = threading.Event()
    sizes = [0, 3, 300_000]

    def rank(number: int, group: WorkerGroup, progress: WorkerProgress) -> list[float]:
        if number == 0:
            for size in sizes:
                group.send(torch.full((size,), float(size), dtype=torch.float64), 1, 0)
            if way != "memory":
                left.set()  # sockets: it stays until all is taken
            group.close()
            left.set()
            return []
        assert left.wait(30)
        finishes = [group.receive(TensorSpec("float64", (size,)), 0, 0) for size in sizes]
        return [float(finish().tensor.sum()) for finish in finishes]

    assert run(2, rank, way=way)[1] == [0.0, 9.0, 9e10]


class Dissolving(HubChannel):
    """The channel of a worker whose client tells that a group is dissolved as soon as one has left it."""

    def send_to_client(self, message: Any, frames: Sequence[Any] = ()) -> None:
        if isinstance(message, Left):
            self.hub.dissolved = True
        super().send_to_client(message, frames)

    def await_ticket(self, ticket: int, timeout_s: float) -> tuple[Rendezvous | Reduced, Sequence[Any]]:
        if self.hub.dissolved:
            raise RankLost("another worker has left the group")
        return super().await_ticket(ticket, timeout_s)


def test_what_was_sent_comes_also_where_its_sender_had_to_connect_before_it_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_carrier, "FEW_RANKS", 1)
    hub, connect = Hub(), Mesh.connect
    left = threading.Event()

    def late(mesh: Mesh, rank: int) -> Any:
        time.sleep(1.0)  # long enough to be asked for meanwhile
        return connect(mesh, rank)

    monkeypatch.setattr(Mesh, "connect", late)

    def one(number: int) -> float:
        manager = GroupManager(Dissolving(hub, number), HOST, WorkerProgress())
        manager.form(FormGroup(3, number, 2, "tls", "127.0.0.1", 20.0))
        if number == 0:
            manager.get(3).send(torch.full((2,), 5.0), 1, 0)
            manager.leave(3)
            left.set()
            return 5.0
        found = float(manager.get(3).receive(TensorSpec("float32", (2,)), 0, 0)().tensor[1])
        assert left.wait(30)
        manager.close()
        return found

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(one, range(2))) == [5.0, 5.0]


@all_ways
def test_what_was_taken_is_not_kept(way: str) -> None:
    def rank(number: int, group: WorkerGroup, progress: WorkerProgress) -> bool:
        if number == 1:
            group.receive(TensorSpec("float32", (1000,)), 0, 0)()
            return True
        tensor = torch.ones(1000)
        kept = weakref.ref(tensor)
        group.send(tensor, 1, 0)
        del tensor
        end_s = time.monotonic() + 30
        while kept() is not None and time.monotonic() < end_s:
            time.sleep(0.01)
        return kept() is None

    assert run(2, rank, way=way) == [True, True]


@all_ways
def test_a_rank_that_leaves_is_a_lost_peer_to_who_waits(way: str) -> None:
    ready = threading.Event()

    def rank(number: int, group: WorkerGroup, progress: WorkerProgress) -> str:
        group.reduce([torch.ones(1)])()
        if number == 1:
            ready.wait(30)
            return ""
        wait = group.reduce([torch.ones(1)])
        ready.set()
        with pytest.raises(RankLost) as caught:
            wait()
        assert not progress.waiting
        return str(caught.value)

    message = run(2, rank, way=way)[0]
    assert message
    assert "\n" not in message


@all_ways
def test_a_group_that_was_left_takes_nothing(way: str) -> None:
    def rank(number: int, group: WorkerGroup, progress: WorkerProgress) -> None:
        group.reduce([torch.ones(1)])()
        group.close()
        with pytest.raises(RankLost, match="has been left"):
            group.reduce([torch.ones(1)])
        with pytest.raises(RankLost, match="has been left"):
            group.send(torch.ones(1), 1 - number, 0)

    run(2, rank, way=way)


class Deaf(HubChannel):
    """The channel of a worker whose client has gone when the worker leaves a group."""

    def send_to_client(self, message: Any, frames: Sequence[Any] = ()) -> None:
        if isinstance(message, Left):
            raise SystemExit
        super().send_to_client(message, frames)


def test_a_group_is_closed_also_where_the_client_takes_nothing_any_more() -> None:
    hub = Hub()

    def one(number: int) -> None:
        manager = GroupManager(Deaf(hub, number), HOST, WorkerProgress())
        manager.form(FormGroup(3, number, 2, "tcp", "127.0.0.1", 20.0))
        group = manager.get(3)
        with pytest.raises(SystemExit):
            manager.leave(3)
        with pytest.raises(RankLost, match="has been left"):
            group.send(torch.ones(1), 1 - number, 0)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(one, range(2)))


@all_ways
def test_waiting_for_others_is_marked(way: str) -> None:
    progresses: list[WorkerProgress] = []

    def rank(number: int, group: WorkerGroup, progress: WorkerProgress) -> None:
        if number == 0:
            progresses.append(progress)
            group.receive(TensorSpec("float32", (1,)), 1, 0)()
            assert not progress.waiting
        else:
            until(lambda: bool(progresses and progresses[0].waiting))
            group.send(torch.ones(1), 0, 0)

    run(2, rank, way=way)


def test_a_group_that_nobody_joins_is_given_up() -> None:
    form = FormGroup(3, 0, 2, "tcp", "127.0.0.1", 0.3)
    with pytest.raises(RankLost):
        form_group(form, Hub().channel(0), HOST, WorkerProgress())


# ---- the store of a rendezvous


def test_the_store_does_what_torch_asks_of_it() -> None:
    hub = Hub()
    store, other = ChannelStore(hub.channel(0), 1, 5.0), ChannelStore(hub.channel(1), 1, 5.0)
    store.set("text", "ä")
    store.set("bytes", b"\x00\xff")
    assert other.get("text") == "ä".encode()
    assert other.get("bytes") == b"\x00\xff"
    assert [store.add("n", 2), other.add("n", 3), store.add("n", -1)] == [2, 5, 4]
    assert store.check(["text", "bytes"])
    assert not store.check(["text", "nothing"])
    assert store.delete_key("text")
    assert not store.delete_key("text")
    other.wait(["bytes"], timedelta(seconds=1))


def test_the_store_asks_for_any_number_of_keys() -> None:
    hub = Hub()
    store = ChannelStore(hub.channel(0), 1, 5.0)
    keys = [f"key {number}" for number in range(2 * LOOKUP_KEYS + 5)]
    for key in keys:
        store.set(key, key)
    assert store.multi_get(keys) == [key.encode() for key in keys]
    store.wait(keys + keys)
    assert store.check(keys)
    assert not store.check([*keys, "nothing"])
    assert store.multi_get([]) == []


def test_the_store_waits_for_a_key_as_long_as_it_may() -> None:
    hub = Hub()
    store = ChannelStore(hub.channel(0), 1, 30.0)
    timer = threading.Timer(0.05, lambda: ChannelStore(hub.channel(1), 1, 1.0).set("late", b"1"))
    timer.start()
    assert store.get("late") == b"1"
    timer.join()
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(RankLost):
        store.get("never")


def test_stores_of_two_groups_are_apart() -> None:
    hub = Hub()
    ChannelStore(hub.channel(0), 1, 5.0).set("key", b"1")
    assert not ChannelStore(hub.channel(0), 2, 5.0).check(["key"])


# ---- sums at the client


class Answering:
    """A client that answers each contribution with something."""

    def __init__(self, answer: Callable[[Contribution, bytes], Sequence[Any]]) -> None:
        self.answer = answer
        self.came: list[tuple[Contribution, bytes]] = []

    def new_ticket(self) -> int:
        return len(self.came)

    def send_to_client(self, message: Any, frames: Sequence[Any] = ()) -> None:
        self.came.append((message, bytes(frames[0])))

    def await_ticket(self, ticket: int, timeout_s: float) -> tuple[Rendezvous | Reduced, Sequence[Any]]:
        return Reduced(ticket), self.answer(*self.came[ticket])


def client_group(answer: Callable[[Contribution, bytes], Sequence[Any]]) -> tuple[ClientGroup, Answering]:
    client = Answering(answer)
    form = FormGroup(3, 0, 2, "client", "127.0.0.1", 5.0)
    return ClientGroup(form, client, HOST), client


def test_contributions_are_flat_and_numbered() -> None:
    group, client = client_group(lambda contribution, frame: [frame])
    waits = [group.reduce([torch.ones(2, 2), torch.zeros(3)]), group.reduce([torch.tensor(5.0)])]
    assert [wait().tensor.tolist() for wait in reversed(waits)] == [[5.0], [1.0] * 4 + [0.0] * 3]
    assert [(came.group, came.order, came.spec) for came, _ in client.came] == [
        (3, 0, TensorSpec("float32", (7,))),
        (3, 1, TensorSpec("float32", (1,))),
    ]


def test_the_client_hands_nothing_on() -> None:
    group, _ = client_group(lambda contribution, frame: [frame])
    spec = TensorSpec("float32", (1,))
    calls: list[Callable[[], Any]] = [
        lambda: group.send(torch.ones(1), 1, 0),
        lambda: group.receive(spec, 1, 0),
        lambda: group.gather(torch.ones(1), spec, 0, (1,)),
    ]
    for call in calls:
        with pytest.raises(WireError, match="at the client"):
            call()


# ---- buckets


def test_a_bucket_that_failed_is_not_waited_for_again() -> None:
    def finish() -> ReceivedTensor:
        raise WireError("the ranks disagree")

    bucket = PendingBucket([5], [torch.Size((2,))], 8, finish, lambda at_ns: None)
    with pytest.raises(WireError):
        bucket.wait()
    with pytest.raises(RankLost, match="the ranks disagree"):
        bucket.wait()


def test_a_bucket_gives_each_buffer_its_part_in_its_shape() -> None:
    flat = torch.arange(7.0)
    ended: list[int] = []
    shapes = [torch.Size(shape) for shape in ((2, 2), (), (0, 3), (2,))]
    bucket = PendingBucket([5, 3, 8, 1], shapes, 28, lambda: ReceivedTensor(flat, 123), ended.append)
    made = bucket.wait()
    assert {number: tensor.tolist() for number, tensor in made.items()} == {
        5: [[0.0, 1.0], [2.0, 3.0]],
        3: 4.0,
        8: [],
        1: [5.0, 6.0],
    }
    assert ended == [123]
    assert bucket.size_bytes == 28
    assert bytes(to_frame(made[1])) == bytes(to_frame(flat[5:]))
