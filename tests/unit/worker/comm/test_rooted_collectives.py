"""Sums for one rank, and broadcasts, in all kinds of groups, the ranks being threads; and what buffers come of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import TensorSpec, spec_of
from onebox.wire.protocol.groups import FormGroup
from onebox.wire.protocol.instructions import Broadcast, Reduce
from onebox.wire.protocol.requests import Routine
from onebox.worker.comm.api import Begun, RankLost, WorkerGroup
from onebox.worker.comm.client import ClientGroup
from onebox.worker.comm.manager import form_group, groups_of
from onebox.worker.comm.shm.segment import supported
from onebox.worker.execution.communication import CollectiveExecutor
from onebox.worker.memory.buffers import BufferStore, QuotaExceeded
from onebox.worker.progress import Trace, WorkerProgress
from tests.unit.programs import HOST
from tests.unit.ranks import Hub, run_ranks

WAYS = ["shared memory", "sockets", "both"]


def run(size: int, way: str, rank: Callable[[WorkerGroup], Any], *, timeout_s: float = 20.0) -> list[Any]:
    """Form a group of threads and run a function in each rank; ``both`` is a group of which the last is elsewhere."""
    if way != "sockets" and not supported():
        pytest.skip("groups through shared memory need Linux on x86-64")
    hub, formed = Hub(), threading.Barrier(size)

    def one(number: int) -> Any:
        form = FormGroup(3, number, size, "tcp", "127.0.0.1", timeout_s, way != "sockets")
        place = b"last" if way == "both" and number == size - 1 else b"first"
        group = form_group(form, hub.channel(number), HOST, WorkerProgress(), sharing_key=place)
        try:
            formed.wait(60)  # one that leaves at once would be missed by those that still form the group
            return rank(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as threads:
        return [future.result(60) for future in [threads.submit(one, number) for number in range(size)]]


every_way = pytest.mark.parametrize("way", WAYS)


def part(rank: int, count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(rank)) - 0.5


def came(begun: Begun) -> Tensor | None:
    return None if isinstance(begun, int) else begun().tensor


@every_way
@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_for_one_rank_has_the_bits_of_that_for_all(size: int, way: str) -> None:
    def rank(group: WorkerGroup) -> list[Tensor | None]:
        mine = part(group.rank, 1001)
        whole = group.reduce([mine])
        roots = [group.collect([mine[:1], mine[1:].view(10, 100)], root) for root in range(size)]
        return [whole().tensor, *(came(begun) for begun in roots)]

    for number, (whole, *found) in enumerate(run(size, way, rank)):
        assert [place for place, each in enumerate(found) if each is not None] == [number]
        assert torch.equal(whole, found[number])


@every_way
def test_what_is_broadcast_comes_to_all_others(way: str) -> None:
    def rank(group: WorkerGroup) -> list[Tensor | None]:
        mine = [part(group.rank, 6).view(2, 3).t(), part(10 + group.rank, 4)]
        specs = [spec_of(tensor) for tensor in mine]
        return [came(group.broadcast(specs, mine if root == group.rank else (), root)) for root in (2, 0)]

    for number, found in enumerate(run(3, way, rank)):
        for root, each in zip((2, 0), found, strict=True):
            expected = torch.cat([part(root, 6).view(2, 3).t().reshape(-1), part(10 + root, 4)])
            assert each is None if root == number else torch.equal(each.reshape(-1), expected)


@every_way
def test_what_is_sent_is_what_it_was_then(way: str) -> None:
    both = threading.Barrier(2, timeout=20)
    sent = part(0, (1 << 21) + 3)  # more than a socket holds, and than is copied at once

    def rank(group: WorkerGroup) -> Tensor | None:
        if group.rank == 0:
            mine = sent.clone()
            group.send(mine, 1, 5)
            mine.zero_()
        both.wait()
        came = group.receive(spec_of(sent), 0, 5)().tensor.clone() if group.rank else None
        both.wait()
        return came

    assert torch.equal(run(2, way, rank)[1], sent)


@every_way
@pytest.mark.parametrize("other", ["root", "size", "kind", "type"])
def test_ranks_that_mean_different_things_are_told_so(other: str, way: str) -> None:
    """At least one of them; the others hear that it has left."""

    def rank(group: WorkerGroup) -> str:
        mine = torch.ones(4)
        specs = [spec_of(mine)]
        try:
            if group.rank == 0:
                begun = group.broadcast(specs, [mine], 0)
            elif other == "kind":
                begun = group.reduce([mine])
            else:
                if other == "root":
                    group.broadcast(specs, [mine], 1)
                kinds = {"size": [TensorSpec("float32", (2,))] * 2, "type": [TensorSpec("int32", (4,))]}
                begun = group.broadcast(kinds.get(other, specs), (), 0)
            came(begun)
        except (WireError, RankLost) as error:
            return str(error)
        return ""

    assert any(run(2, way, rank, timeout_s=1.0))


@every_way
def test_roots_that_are_not_there(way: str) -> None:
    def rank(group: WorkerGroup) -> None:
        for root in (-1, 2):
            with pytest.raises(WireError, match=f"rank {root} of a group of 2; allowed are 0 to 1"):
                group.collect([torch.ones(1)], root)
            with pytest.raises(WireError, match=f"rank {root} of a group of 2"):
                group.broadcast([TensorSpec("bool", (1,))], (), root)

    run(2, way, rank)


def test_the_client_sums_for_all_or_not_at_all() -> None:
    group = ClientGroup(FormGroup(1, 0, 2, "client", "", 1.0), Hub().channel(0), HOST)
    with pytest.raises(WireError, match="sums for all of its ranks, not for one"):
        group.collect([torch.ones(1)], 0)
    with pytest.raises(WireError, match="only sums"):
        group.broadcast([TensorSpec("bool", (1,))], (), 0)


# ---- shared memory


shared_only = pytest.mark.skipif(not supported(), reason="groups through shared memory need Linux on x86-64")


@shared_only
@given(st.lists(st.tuples(st.sampled_from(["all", "one", "from"]), st.integers(0, 2)), max_size=12), st.randoms())
@settings(max_examples=25, deadline=None)
def test_any_mixture_in_any_order_of_waiting(wanted: list[tuple[str, int]], chance: Any) -> None:
    seeds = [chance.random() for _ in range(3)]

    def rank(number: int, group: WorkerGroup) -> dict[int, Tensor | None]:
        mine = part(number, 50)
        begun: list[Begun] = []
        for kind, root in wanted:
            match kind:
                case "all":
                    begun.append(group.reduce([mine]))
                case "one":
                    begun.append(group.collect([mine], root))
                case _:
                    begun.append(group.broadcast([spec_of(mine)], [mine] if root == number else (), root))
        order = sorted(range(len(begun)), key=lambda place: hash((seeds[number], place)))
        return {place: came(begun[place]) for place in order}

    parts = [part(number, 50) for number in range(3)]
    total = parts[0] + parts[1] + parts[2]
    for number, found in enumerate(run_ranks(3, rank)):
        for place, (kind, root) in enumerate(wanted):
            expected = {"all": total, "one": total if root == number else None}.get(
                kind, None if root == number else parts[root]
            )
            each = found[place]
            assert each is None if expected is None else each is not None and torch.equal(each, expected)


@shared_only
def test_nothing_is_held_of_what_nobody_waits_for() -> None:
    def rank(number: int, group: Any) -> int:
        for _ in range(20):
            group.collect([torch.zeros(10_000)], 0)
            group.broadcast([TensorSpec("float32", (10_000,))], [torch.zeros(10_000)] if number else (), 1)
        for _ in range(2):
            assert group.reduce([torch.ones(1)])().tensor.item() == 2
        return int(group.memory.sender.unread_bytes)

    assert max(run_ranks(2, rank)) < 40_000


@shared_only
def test_a_rank_that_has_gone_is_not_waited_for() -> None:
    def rank(number: int, group: Any) -> None:
        if number == 1:
            group.close()
            return
        for begun in (group.collect([torch.ones(1)], 0), group.broadcast([TensorSpec("bool", (1,))], (), 1)):
            with pytest.raises(RankLost, match="rank 1 has left"):
                begun()

    run_ranks(2, rank)


# ---- buffers


class Groups:
    """The groups of a worker: one."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def get(self, number: int) -> WorkerGroup:
        return self._group


