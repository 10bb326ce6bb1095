"""Buffers on the host: copied once a storage, brought back as they were, counted byte by byte, void like all others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from onebox.cost import ACCELERATOR_BPS
from onebox.cost.benchmark_kernels import filled
from onebox.emulator.device import EmulatedDevice
from onebox.wire import Operator, Program, SlotArgument, TensorSpec, from_frame, with_deaths
from onebox.wire.protocol.instructions import Ask, Call, Evict, Free, Get, Offload, OptimizerStep, Prefetch, Step
from onebox.wire.protocol.requests import Define, OptimizerSpec, Routine, Run
from onebox.wire.protocol.responses import WorkerMemory
from onebox.worker.faults import Fault, FaultInjector
from onebox.worker.memory.async_copy import StreamCopier, ThreadCopier
from onebox.worker.memory.buffers import Poisoned
from onebox.worker.memory.host import HOST_SHARE, HostMemory
from onebox.worker.memory.offload import HostBlockPool
from tests.unit.machines import Rig, define, elementwise

SPEC = TensorSpec("float64", (8, 16))
BYTES = SPEC.size_bytes
X = torch.arange(128, dtype=torch.float64).reshape(8, 16)
RELU, MM = elementwise("aten.relu.default", SPEC), elementwise("aten.mm.default", SPEC, 2)
VIEWS = with_deaths(
    Program(
        (SPEC,),
        (
            Operator("aten.neg.default", (SlotArgument(0),), {}, (1,), (SPEC,)),
            Operator("aten.t.default", (SlotArgument(1),), {}, (2,), (TensorSpec("float64", (16, 8)),)),
            Operator("aten.slice.Tensor", (SlotArgument(1), 0, 3, 5), {}, (3,), (TensorSpec("float64", (2, 16)),)),
        ),
        (1, 2, 3),
        4,
    )
)
"""Makes a tensor, its transpose, and some of its rows: three views of one storage."""


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A machine with X in buffer 1, its negative and two views of that in 2, 3 and 4."""
    before = _threads()
    rig = Rig()
    rig.put(b1=X)
    rig.do(define(100, RELU), define(101, MM), define(102, VIEWS), Call(102, (1,), (2, 3, 4)))
    yield rig
    rig.machine.close()
    assert _threads() <= before, "a transfer thread is left"


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "onebox-transfer"}


