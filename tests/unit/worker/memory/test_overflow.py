"""Buffers of scripts beyond the device's memory: which go, how they come back, what is counted, and what cannot be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from onebox.wire import KernelSpec, SlotArgument, Strided, TapeSpec, TensorSpec, from_frame
from onebox.wire.protocol.eager import BoundMemory, CopyBuffers, Perform, Replay
from onebox.wire.protocol.instructions import Ask, Call, Free, Get
from onebox.wire.protocol.requests import Define, FreeRange
from onebox.wire.protocol.responses import BufferCopies, Scalars
from onebox.worker.memory.buffers import Poisoned
from onebox.worker.memory.host import HOST_SHARE
from tests.unit.machines import Rig, define, elementwise

SPEC = TensorSpec("float64", (16, 8))
BYTES = SPEC.size_bytes
X = torch.arange(128, dtype=torch.float64).reshape(16, 8)
END = 1 << 20
PLAIN = Strided("float64", (16, 8), (8, 1), 0, BYTES)
TURNED = Strided("float64", (8, 16), (1, 8), 0, BYTES)


def kernel(name: str, inputs: int, *outs: Strided | None) -> KernelSpec:
    return KernelSpec(name, tuple(SlotArgument(index) for index in range(inputs)), {}, inputs, 0, outs)


ADD, INCREASE, TURN = 10, 11, 12
KERNELS = {
    ADD: kernel("aten.maximum.default", 2, PLAIN),
    INCREASE: kernel("aten.add_.Tensor", 2, None),
    TURN: kernel("aten.t.default", 1, TURNED),
}


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A machine with room for three buffers, of which those from 1 may be away, with X, X + 1 and X + 2 in 1, 2, 3."""
    made = Rig(quota_bytes=3 * BYTES)
    made.do(BoundMemory(1, END, offload=True), *(Define(number, spec) for number, spec in KERNELS.items()))
    made.put(b1=X, b2=X + 1, b3=X + 2)
    yield made
    made.machine.close()
    assert not made.failures or made.failures[0].kind == "memory"


def away(rig: Rig) -> set[int]:
    """Return which buffers are in the host's memory."""
    store = rig.machine.store
    numbers = [number for number in range(1, 100) if number in store]
    return {number for number in numbers if not store.present(number).untyped_storage().nbytes()}


def test_what_was_used_longest_ago_goes_and_comes_back_as_it_was(rig: Rig) -> None:
    assert rig.used == 3 * BYTES and not away(rig)
    assert torch.equal(rig.get(1), X)
    rig.put(b4=X + 3)
    assert away(rig) == {2} and rig.used == 3 * BYTES and rig.machine.host.used_bytes == BYTES
    assert torch.equal(rig.get(2), X + 1)
    assert away(rig) == {3}
    for number in (1, 2, 3, 4):
        assert torch.equal(rig.get(number), X + number - 1)
    assert rig.machine.store.peak_bytes == 3 * BYTES and not rig.failures


def test_operators_of_a_batch_bring_what_they_use(rig: Rig) -> None:
    rig.put(b4=X + 3, b5=X + 4)
    tape = TapeSpec((ADD, -1, -2, ADD, -3, -4, ADD, 1, -5, INCREASE, -1, 2), 5)
    rig.do(Define(20, tape), Replay(20, (1, 2, 3, 4, 5), (6, 7, 8)))
    assert torch.equal(rig.get(6), X + 1) and torch.equal(rig.get(7), X + 3) and torch.equal(rig.get(8), X + 4)
    assert torch.equal(rig.get(1), 2 * X + 4)
    assert rig.used <= 3 * BYTES and rig.machine.store.peak_bytes == 3 * BYTES and not rig.failures


def test_views_stay_views_of_one_storage_that_counts_once(rig: Rig) -> None:
    rig.do(Define(20, TapeSpec((TURN, -1), 1)), Replay(20, (1,), (4,)))
    assert rig.used == 3 * BYTES
    rig.put(b5=X, b6=X, b7=X)
    assert away(rig) == {1, 2, 3, 4} and rig.machine.host.used_bytes == 3 * BYTES
    rig.do(Define(21, TapeSpec((INCREASE, -1, -2), 2)), Replay(21, (4, 2), ()))  # a failure: they differ in shape
    assert [failure.kind for failure in rig.failures] == ["operator"]
    rig.failures.clear()
    rig.do(Replay(21, (1, 2), ()))
    assert torch.equal(rig.get(4), (2 * X + 1).T)