def trade(
    way: str, rank: Callable[[CollectiveExecutor, BufferStore, int], Any], *, size: int = 2, quota_bytes: int = 0
) -> list[Any]:
    """Run a function in each rank, with the traffic of a worker."""

    def one(group: WorkerGroup) -> Any:
        store = BufferStore(quota_bytes)
        return rank(CollectiveExecutor(store, Groups(group), lambda: None), store, group.rank)  # type: ignore[arg-type]

    return run(size, way, one)


def same(reference: int) -> int:
    return reference


@every_way
def test_buffers_of_the_others_end_with_a_sum_for_one(way: str) -> None:
    def rank(traffic: CollectiveExecutor, store: BufferStore, number: int) -> list[float]:
        store.put(1, torch.full((2, 2), 1.0 + number))
        store.put(2, torch.full((3,), 10.0))
        traffic.run(Reduce((1, 2), 1, 0), same, Trace())
        if number:
            assert len(store) == 0 and store.used_bytes == 0
            return []
        assert store.used_bytes == 28
        assert store.get(1).shape == (2, 2)
        return [float(store.get(1).sum()), float(store.get(2).sum())]

    assert trade(way, rank)[0] == [12.0, 60.0]


@every_way
def test_a_broadcast_writes_where_a_buffer_lies(way: str) -> None:
    """Whoever holds it has the new elements; what lies with channels last stays so."""

    def rank(traffic: CollectiveExecutor, store: BufferStore, number: int) -> None:
        held = torch.full((2, 3, 2, 2), float(number)).contiguous(memory_format=torch.channels_last)
        other = torch.arange(4.0) * number
        store.put(1, held)
        store.put(2, other)
        used = store.used_bytes
        traffic.run(Broadcast((1, 2), 1, 1), same, Trace())
        assert store.get(1) is held and store.get(2) is other and store.used_bytes == used
        assert held.eq(1).all() and other.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert held.is_contiguous(memory_format=torch.channels_last)

    trade(way, rank)


