"""Slots of a worker: a snapshot is as the state was, others get it whole or not at all, and every byte counts."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import TensorSpec, from_frame, spec_of
from onebox.wire.protocol.groups import FormGroup
from onebox.wire.protocol.instructions import Ask, Free, OptimizerStep
from onebox.wire.protocol.requests import Define, OptimizerSpec
from onebox.wire.protocol.responses import FilledSlots as Filled
from onebox.wire.protocol.responses import OptimizerState, SnapshotContents, WorkerMemory
from onebox.wire.protocol.snapshots import (
    PIECE_BYTES,
    Drop,
    Fill,
    Give,
    Lay,
    Read,
    Recall,
    Snapshot,
    StateEntry,
    Take,
    Write,
    end_to_end,
    layout,
    pieces,
)
from onebox.worker.comm.manager import form_group
from onebox.worker.faults import Fault, FaultInjector
from onebox.worker.memory.buffers import Poisoned, QuotaExceeded
from onebox.worker.progress import WorkerProgress
from onebox.worker.snapshots.slots import SnapshotSlots
from onebox.worker.snapshots.transfer import SnapshotTransfer
from tests.unit.machines import Rig
from tests.unit.programs import HOST
from tests.unit.ranks import Hub

X = torch.arange(6, dtype=torch.float64).reshape(2, 3)
ADAM = OptimizerSpec("AdamW", (((0,), {"lr": 0.5}),), (1,))
WAIT_S = 60.0


def slots(limit_bytes: int = 0) -> SnapshotSlots:
    return SnapshotSlots(HOST, FaultInjector(), limit_bytes=limit_bytes)


@pytest.fixture
def rig() -> Rig:
    """A machine with a parameter in buffer 1, its gradient in 2, something of another type in 3, and AdamW (7)."""
    rig = Rig()
    rig.put(b1=X, b2=torch.ones(2, 3, dtype=torch.float64), b3=torch.tensor([True, False, True]))
    rig.do(Define(7, ADAM))
    return rig


def state_of(rig: Rig) -> tuple[tuple[StateEntry, ...], list[Tensor]]:
    """Return what the optimizer remembers."""
    (listing,) = rig.do(Ask("optimizer", (7,)))
    assert isinstance(listing, OptimizerState)
    specs = [entry.value for entry in listing.entries if isinstance(entry.value, TensorSpec)]
    frames = [bytes(frame) for frame in rig.frames_out]
    return listing.entries, [from_frame(spec, frame) for spec, frame in zip(specs, frames, strict=True)]


# ---- where things lie


@given(st.lists(st.tuples(st.sampled_from(["bool", "float64", "bfloat16"]), st.lists(st.integers(0, 9), max_size=3))))
def test_tensors_lie_one_behind_the_other_where_any_type_may_begin(kinds: list[tuple[str, list[int]]]) -> None:
    specs = [TensorSpec(dtype, tuple(shape)) for dtype, shape in kinds]
    starts, size_bytes = layout(specs)
    ends = [start + spec.size_bytes for start, spec in zip(starts, specs, strict=True)]
    assert all(start % 8 == 0 for start in starts)
    assert all(end <= start for end, start in zip(ends, [*starts[1:], size_bytes], strict=False))
    assert size_bytes <= sum(spec.size_bytes + 63 for spec in specs)


@given(st.lists(st.integers(0, 3 * PIECE_BYTES), max_size=4))
def test_pieces_are_all_bytes_once_and_in_order(sizes: list[int]) -> None:
    found = list(pieces(end_to_end(sizes)))
    assert all(0 < size <= PIECE_BYTES for _, size in found)
    end = 0
    for start, size in found:
        assert start == end
        end += size
    assert end == sum(sizes)


# ---- a worker's own slots


def test_what_a_snapshot_holds_stays_as_it_was_and_comes_back_to_the_bit(rig: Rig) -> None:
    rig.do(OptimizerStep(7, (2,)))
    entries, before = state_of(rig)
    weights = rig.get(1)
    (kept,) = rig.do(Snapshot(20, (1, 3), 7))
    assert kept == SnapshotContents((spec_of(X), TensorSpec("bool", (3,))), entries)
    rig.do(OptimizerStep(7, (2,)), OptimizerStep(7, (2,)))
    assert not torch.equal(rig.get(1), weights)
    specs = [*kept.specs, *(entry.value for entry in entries if isinstance(entry.value, TensorSpec))]
    starts, size_bytes = layout(specs)
    (memory,) = rig.do(Ask("memory"))
    assert isinstance(memory, WorkerMemory)
    assert memory.kept_bytes == size_bytes
    rig.do(Free((1, 3), (7,)))
    rig.do(Fill((1, 3), kept.specs, ((20, starts[0]), (20, starts[1]))), Define(7, ADAM))
    rig.do(Recall(7, entries, tuple((20, start) for start in starts[2:])))
    assert torch.equal(rig.get(1), weights)
    assert rig.get(3).tolist() == [True, False, True]
    assert state_of(rig)[0] == entries
    assert all(torch.equal(one, other) for one, other in zip(state_of(rig)[1], before, strict=True))
    rig.do(OptimizerStep(7, (2,)))
    assert torch.equal(rig.get(1), self_stepped(weights, entries, before)), "and it goes on as the optimizer would have"
    rig.do(Drop((20, 21)), Free((1, 2, 3), (7,)))
    (memory,) = rig.do(Ask("memory"))
    assert isinstance(memory, WorkerMemory)
    assert (memory.used_bytes, memory.kept_bytes) == (0, 0)
    assert rig.failures == []


def self_stepped(weights: Tensor, entries: tuple[StateEntry, ...], state: list[Tensor]) -> Tensor:
    """Return what becomes of weights in one more step of the optimizer, here."""
    other = Rig()
    other.put(b1=weights, b2=torch.ones(2, 3, dtype=torch.float64))
    from onebox.wire import to_frame

    frames = [bytes(to_frame(tensor)) for tensor in state]
    other.do(Define(7, OptimizerSpec("AdamW", ADAM.groups, (1,), entries)), frames=frames)
    other.do(OptimizerStep(7, (2,)))
    return other.get(1)


def test_a_slot_is_read_and_written_in_parts(rig: Rig) -> None:
    rig.do(Snapshot(20, (1,)))
    frames = []
    for start, size in ((0, 40), (40, 8)):
        rig.do(Read(20, start, size))
        frames.append(bytes(rig.frames_out[0]))
    rig.do(Write(21, 40, 64), Write(21, 0, 64), frames=frames[::-1])
    rig.do(Fill((5,), (spec_of(X),), ((21, 0),)))
    assert torch.equal(rig.get(5), X)


def test_there_is_no_snapshot_of_what_is_void(rig: Rig) -> None:
    rig.do(OptimizerStep(7, (99,)))
    with pytest.raises(Poisoned):
        rig.do(Snapshot(20, (1,)))
    assert rig.do(Ask("slots", (20,))) == [Filled((), "slot 20 is not there")]


@pytest.mark.parametrize(
    "wrong",
    [
        Fill((5,), (TensorSpec("float64", (7,)),), ((20, 16),)),
        Fill((5,), (TensorSpec("float64", (1,)),), ((20, 4),)),
        Fill((5,), (TensorSpec("float64", (1,)),), ((20, -8),)),
        Fill((5,), (spec_of(X),), ((22, 0),)),
        Write(20, 60, 64),
        Recall(7, (StateEntry(0, "exp_avg", spec_of(X)),), ()),
        Give(20, ((0, 65),), 5, 1),
        Give(20, ((0, 8),), 5, 1),
        Drop((20,), True),
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_what_does_not_lie_in_a_slot_cannot_be_had(rig: Rig, wrong: Any) -> None:
    rig.do(Snapshot(20, (1,)))
    rig.do(wrong, frames=[bytes(8)])
    assert bool(rig.failures) is not isinstance(wrong, Drop)
    rig.do(Snapshot(21, (1,)), Fill((6,), (spec_of(X),), ((21, 0),)))
    assert torch.equal(rig.get(6), X)


def test_memory_is_used_again_and_let_go() -> None:
    own = slots()
    own.keep(1, [X])
    memory = own.get(1).memory.data_ptr()
    own.keep(2, [X])
    assert own.used_bytes == 128
    own.drop([1], again=True)
    assert own.used_bytes == 128, "it is kept for the next one"
    own.keep(3, [X + 1])
    assert own.get(3).memory.data_ptr() == memory
    assert torch.equal(own.tensor(spec_of(X), (3, 0)), X + 1)
    own.drop([2], again=True)
    own.keep(4, [torch.cat([X, X, X])])
    assert own.used_bytes == 64 + 192, "what is of no use is let go"
    own.drop([3, 4])
    assert own.used_bytes == 0


def test_slots_have_a_limit_of_their_own() -> None:
    own = slots(limit_bytes=100)
    own.keep(1, [X])
    with pytest.raises(QuotaExceeded):
        own.keep(2, [X])
    assert own.used_bytes == 64
    assert own.filled([1, 2]) == Filled((1,), "slot 2 is not there")


def test_a_slot_that_is_not_made_does_not_count(rig: Rig) -> None:
    """Neither for more, nor, with a negative size, for less: the limit would not hold any more."""
    own = slots(limit_bytes=100)
    with pytest.raises(WireError, match="a slot of -64 bytes"):
        own.make(1, -64)
    assert own.used_bytes == 0
    unlimited = slots()
    with pytest.raises(RuntimeError):
        unlimited.make(1, 1 << 62)
    assert unlimited.used_bytes == 0
    rig.do(Take(20, (-64, 128), 5, 1))
    assert "runs of (-64, 128) bytes" in str(rig.failures.pop())


def test_a_snapshot_of_what_lies_otherwise_in_memory() -> None:
    own = slots()
    strided, empty, scalar = X.t(), torch.empty(0, 3), torch.tensor(2.5, dtype=torch.bfloat16)
    own.keep(1, [strided, empty, scalar])
    starts, _ = layout([spec_of(strided), spec_of(empty), spec_of(scalar)])
    for tensor, start in zip((strided, empty, scalar), starts, strict=True):
        assert torch.equal(own.tensor(spec_of(tensor), (1, start)), tensor)
    with pytest.raises(WireError, match="not there"):
        own.get(9)


# ---- from worker to worker


def carry(
    elements: Tensor, runs: tuple[tuple[int, int], ...], *, shared: bool, faults: tuple[Fault, ...] = ()
) -> tuple[SnapshotSlots, SnapshotSlots]:
    """Carry parts of a slot (1) from one of two threads to the other (2); return their slots."""
    hub = Hub()

    def rank(number: int) -> SnapshotSlots:
        form = FormGroup(3, number, 2, "tcp", "127.0.0.1", WAIT_S, shared, (), True)
        group = form_group(form, hub.channel(number), HOST, WorkerProgress())
        own = slots()
        courier = SnapshotTransfer(FaultInjector(faults if number == 0 else ()))
        if number == 0:
            own.keep(1, [elements])
            slot = own.get(1)
            courier.give(Give(1, runs, 3, 1), slot, group)
        else:
            slot = own.make(2, sum(size for _, size in runs))
            courier.take(Take(2, tuple(size for _, size in runs), 3, 0), slot, group)
        end_s = time.monotonic() + WAIT_S
        while slot.carriers and time.monotonic() < end_s:
            time.sleep(0.001)
        group.close()
        courier.close()
        assert not slot.carriers
        return own

    with ThreadPoolExecutor(2) as threads:
        giver, taker = threads.map(rank, range(2))
    return giver, taker


both = pytest.mark.parametrize("shared", [False, True], ids=["sockets", "shared memory"])


@both
def test_parts_of_a_slot_are_carried_piece_by_piece(shared: bool) -> None:
    elements = torch.arange(3 * PIECE_BYTES + 5, dtype=torch.int64).to(torch.uint8)
    runs = ((8, 3 * PIECE_BYTES - 100), (0, 3), (3 * PIECE_BYTES, 5))
    _, taker = carry(elements, runs, shared=shared)
    assert taker.filled([2]) == Filled((2,))
    expected = torch.cat([elements[start : start + size] for start, size in runs])
    assert torch.equal(taker.get(2).memory, expected)


@both
def test_what_comes_in_part_is_no_slot(shared: bool) -> None:
    elements = torch.zeros(4 * PIECE_BYTES, dtype=torch.uint8)
    giver, taker = carry(elements, ((0, 4 * PIECE_BYTES),), shared=shared, faults=(Fault("error", "giving", 3),))
    assert "injected fault" in giver.filled([1]).failure
    found = taker.filled([2])
    assert found.filled == ()
    assert found.failure
    with pytest.raises(WireError, match="not filled"):
        taker.get(2)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=3))
def test_any_runs_arrive(sizes: list[int]) -> None:
    elements = torch.arange(1000).to(torch.uint8)
    runs = tuple((7 * index, size) for index, size in enumerate(sizes))
    _, taker = carry(elements, runs, shared=True)
    assert torch.equal(taker.get(2).memory, torch.cat([elements[start : start + size] for start, size in runs]))


# ---- from optimizer to optimizer


def test_an_optimizer_takes_anothers_place_and_remembers_what_came(rig: Rig) -> None:
    rig.do(OptimizerStep(7, (2,)))
    entries, before = state_of(rig)
    (told,) = rig.do(Lay(7))
    assert told == SnapshotContents((), entries)
    laid = (11, 12, 13)
    rig.do(Lay(7, (0,), laid))
    rig.put(b4=X + 1)
    two = OptimizerSpec("AdamW", (((0, 1), {"lr": 0.5}),), (4, 1), succeeds=True)
    rig.do(Define(7, two))
    rig.do(Recall(7, entries, (), laid))  # of the first parameter of the new one, which is another
    found, state = state_of(rig)
    assert [entry.parameter for entry in found] == [0, 0, 0, 1, 1, 1]
    assert all(torch.equal(one, other) for one, other in zip(state, [*before, *before], strict=True))
    assert rig.machine.store.used_bytes == sum(rig.get(number).nbytes for number in (1, 2, 3, 4)) + 2 * sum(
        tensor.nbytes for tensor in before
    )
    assert rig.failures == []


def test_what_cannot_be_laid_or_recalled_is_refused(rig: Rig) -> None:
    rig.do(OptimizerStep(7, (2,)))
    entries, _ = state_of(rig)
    for wrong in (Lay(7, (0,), (11,)), Lay(8)):
        with pytest.raises(Poisoned):
            rig.do(wrong)
    rig.do(Recall(7, entries, (), (2, 2, 2)))
    assert len(rig.failures) == 3
