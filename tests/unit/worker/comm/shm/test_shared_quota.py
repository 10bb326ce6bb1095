"""Memory that a worker shares is bounded: what was sent waits for its readers only up to a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onebox.wire import TensorSpec, spec_of
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.shm import carrier as carrier_module
from onebox.worker.comm.shm import receiver as receiver_module
from onebox.worker.comm.shm.receiver import ShmReceiver
from onebox.worker.comm.shm.segment import SharedMemory, supported
from onebox.worker.comm.shm.sender import ShmSender
from onebox.worker.memory.buffers import QuotaExceeded
from onebox.worker.memory.shared import LEAST_BYTES, SHARED_SHARE, SharedMemoryQuota
from tests.unit.ranks import MemoryGroup, run_ranks

pytestmark = pytest.mark.skipif(not supported(), reason="groups through shared memory need Linux on x86-64")

MIB = 1 << 20
LIMIT = 32 * MIB
SPEC = TensorSpec("float32", (2 * MIB,))


def limited(limit_bytes: int = LIMIT) -> SharedMemoryQuota:
    quota = SharedMemoryQuota(1)
    quota.limit_bytes = limit_bytes
    return quota


def tensor(value: float = 1.0) -> Tensor:
    return torch.full(SPEC.shape, float(value))


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory.make()
    yield made
    made.seal()


def shared_bytes() -> int:
    """Return the pages of shared memory that this process has."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssShmem"))


def test_the_limit_follows_the_quota() -> None:
    assert SharedMemoryQuota(0).limit_bytes == 0
    assert SharedMemoryQuota(100 * MIB).limit_bytes == SHARED_SHARE * 100 * MIB + LEAST_BYTES


def test_sends_without_a_receiver_are_refused_at_the_limit(memory: SharedMemory) -> None:
    quota, before = limited(), shared_bytes()
    sender = ShmSender(memory, 2, quota=quota)
    for _ in range(3):  # and some cells
        sender.post(1, 0, sender.write([tensor()], SPEC.size_bytes), SPEC)
    for _ in range(16):
        with pytest.raises(QuotaExceeded, match="24 MiB have been sent and not been read") as caught:
            sender.write([tensor()], SPEC.size_bytes)
    assert (caught.value.asked_bytes, caught.value.allowed_bytes) == (8 * MIB, LIMIT)
    assert shared_bytes() - before <= LIMIT
    assert sender.unread_bytes <= quota.used_bytes <= LIMIT


def test_memory_that_was_read_is_used_again_for_tensors_of_other_sizes(memory: SharedMemory) -> None:
    quota = limited()
    sender = ShmSender(memory, 2, quota=quota)
    inbox = ShmReceiver(memory, 0, 1, lambda rank, begin_s: None)
    for number in range(40):
        spec = TensorSpec("uint8", ((10 + number % 15) * MIB,))
        sender.post(1, 0, sender.write([torch.zeros(spec.shape, dtype=torch.uint8)], spec.size_bytes), spec)
        expected = inbox.expect(0)
        expected.wait()
        expected.give_back()
        assert quota.used_bytes <= LIMIT


def test_what_was_left_unread_counts_until_its_reader_leaves(memory: SharedMemory) -> None:
    quota = limited()
    inbox = ShmReceiver(memory, 0, 1, lambda rank, begin_s: None)
    sender = ShmSender(memory, 2, quota=quota)
    sender.post(1, 0, sender.write([tensor()], SPEC.size_bytes), SPEC)
    sender.leave()
    sender.leave()
    second = ShmSender(SharedMemory.make(), 2, quota=quota)
    for _ in range(2):
        second.post(1, 0, second.write([tensor()], SPEC.size_bytes), SPEC)
    with pytest.raises(QuotaExceeded):
        second.write([tensor()], SPEC.size_bytes)
    inbox.close()
    second.write([tensor()], SPEC.size_bytes)
    second.memory.seal()


def test_what_was_left_unread_by_a_process_that_has_ended_does_not_count(memory: SharedMemory) -> None:
    quota = limited()
    sender = ShmSender(memory, 2, quota=quota, ended=lambda rank: True)
    sender.post(1, 0, sender.write([tensor()], SPEC.size_bytes), SPEC)
    sender.leave()
    assert quota.used_bytes == 0


def test_a_tensor_larger_than_the_limit_is_refused_at_once(memory: SharedMemory) -> None:
    sender = ShmSender(memory, 2, quota=limited(MIB), wait=lambda begin_s: pytest.fail("nobody needs to wait"))
    with pytest.raises(QuotaExceeded):
        sender.write([tensor()], SPEC.size_bytes)


