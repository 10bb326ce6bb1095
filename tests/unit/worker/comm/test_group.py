"""Groups whose ranks are joined by memory, by TCP, or some by one and some by the other: results are the same."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import spec_of
from onebox.wire.protocol.groups import FormGroup
from onebox.worker.comm import manager
from onebox.worker.comm.api import RankLost, WorkerGroup
from onebox.worker.comm.group import SHARED_BYTES
from onebox.worker.comm.manager import form_group
from onebox.worker.comm.shm.descriptors import DescriptorExchange
from onebox.worker.comm.shm.segment import supported
from onebox.worker.progress import WorkerProgress
from tests.unit.programs import HOST
from tests.unit.ranks import Hub, in_group, in_threads

pytestmark = pytest.mark.skipif(not supported(), reason="groups through shared memory need Linux on x86-64")

HERE, WITHIN_S = "127.0.0.1", 30.0


def run(hosts: str, rank: Callable[[WorkerGroup], Any], *, timeout_s: float = 20.0) -> list[Any]:
    """Form a group of ranks on hosts, each named by a letter, and run a function in each, in threads."""
    hub, done = Hub(), threading.Barrier(len(hosts))

    def one(number: int) -> Any:
        form = FormGroup(3, number, len(hosts), "tls", HERE, timeout_s, True)
        key = hosts[number].encode() * 32  # memory is shared by workers of one owner only
        group = form_group(form, hub.channel(number), HOST, WorkerProgress(), sharing_key=key)
        return in_group(group, rank, done)

    return in_threads(len(hosts), one)


def splits(size: int) -> Iterator[str]:
    """Return all ways in which ranks can be divided among hosts.

    Example:
        >>> list(splits(3))
        ['aaa', 'aab', 'aba', 'abb', 'abc']
    """
    found = [""]
    for _ in range(size):
        found = [each + host for each in found for host in "abcd"[: len(set(each)) + 1]]
    yield from found


def parts_of(size: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors of all ranks: their sums depend on the order."""
    generator = torch.Generator().manual_seed(count)
    return [(torch.randn(count, generator=generator) * 10.0**rank).to(dtype) for rank in range(size)]


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """Return their sum, added up one after the other."""
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


COUNTS = [1, 1001, SHARED_BYTES // 4 - 1, SHARED_BYTES // 4 + 3]


@pytest.mark.parametrize("hosts", [*(hosts for size in (2, 3, 4) for hosts in splits(size)), "aabbccddee"])
def test_sums_have_the_same_bits_however_ranks_are_divided_among_hosts(hosts: str) -> None:
    kinds = [torch.float32, torch.bfloat16]
    parts = {(count, kind): parts_of(len(hosts), count, kind) for count in COUNTS for kind in kinds}
    sums = list(map(in_order, parts.values()))

    def rank(group: WorkerGroup) -> None:
        own = [each[group.rank] for each in parts.values()]
        begun = [group.reduce([part]) for part in own]
        found = [finish().tensor.clone() for finish in reversed(begun)][::-1]
        assert all(map(torch.equal, found, sums))
        for root in range(len(hosts)):
            collected = group.collect([own[1]], root)
            assert isinstance(collected, int) or torch.equal(collected().tensor, sums[1])

    run(hosts, rank)


def test_a_rank_whose_processor_shares_no_memory_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an aarch64 host beside two ranks of one of x86-64."""
    asked = iter([False, True, True])
    monkeypatch.setattr(manager, "supported", lambda: next(asked))

    def rank(group: WorkerGroup) -> tuple[int, float]:
        total = group.reduce([torch.full((4,), 10.0**group.rank)])().tensor
        return len(group.joined.near), float(total[0])

    assert sorted(run("aaa", rank)) == [(0, 111.0), (2, 111.0), (2, 111.0)]


def test_sums_go_on_beside_tensors_by_the_same_carriers() -> None:
    """One thread waits for messages of a rank while another one does, and none is lost."""
    count = SHARED_BYTES

    def rank(group: WorkerGroup) -> None:
        number, peers = group.rank, [peer for peer in range(3) if peer != group.rank]
        mine = torch.full((count,), float(number))
        for step in range(20):
            total = group.reduce([mine + step])
            came = [group.receive(spec_of(mine[:10]), peer, step % 2) for peer in peers]
            for peer in peers:
                group.send(mine[:10] + step, peer, step % 2)
            for peer, finish in zip(peers, came, strict=True):
                assert finish().tensor.eq(peer + step).all()
            assert total().tensor.eq(3 + 3 * step).all()

    run("aab", rank)


def test_a_rank_that_shares_memory_with_all_does_as_those_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 1 and 2 miss each other's memory; rank 0 has both."""
    exchange = DescriptorExchange.exchange

    def without(self: DescriptorExchange, *args: Any) -> dict[int, int]:
        came = exchange(self, *args)
        lost = {(0, 2): 2, (0, 1): 1}.get(tuple(sorted(came)))
        if lost is not None:
            os.close(came.pop(lost))
        return came

    monkeypatch.setattr(DescriptorExchange, "exchange", without)
    parts = parts_of(3, SHARED_BYTES, torch.float32)

    def rank(group: WorkerGroup) -> tuple[Sequence[int], bool]:
        return group.joined.near, torch.equal(group.reduce([parts[group.rank]])().tensor, in_order(parts))

    assert run("aaa", rank) == [((0, 1, 2), True), ((0, 1), True), ((0, 2), True)]


@pytest.mark.parametrize("hosts", ["ab", "aa", "aab"])
def test_what_is_sent_are_the_values_not_what_they_are_stored_as(hosts: str) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])

    def rank(group: WorkerGroup) -> None:
        views = numbers.conj(), numbers.conj().imag
        for peer in range(len(hosts)):
            for view in views if peer != group.rank else ():
                group.send(view, peer, 0)
        for peer in range(len(hosts)):
            for view in views if peer != group.rank else ():
                assert torch.equal(group.receive(spec_of(view), peer, 0)().tensor, view)
        assert torch.equal(group.reduce([views[0]])().tensor, len(hosts) * numbers.conj())

    run(hosts, rank)


@pytest.mark.parametrize("hosts", ["aab", "aba"])
def test_ranks_that_mean_different_large_sums_are_told_so(hosts: str) -> None:
    def rank(group: WorkerGroup) -> str:
        kind = torch.int32 if group.rank == 1 else torch.float32
        with pytest.raises((WireError, RankLost)) as caught:
            group.reduce([torch.ones(SHARED_BYTES, dtype=kind)])()
        return str(caught.value)

    assert any("disagree on collective 1" in said for said in run(hosts, rank, timeout_s=2.0))


@pytest.mark.parametrize("hosts", ["aab", "aba", "abb"])
def test_a_wait_for_a_large_sum_ends_when_a_rank_leaves(hosts: str) -> None:
    def rank(group: WorkerGroup) -> None:
        if group.rank == 2:
            group.close()
            return
        with pytest.raises(RankLost):
            group.reduce([torch.ones(SHARED_BYTES)])()

    run(hosts, rank)


def test_a_wait_for_a_large_sum_ends_when_it_is_given_up() -> None:
    gone = threading.Event()

    def rank(group: WorkerGroup) -> None:
        if group.rank == 1:
            gone.wait(WITHIN_S)
            return
        timer = threading.Timer(0.1, group.interrupt)
        timer.start()
        try:
            with pytest.raises(RankLost):
                group.reduce([torch.ones(SHARED_BYTES)])()
        finally:
            timer.join()
            gone.set()

    run("aab", rank, timeout_s=3600.0)
