"""What an accelerator sends and receives through shared memory: copied late, in any order, while its worker goes on."""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onebox.wire import DTYPES, TensorSpec
from onebox.worker.accelerator import accelerator_for
from onebox.worker.comm.api import RankLost, RowRange
from onebox.worker.comm.shm.gpu_sender import ShmCopy, shm_copier_for
from onebox.worker.comm.shm.layout import SENT, lane_start
from onebox.worker.comm.shm.segment import SharedMemory, supported
from onebox.worker.memory.shared import SharedMemoryQuota
from tests.unit.ranks import MemoryGroup, run_ranks

pytestmark = pytest.mark.skipif(not supported(), reason="groups through shared memory need Linux on x86-64")

LARGE = TensorSpec("float64", (20_000,))
FLAG = TensorSpec("bool", ())


class Late:
    """A copy that is made when it is let."""

    def __init__(self, copy: Callable[[], object]) -> None:
        self._copy = copy
        self._made = threading.Event()
        self.failure = ""

    def make(self) -> None:
        """Make it."""
        self._copy()
        self._made.set()

    def finish(self) -> None:
        assert self._made.wait(20)
        if self.failure:
            raise RuntimeError(self.failure)

    def over(self) -> bool:
        return self._made.is_set()


class LateCopier:
    """Copies for a device whose copies are made when a test says so.

    Args:
        at_once: Makes them by itself, each a little later and in any order.
    """

    def __init__(self, at_once: random.Random | None = None) -> None:
        self.outs: list[Late] = []
        self.intos: list[Late] = []
        self.offsets: set[int] = set()
        self.released = False
        self._chance = at_once
        self._timers: list[threading.Timer] = []

    def out(self, tensor: Tensor, memory: SharedMemory, offset: int, start: int, size_bytes: int) -> ShmCopy:
        source, size = tensor.contiguous().clone(), tensor.nbytes
        assert start + size <= size_bytes
        target = memory.bytes[offset + start : offset + start + size]
        return self._begin(self.outs, offset, lambda: target.copy_(source.view(-1).view(torch.uint8)))

    def into(self, memory: SharedMemory, offset: int, spec: TensorSpec) -> tuple[Tensor, ShmCopy]:
        made = torch.full(spec.shape, 77, dtype=torch.uint8).to(DTYPES[spec.dtype])
        source = memory.bytes[offset : offset + spec.size_bytes]
        return made, self._begin(self.intos, offset, lambda: made.view(-1).view(torch.uint8).copy_(source))

    def release(self) -> None:
        for timer in self._timers:
            timer.join()
        assert all(late.over() for late in (*self.outs, *self.intos))
        self.released = True

    def _begin(self, into: list[Late], offset: int, copy: Callable[[], object]) -> Late:
        late = Late(copy)
        into.append(late)
        self.offsets.add(offset)
        if self._chance is not None:
            self._timers.append(threading.Timer(self._chance.random() / 100, late.make))
            self._timers[-1].start()
        return late


def number(sender: int, order: int) -> Tensor:
    """Return what a rank sends."""
    return torch.arange(LARGE.shape[0], dtype=torch.float64) / 3 + 1000 * sender + order