def test_a_writer_waits_for_slow_readers_and_everything_arrives() -> None:
    quotas = {0: limited(), 1: limited()}
    peaks: list[int] = []

    def rank(number: int, group: MemoryGroup) -> Any:
        if number == 0:
            for order in range(24):
                group.send(tensor(order), 1, 0)
                peaks.append(quotas[0].used_bytes)
            return group.receive(SPEC, 1, 0)().tensor[0].item()
        got = []
        for _ in range(24):
            time.sleep(0.01)
            got.append(group.receive(SPEC, 0, 0)().tensor[:: SPEC.shape[0] - 1].tolist())
        group.send(tensor(7.0), 0, 0)
        return got

    results = run_ranks(2, rank, quotas=quotas)
    assert results == [7.0, [[float(order)] * 2 for order in range(24)]]
    assert max(peaks) <= LIMIT


def test_received_tensors_stay_as_they_are_when_their_writer_has_left() -> None:
    quotas = {0: limited(), 1: limited()}
    kept: list[Tensor] = []
    sent = threading.Event()

    def rank(number: int, group: MemoryGroup) -> None:
        if number == 0:
            for order in range(3):
                group.send(tensor(order), 1, 0)
            sent.wait(30)
        else:
            kept.extend(group.receive(SPEC, 0, 0)().tensor for _ in range(3))
            sent.set()

    run_ranks(2, rank, quotas=quotas)
    quotas[0].charge(LIMIT)  # they count where they are buffers
    quotas[0].charge(-LIMIT)
    run_ranks(2, lambda number, group: group.reduce([tensor(9.0)])().tensor[0].item(), quotas=quotas)
    assert [(part.min().item(), part.max().item()) for part in kept] == [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0)]


def test_a_writer_whom_nobody_reads_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier_module, "ROOM_S", 0.2)
    done = threading.Event()

    def rank(number: int, group: MemoryGroup) -> str:
        if number:
            done.wait(30)
            return ""
        try:
            for _ in range(8):
                group.send(tensor(), 1, 0)
        except QuotaExceeded as error:
            return str(error)
        finally:
            done.set()
        return "all was sent"

    assert "are allowed" in run_ranks(2, rank, quotas={0: limited()})[0]


def test_a_writer_that_waits_for_room_can_be_interrupted() -> None:
    done = threading.Event()

    def rank(number: int, group: MemoryGroup) -> str:
        if number:
            done.wait(30)
            return ""
        threading.Timer(0.3, group.interrupt).start()
        began_s = time.monotonic()
        try:
            for _ in range(8):
                group.send(tensor(), 1, 0)
        except RankLost as error:
            return f"{error} {time.monotonic() - began_s < 5}"
        finally:
            done.set()
        return "all was sent"

    assert run_ranks(2, rank, quotas={0: limited()})[0].endswith("is given up True")


def test_specs_are_those_of_tensors() -> None:
    assert spec_of(tensor()) == SPEC


def test_memory_may_be_freed_by_a_finalizer_at_any_place() -> None:
    """A collection of garbage may begin wherever an object is made, also by the thread that has the quota's lock."""
    quota = limited()

    class Blocks:
        """Blocks of a group, by the comparison of which some memory is freed, while the quota looks for them."""

        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            if quota.used_bytes > MIB:
                quota.charge(-MIB)
            return self is other

        def reclaim(self) -> None: ...

        def settle(self) -> bool:
            return True

    quota.charge(2 * MIB)
    first, second = Blocks(), Blocks()
    for blocks in (first, second):
        quota.enter(blocks)
    leaving = threading.Thread(target=lambda: quota.leave(second), daemon=True)
    leaving.start()
    leaving.join(60)
    assert not leaving.is_alive() and quota.used_bytes == MIB


@pytest.mark.parametrize("elsewhere", [False, True])
def test_messages_are_returned_once_wherever_a_finalizer_runs(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """A request that nobody waits for may be collected in the middle of the return of another, and by any thread."""
    sender = ShmSender(memory, 2)
    inbox = ShmReceiver(memory, 0, 1, lambda rank, begin_s: None)
    for _ in range(6):
        sender.post(1, 0, sender.write([tensor()], SPEC.size_bytes), SPEC)
    requests = [inbox.expect(0) for _ in range(6)]
    for request in requests:
        request.wait()
    del request
    first, second = requests.pop(0), requests.pop(0)
    number = receiver_module.NUMBER

    class Collecting:
        def pack_into(self, *arguments: Any) -> None:
            number.pack_into(*arguments)
            collected = [requests.pop()] if requests else []
            if elsewhere:
                collecting = threading.Thread(target=collected.clear)
                collecting.start()
                collecting.join()

    monkeypatch.setattr(receiver_module, "NUMBER", Collecting())
    first.give_back()
    second.give_back()
    inbox.expect(0)
    assert not requests and sender.unread_bytes < SPEC.size_bytes, "some cells are all that is left"