@every_way
def test_a_broadcast_of_what_is_not_there_makes_it(way: str) -> None:
    def rank(traffic: CollectiveExecutor, store: BufferStore, number: int) -> list[float]:
        specs = (TensorSpec("float64", (2, 1)), TensorSpec("float64", ()))
        if number == 0:
            store.put(1, torch.tensor([[1.0], [2.0]], dtype=torch.float64))
            store.put(2, torch.tensor(3.0, dtype=torch.float64))
        traffic.run(Broadcast((1, 2), 1, 0, specs), same, Trace())
        assert (spec_of(store.get(1)), spec_of(store.get(2))) == specs
        return [*store.get(1).reshape(-1).tolist(), float(store.get(2))]

    assert trade(way, rank, size=3) == [[1.0, 2.0, 3.0]] * 3


def test_a_broadcast_that_says_too_little_is_refused() -> None:
    def rank(traffic: CollectiveExecutor, store: BufferStore, number: int) -> None:
        store.put(1, torch.ones(1))
        store.put(2, torch.ones(1))
        with pytest.raises(WireError, match="1 specifications for the 2 buffers"):
            traffic.run(Broadcast((1, 2), 1, 0, (TensorSpec("float32", (1,)),)), same, Trace())

    trade("sockets", rank)


@shared_only
def test_what_does_not_fit_beside_is_refused_and_nothing_is_lost() -> None:
    """What comes is counted beside the buffer that it is for until it is there."""

    def rank(traffic: CollectiveExecutor, store: BufferStore, number: int) -> None:
        held = torch.zeros(10)
        store.put(1, held)
        if number == 0:
            traffic.run(Broadcast((1,), 1, 0), same, Trace())
            return
        with pytest.raises(QuotaExceeded):
            traffic.run(Broadcast((1,), 1, 0), same, Trace())
        assert store.get(1) is held and store.used_bytes == 40

    trade("shared memory", rank, quota_bytes=60)


def test_a_routine_owes_its_part_of_a_broadcast() -> None:
    assert set(groups_of(Routine((Broadcast((1,), 7, 0), Reduce((1,), 8, 0)), 0))) == {7, 8}