def test_a_copy_after_the_end_fails_and_starts_no_thread() -> None:
    before, copier = _threads(), ThreadCopier(FaultInjector())
    copier.close()
    with pytest.raises(RuntimeError, match="the worker ends"):
        copier.move(torch.ones(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)).wait()
    copier.settle()
    assert _threads() <= before


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all blocks that are allocated on the host."""
    sizes: list[int] = []
    for kind in (ThreadCopier, StreamCopier):

        def counted(copier: Any, size_bytes: int, block: Any = kind.block) -> torch.Tensor:
            sizes.append(size_bytes)
            return block(copier, size_bytes)

        monkeypatch.setattr(kind, "block", counted)
    return sizes


def host_bytes(rig: Rig) -> int:
    (memory,) = rig.do(Ask("memory"))
    assert isinstance(memory, WorkerMemory)
    return memory.host_bytes


def failure_of(rig: Rig, number: int) -> Any:
    with pytest.raises(Poisoned) as caught:
        rig.get(number)
    return caught.value.failure


def test_what_was_away_comes_back_to_the_last_bit(rig: Rig) -> None:
    rig.do(Offload((2, 3, 4)), Evict((2, 3, 4)), Prefetch((2, 3, 4)))
    assert torch.equal(rig.get(2), -X)
    assert torch.equal(rig.get(3), -X.t())
    assert torch.equal(rig.get(4), -X[3:5])
    assert rig.failures == []


def test_a_storage_counts_once_here_and_there_and_its_views_are_views_again(rig: Rig) -> None:
    assert rig.used == 2 * BYTES
    rig.do(Offload((2, 3, 4)))
    assert (rig.used, host_bytes(rig)) == (2 * BYTES, BYTES)
    rig.do(Evict((4, 2, 3)))
    assert (rig.used, host_bytes(rig)) == (BYTES, BYTES)
    rig.do(Prefetch((3, 4, 2)))
    assert rig.used == 2 * BYTES
    rig.get(3)
    assert rig.used == 2 * BYTES
    held = {rig.machine.store.get(number).untyped_storage().data_ptr() for number in (2, 3, 4)}
    assert len(held) == 1
    rig.do(Free((2, 3, 4)))
    assert rig.used == BYTES


def test_bytes_that_another_buffer_holds_stay(rig: Rig) -> None:
    rig.do(Offload((3,)), Evict((3,)))
    assert rig.used == 2 * BYTES
    rig.do(Prefetch((3,)))
    assert rig.used == 3 * BYTES  # a storage of its own now
    assert torch.equal(rig.get(3), -X.t())
    assert torch.equal(rig.get(2), -X)


def test_what_is_offloaded_can_be_read_until_it_is_evicted(rig: Rig) -> None:
    rig.do(Offload((2,)), Call(100, (2,), (5,)))
    assert torch.equal(rig.get(5), (-X).relu())
    rig.do(Evict((2,)), Call(100, (2,), (6,)))
    assert "in the host's memory" in failure_of(rig, 6).message


def test_the_client_reads_what_is_on_the_host_without_bringing_it_back(rig: Rig) -> None:
    before = rig.do(Ask("digest", (2, 3)))
    rig.do(Offload((2, 3, 4)), Evict((2, 3, 4)))
    used, there = rig.used, host_bytes(rig)
    assert torch.equal(rig.get(2), -X) and torch.equal(rig.get(3), -X.t())
    assert rig.do(Ask("digest", (2, 3))) == before
    assert (rig.used, host_bytes(rig)) == (used, there)
    rig.do(Get((2,)), Prefetch((2, 3, 4)), Call(100, (1,), (5,)), Offload((5,)))  # reuses the memory that was read
    (frame,) = rig.frames_out
    assert torch.equal(from_frame(SPEC, bytes(frame)), -X)


def test_the_quota_holds_and_eviction_makes_room() -> None:
    rig = Rig(quota_bytes=3 * BYTES)
    rig.put(b1=X, b2=X, b3=X)
    rig.do(define(100, RELU), Offload((1, 2)), Evict((1, 2)), Call(100, (3,), (4,)), Prefetch((1,)))
    assert rig.failures == []
    assert torch.equal(rig.get(1), X)
    rig.do(Prefetch((2,)))
    (failure,) = rig.failures
    assert failure.kind == "memory"
    assert "quota" in failure.message
    assert failure_of(rig, 2) == failure
    assert torch.equal(rig.get(4), X)
    rig.machine.close()


def test_the_hosts_memory_is_bounded() -> None:
    rig = Rig(quota_bytes=BYTES)
    rig.put(b1=X)
    for number in range(2, 2 + HOST_SHARE):
        rig.do(Offload((number - 1,)), Evict((number - 1,)))
        rig.put(**{f"b{number}": X})
    assert rig.failures == []
    last = 1 + HOST_SHARE
    rig.do(Offload((last,)), Evict((last,)), Prefetch((last,)))
    assert [failure.kind for failure in rig.failures] == ["memory"]
    assert "host's memory" in rig.failures[0].message
    assert failure_of(rig, last) == rig.failures[0]
    rig.do(Free((1,)), Prefetch((2,)))  # what waits there is as it was, and there is room again
    assert torch.equal(rig.get(2), X)
    rig.machine.close()


@pytest.mark.parametrize("instruction", [Evict((2,)), Prefetch((2,)), Offload((77,)), Evict((77,)), Prefetch((77,))])
def test_what_is_not_where_it_has_to_be_is_an_error(rig: Rig, instruction: Any) -> None:
    rig.do(instruction)
    assert [failure.kind for failure in rig.failures] == ["protocol"]
    assert failure_of(rig, instruction.buffers[0]) == rig.failures[0]


def test_a_second_offload_and_a_second_prefetch_are_errors(rig: Rig) -> None:
    rig.do(Offload((2,)), Offload((2,)))
    assert "already" in rig.failures[0].message
    rig.put(b6=X)
    rig.do(Offload((6,)), Evict((6,)), Prefetch((6,)), Prefetch((6,)))
    assert "on the device" in rig.failures[1].message
    assert host_bytes(rig) == 0
    assert rig.used == 2 * BYTES


def test_one_failure_goes_through_to_what_is_asked_for(rig: Rig) -> None:
    rig.do(define(103, elementwise("aten.mm.default", TensorSpec("float64", (8, 16)), 2)))
    rig.do(Call(103, (1, 1), (5,)), Offload((5, 2)), Evict((5, 2)), Prefetch((5, 2)), Call(100, (2,), (6,)))
    assert len(rig.failures) == 1
    assert failure_of(rig, 6) == failure_of(rig, 2) == failure_of(rig, 5) == rig.failures[0]
    rig.do(Free((2, 3, 4, 5, 6)))
    assert rig.used == BYTES


def test_an_operator_that_fails_between_leaves_the_others_as_they_are(rig: Rig) -> None:
    rig.do(Offload((2, 3, 4)), Evict((2, 3, 4)), Call(101, (1, 1), (5,)), Prefetch((2, 3, 4)))
    assert len(rig.failures) == 1
    assert torch.equal(rig.get(2), -X)
    assert failure_of(rig, 5) == rig.failures[0]


@pytest.mark.parametrize("place", range(4))
def test_whoever_is_freed_on_the_way_gives_back_its_place(rig: Rig, place: int, allocated: list[int]) -> None:
    way: tuple[Step, ...] = (Offload((2, 3)), Evict((2, 3)), Prefetch((2, 3)))
    rig.do(*way[:place], Free((2, 3, 4)), Ask("memory"))
    assert rig.used == BYTES
    rig.do(Call(102, (1,), (2, 3, 4)), *way)
    assert host_bytes(rig) == 0
    assert allocated == [BYTES], "a block was not used again"
    assert torch.equal(rig.get(3), -X.t())
    assert rig.failures == []


def test_what_a_call_takes_while_it_is_copied_gives_back_its_place(rig: Rig) -> None:
    rig.do(Free((3, 4)), Offload((2,)), Call(100, (2,), (5,), (0,)))
    rig.put(b6=X + 1)
    rig.do(Offload((6,)), Evict((6,)), Prefetch((6,)))
    assert torch.equal(rig.get(6), X + 1)
    assert host_bytes(rig) == 0
    assert rig.failures == []


def test_a_buffer_that_is_filled_anew_is_away_no_more(rig: Rig) -> None:
    rig.do(Offload((2, 3, 4)), Evict((2, 3, 4)))
    rig.put(b2=X)
    assert torch.equal(rig.get(2), X)
    rig.do(Prefetch((3, 4)))
    assert torch.equal(rig.get(3), -X.t())


def test_an_update_in_place_waits_for_the_copy(rig: Rig) -> None:
    rig.put(b8=torch.ones(8, 16, dtype=torch.float64))
    rig.do(Define(7, OptimizerSpec("SGD", (((0,), {"lr": 1.0}),), (1,))), Offload((1,)), OptimizerStep(7, (8,)))
    assert torch.equal(rig.get(1), X - 1)
    rig.do(Evict((1,)), Prefetch((1,)))
    assert torch.equal(rig.get(1), X)


def test_a_copy_that_fails_voids_what_it_was_to_copy() -> None:
    before = _threads()
    rig = Rig(faults=(Fault("error", "moving", 1), Fault("error", "moving", 4)))
    rig.put(b1=X, b2=X)
    rig.do(Offload((1,)), Evict((1,)), Prefetch((1,)))
    assert [failure.message for failure in rig.failures] == [
        "a copy between the device and the host's memory failed: injected fault"
    ]
    assert failure_of(rig, 1) == rig.failures[0]
    rig.do(Offload((2,)), Evict((2,)), Prefetch((2,)))
    assert torch.equal(rig.get(2), X)
    rig.do(Free((1,)), Offload((2,)), Evict((2,)), Prefetch((2,)))
    rig.machine.close()
    assert _threads() <= before


def test_views_of_several_storages_and_nothing_at_all(rig: Rig) -> None:
    empty = torch.zeros(0, 3)
    rig.put(b5=X + 5, b6=empty)
    rig.do(Offload((5, 2, 6, 3, 5)), Evict((6, 5, 3, 2)), Prefetch((2, 5, 6, 3)), Offload(()), Evict(()), Prefetch(()))
    assert torch.equal(rig.get(5), X + 5)
    assert torch.equal(rig.get(3), -X.t())
    assert rig.get(6).shape == (0, 3)
    assert rig.failures == []


def test_a_trace_ends_when_the_copies_were_made(rig: Rig) -> None:
    steps = (Offload((2, 3, 4)), Call(100, (1,), (5,)), Evict((2, 3, 4)), Prefetch((2, 3, 4)), Call(100, (2,), (6,)))
    rig.do(Define(200, Routine((*steps, Free((5, 6))), 0)), Run(200, trace=True))
    times = rig.times_ns
    assert len(times) == 12
    assert all(start <= end for start, end in zip(times[::2], times[1::2], strict=True))
    assert times[1] <= times[5], "an eviction ends before its copy"
    assert rig.failures == []


def test_a_device_without_values_counts_alike() -> None:
    real, still = Rig(), Rig(device=EmulatedDevice())
    for rig in (real, still):
        rig.put(b1=X)
        rig.do(define(102, VIEWS), Call(102, (1,), (2, 3, 4)))
    for instruction in (
        Offload((2, 3, 4)),
        Evict((2, 3, 4)),
        Prefetch((2, 3, 4)),
        Call(102, (2,), (5, 6, 7)),
        Free((3,)),
    ):
        for rig in (real, still):
            rig.do(instruction)
        assert real.do(Ask("memory"))[0].host_bytes == still.do(Ask("memory"))[0].host_bytes  # type: ignore[union-attr]
        assert (real.used, real.machine.store.peak_bytes) == (still.used, still.machine.store.peak_bytes)
    assert real.failures == still.failures == []
    real.machine.close()


def test_a_device_without_values_takes_as_long_as_the_way_would() -> None:
    rig = Rig(device=EmulatedDevice())
    large = TensorSpec("float32", (3_000_000,))
    rig.do(define(103, filled(large)), Call(103, (), (1,)), Call(103, (), (2,)))
    steps = (Offload((1,)), Offload((2,)), Evict((1, 2)), Prefetch((2,)), Prefetch((1,)), Offload((1,)))
    rig.do(Define(200, Routine(steps, 0)), Run(200, trace=True))
    times = rig.times_ns
    seconds = [(end - start) / 1e9 for start, end in zip(times[::2], times[1::2], strict=True)]
    way_s = large.size_bytes / ACCELERATOR_BPS
    assert seconds[0] >= 0.99 * way_s
    assert times[3] - times[1] >= 0.99e9 * way_s, "one after the other"
    assert times[5] >= times[3], "who lets go waits"
    assert times[9] - times[6] >= 1.99e9 * way_s, "both have come back"
    assert rig.failures == []


# ---- blocks of the host


def test_blocks_of_a_size_are_used_again_and_others_go() -> None:
    host = HostMemory(0)
    blocks = HostBlockPool(ThreadCopier(FaultInjector()), host)
    first = blocks.take(100)
    blocks.give(first)
    assert blocks.take(100) is first
    other = blocks.take(60)
    assert host.used_bytes == 160
    blocks.give(first)
    blocks.give(other)
    assert (host.used_bytes, blocks.spare_bytes) == (0, 160)
    for size in (10, 20, 30, 40, 50, 70, 90, 110, 130):
        blocks.give(blocks.take(size))
        assert blocks.spare_bytes <= 2 * 160
    assert (host.used_bytes, host.peak_bytes) == (0, 160)
    blocks.trim()
    assert blocks.spare_bytes == 0


def test_spare_blocks_give_way_to_what_is_needed() -> None:
    host = HostMemory(25)
    assert host.limit_bytes == HOST_SHARE * 25
    blocks = HostBlockPool(ThreadCopier(FaultInjector()), host)
    blocks.give(blocks.take(60))
    assert blocks.take(90).numel() == 90
    assert (host.used_bytes, blocks.spare_bytes) == (90, 0)


def test_with_the_routine_goes_what_was_kept_for_its_use(rig: Rig, allocated: list[int]) -> None:
    way: tuple[Step, ...] = (Offload((2,)), Evict((2,)), Prefetch((2,)))
    rig.do(Define(200, Routine(way, 0)), Run(200), Run(200))
    assert allocated == [BYTES]
    rig.do(Free((), (200,)), *way)
    assert allocated == [BYTES] * 2
    assert torch.equal(rig.get(2), -X)
    assert rig.failures == []