def sent(group: MemoryGroup) -> int:
    """Return how many messages to rank 1 its readers see."""
    return group.memory.sender.memory.words[lane_start(1) // 8 + SENT]


def test_letters_leave_when_their_copies_are_made_and_in_their_order() -> None:
    copier = LateCopier()

    def rank(which: int, group: MemoryGroup) -> None:
        if which == 1:
            first, second = group.receive(LARGE, 0, 0), group.receive(LARGE, 0, 0)
            assert torch.equal(first().tensor, number(0, 0))
            assert torch.equal(second().tensor, number(0, 1))
            return
        tensors = [number(0, order) for order in range(2)]
        for tensor in tensors:
            group.send(tensor, 1, 0)
            tensor.zero_()  # who sends may write to it at once
        assert sent(group) == 0
        copier.outs[1].make()
        time.sleep(0.05)
        assert sent(group) == 0, "the first is on its way, and the other behind it"
        copier.outs[0].make()

    run_ranks(2, rank, copiers={0: copier})
    assert copier.released
    assert all(offset % mmap.PAGESIZE == 0 for offset in copier.offsets)


def test_a_tensor_leaves_when_all_of_its_parts_are_copied() -> None:
    copier = LateCopier()

    def rank(which: int, group: MemoryGroup) -> None:
        whole, rows = number(0, 0), (5_000, 15_000)
        if which == 1:
            assert torch.equal(group.receive(LARGE, 0, 0, rows)().tensor, whole)
            return
        first, second = whole.split(rows)
        group.send(first, 1, 0, RowRange(LARGE, 0))
        copier.outs[0].make()
        group.send(second, 1, 0, RowRange(LARGE, rows[0]))
        time.sleep(0.05)
        assert sent(group) == 0, "one part is still on its way"
        copier.outs[1].make()

    run_ranks(2, rank, copiers={0: copier})
    assert len(copier.offsets) == 1, "both are copied into one block"


def test_what_is_read_is_given_back_when_its_copy_is_made() -> None:
    copier = LateCopier()

    def rank(which: int, group: MemoryGroup) -> list[int]:
        if which == 0:
            group.send(number(0, 0), 1, 0)
            unread = []
            for _ in range(2):
                group.receive(FLAG, 1, 0)()
                unread.append(group.memory.sender.unread_bytes)
                group.send(torch.tensor(True), 1, 1)
            return unread
        made = group.receive(LARGE, 0, 0)().tensor
        assert made[0] == 77
        group.send(torch.tensor(True), 0, 0)
        copier.outs[0].make()
        group.receive(FLAG, 0, 1)()
        copier.intos[1].make()
        copier.intos[0].make()
        assert torch.equal(made, number(0, 0))
        group.send(torch.tensor(True), 0, 0)
        copier.outs[1].make()
        group.receive(FLAG, 0, 1)()
        copier.intos[2].make()
        return []

    before, after = run_ranks(2, rank, copiers={1: copier})[0]
    assert before >= LARGE.size_bytes
    assert after < LARGE.size_bytes


def test_a_rank_that_only_receives_gives_blocks_back() -> None:
    copier = LateCopier()

    def rank(which: int, group: MemoryGroup) -> int:
        most_bytes = 0
        for order in range(20):
            if which == 0:
                group.send(number(0, order), 1, 0)
                group.gather(torch.tensor([order]), TensorSpec("int64", (2,)), 0, (1, 1))()
                most_bytes = max(most_bytes, group.memory.sender.unread_bytes)
            else:
                group.receive(LARGE, 0, 0)()
                copier.intos[-1].make()
                group.gather(torch.tensor([order]), TensorSpec("int64", (2,)), 0, (1, 1))()
        return most_bytes

    assert run_ranks(2, rank, copiers={1: copier})[0] < 4 * LARGE.size_bytes


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 3), st.lists(st.sampled_from([0, 1, 700, 60_000]), max_size=6), st.integers(0, 1 << 30))
def test_ranks_that_all_send_before_they_receive_get_everything(size: int, sizes: list[int], seed: int) -> None:
    """Accelerators and processors alike: nobody waits for a copy of its own, for which others would wait."""
    copiers = {which: LateCopier(random.Random(seed + which)) for which in range(size) if seed >> which & 1}

    def rank(which: int, group: MemoryGroup) -> None:
        peers = [peer for peer in range(size) if peer != which]
        for order, count in enumerate(sizes):
            for peer in peers:
                group.send(torch.full((2, count), float(100 * which + order)).t(), peer, order % 2)
        total = group.reduce([torch.full((3,), float(which))])
        came = [
            (peer, order, group.receive(TensorSpec("float32", (count, 2)), peer, order % 2))
            for peer in peers
            for order, count in enumerate(sizes)
        ]
        made = [(peer, order, finish().tensor) for peer, order, finish in came]
        assert total().tensor.tolist() == [size * (size - 1) / 2] * 3
        if which in copiers:
            for late in copiers[which].intos:
                late.finish()
        for peer, order, tensor in made:
            assert tensor.shape == (sizes[order], 2)
            assert tensor.eq(100 * peer + order).all()

    run_ranks(size, rank, copiers=copiers)


def test_a_copy_that_fails_ends_the_group_for_everybody() -> None:
    copier, told = LateCopier(), threading.Event()

    def rank(which: int, group: MemoryGroup) -> None:
        if which == 1:
            with pytest.raises(RankLost, match="rank 0 has left the group"):
                group.receive(LARGE, 0, 0)()
            told.set()
            return
        group.send(number(0, 0), 1, 0)
        copier.outs[0].failure = "the device is on fire"
        copier.outs[0].make()
        assert told.wait(20)
        with pytest.raises(RankLost, match="the group has been left: the device is on fire"):
            group.send(number(0, 1), 1, 0)

    run_ranks(2, rank, copiers={0: copier}, timeout_s=3600.0)


def test_pages_that_a_driver_knows_stay_until_the_group_is_left() -> None:
    """Also those of a rank that has no accelerator itself, but sends to one."""
    copier, quota = LateCopier(), SharedMemoryQuota()

    def rank(which: int, group: MemoryGroup) -> int:
        if which == 0:
            sender = group.memory.sender
            for blocks in (40, *[1] * 3000):
                for block in [sender.take(8 << 20) for _ in range(blocks)]:
                    block.readers += 1
                    sender.drop(block)
        return quota.used_bytes

    assert run_ranks(2, rank, copiers={1: copier}, quotas={0: quota})[0] == 40 * (8 << 20)


def test_only_accelerators_have_a_copier() -> None:
    assert shm_copier_for(accelerator_for("cpu")) is None