def test_buffers_of_others_stay(rig: Rig) -> None:
    rig.do(Free((1, 2, 3)), FreeRange(1, END), BoundMemory(50, END, offload=True))
    rig.put(b1=X, b50=X)
    rig.put(b51=X + 1)
    rig.put(b52=X + 2)
    assert away(rig) == {50}
    rig.do(define(30, elementwise("aten.neg.default", SPEC)), Call(30, (1,), (2,)))
    assert away(rig) == {50, 51} and torch.equal(rig.get(2), -X)


def test_what_ends_while_it_is_away_gives_its_room_on_the_host_back(rig: Rig) -> None:
    rig.put(b4=X, b5=X)
    assert away(rig) == {1, 2}
    rig.do(Free((1,)))
    assert rig.machine.host.used_bytes == BYTES and rig.used == 3 * BYTES
    rig.put(b2=X + 7)
    assert away(rig) == {3} and rig.machine.host.used_bytes == BYTES
    rig.do(FreeRange(1, END))
    assert rig.used == rig.machine.host.used_bytes == 0


def test_an_operator_whose_own_tensors_find_no_room_fails(rig: Rig) -> None:
    rig.do(Define(20, TapeSpec((ADD, -1, -2), 2)), BoundMemory(1, END, offload=True, most_bytes=2 * BYTES))
    rig.do(Replay(20, (1, 2), (5,)))
    (failure,) = rig.failures
    assert failure.kind == "memory" and "the tensors of one operator have to be there at once" in failure.message
    assert torch.equal(rig.get(1), X) and torch.equal(rig.get(2), X + 1)
    with pytest.raises(Poisoned):
        rig.get(5)


def test_the_hosts_memory_is_bounded(rig: Rig) -> None:
    most = 3 + 3 * HOST_SHARE
    for number in range(4, most + 1):
        rig.put(**{f"b{number}": X + number})
    assert not rig.failures
    rig.put(**{f"b{most + 1}": X})
    (failure,) = rig.failures
    assert failure.kind == "memory" and "of the host's memory needed" in failure.message
    assert torch.equal(rig.get(5), X + 5)  # another one takes its place
    assert rig.machine.host.used_bytes == 3 * HOST_SHARE * BYTES


def test_copies_are_made_from_where_buffers_are(rig: Rig) -> None:
    rig.put(b4=X + 3)
    (copies,) = rig.do(CopyBuffers(1, 100))
    assert isinstance(copies, BufferCopies) and away(rig) == {1}
    found = {
        number: from_frame(SPEC, bytes(rig.frames_out[place]))
        for number, place in zip(copies.buffers, copies.storages, strict=True)
    }
    assert all(torch.equal(found[number], X + number - 1) for number in (1, 2, 3, 4))


def test_single_operators_and_questions_bring_what_they_read(rig: Rig) -> None:
    rig.put(b4=X, b5=X)
    assert away(rig) == {1, 2}
    rig.do(Perform(kernel("aten.nonzero.default", 1), (2,), (), 8))
    assert len(rig.get(8)) == 128
    rig.do(Perform(kernel("aten.sum.default", 1), (1,), (), 9))
    (total,) = rig.do(Ask("scalars", (9,)))
    assert isinstance(total, Scalars) and total.values == (X.sum().item(),)


def test_what_was_read_before_in_the_same_message_keeps_its_values(rig: Rig) -> None:
    rig.do(Get((1,)), Get((2,)), *(Perform(kernel("aten.neg.default", 1), (3,), (), number) for number in range(4, 9)))
    assert {1, 2} <= away(rig)
    assert torch.equal(from_frame(SPEC, bytes(rig.frames_out[0])), X)
    assert torch.equal(from_frame(SPEC, bytes(rig.frames_out[1])), X + 1)


def test_the_least_of_several_bounds_holds_until_its_stream_ends(rig: Rig) -> None:
    store = rig.machine.store
    rig.do(BoundMemory(END, 2 * END, most_bytes=2 * BYTES))
    assert store.quota_bytes == 2 * BYTES
    rig.do(BoundMemory(END, 2 * END, most_bytes=100 * BYTES))
    assert store.quota_bytes == 3 * BYTES
    rig.do(BoundMemory(END, 2 * END, most_bytes=BYTES), FreeRange(END, 2 * END))
    assert store.quota_bytes == 3 * BYTES
