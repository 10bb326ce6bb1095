"""Tapes do what plain PyTorch does, the first time and later, and in failing, too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onebox.wire import FREE, TapeSpec
from onebox.wire.protocol.eager import Replay
from onebox.wire.protocol.instructions import Ask, Free
from onebox.wire.protocol.requests import Define
from onebox.wire.protocol.responses import WorkerMemory
from onebox.worker.faults import Fault
from tests.unit.machines import Batch, Rig
from tests.unit.worker.scripts import (
    ADD,
    MUL_,
    ONES,
    VIEW,
    Ref,
    Script,
    X,
    bytes_held,
    failure_of,
    on_a_worker,
    small_rig,
)

aten = torch.ops.aten


@pytest.fixture
def rig() -> Rig:
    return small_rig()


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Views, operators in place and others over a few buffers of 3 x 4, some of which end."""
    script = Script(X, X * 0.5 - 1, X.flip(0))
    squares = [1, 2, 3]
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.integers(0, 9))
        a, b = (Ref(draw(st.sampled_from(squares))) for _ in range(2))
        if kind == 0:
            squares += script.run(aten.add.Tensor, a, b, alpha=draw(st.sampled_from([0.5, -1.0])))
        elif kind == 1:
            squares += script.run(aten.view.default, a, [3, 4])
        elif kind == 2:
            script.run(aten.mul_.Scalar, a, draw(st.sampled_from([0.5, 2.0])))
        elif kind == 3:
            (part,) = script.run(aten.slice.Tensor, a, 1, 0, 2)
            script.run(aten.sub_.Tensor, Ref(part), Ref(part), alpha=0.25)
        elif kind == 4:
            script.run(aten.copy_.default, a, b)
        elif kind == 5:
            (joined,) = script.run(aten.cat.default, [a, b], 0)
            squares += script.run(aten.split.Tensor, Ref(joined), 3)
        elif kind == 6 and a != b:
            script.run(aten._foreach_lerp_.Scalar, [a], [b], 0.5)
        elif kind == 7:
            squares.append(script.run(aten.max.dim, a, 0, True)[0] and script.run(aten.relu.default, b)[0])
        elif kind == 8 and len(squares) > 1:
            squares.remove(a.number)
            script.free(a.number)
        elif kind == 9:
            script.run(aten.add.out, a, b, out=Ref(draw(st.sampled_from(squares))))
    return script


@given(scripts(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_tape_does_what_its_calls_do(script: Script, again: bool) -> None:
    tape = script.tape()
    assume(tape.inputs <= len(tape.calls))  # a tape has no more inputs than it uses
    assume(next(iter(tape.calls), 1) != FREE)  # nothing is freed before the first call
    single = on_a_worker(script)
    script.check(single)
    assert single.used == bytes_held(script)
    rig = Rig()
    rig.do(*script.definitions(), Define(9, tape))
    for _ in range(3 if again else 2):
        script.put(rig)
        rig.do(script.replay(9))
        script.check(rig)
        assert rig.used == bytes_held(script)
        assert rig.machine.store.peak_bytes == single.machine.store.peak_bytes
        rig.do(Free(tuple(script.tensors)))
        assert rig.used == 0
        rig.do(Ask("peak"))


@pytest.mark.parametrize("replays", [0, 1, 2], ids=["first", "second", "third"])
def test_a_failure_in_a_tape_voids_what_is_made_after_it(replays: int) -> None:
    """The operator in place fails where its second argument has three elements."""
    rig = Rig()
    rig.do(Define(1, ADD), Define(2, MUL_))
    calls = (1, -1, -2, 2, -1, -3, 1, -1, -2, 1, -2, -2, 1, 1, 2, FREE, 1, FREE, -4)
    rig.do(Define(9, TapeSpec(calls, 4, 4)))
    inputs, outputs, floats = (11, 12, 13, 14), (21, 22, 23), (1.0,) * 4
    for _ in range(replays):
        rig.put(b11=ONES, b12=ONES, b13=ONES, b14=ONES)
        rig.do(Replay(9, inputs, outputs, floats))
        assert torch.equal(rig.get(23), ONES * 4)
        assert "no buffer 14" in failure_of(rig, 14).message
        rig.failures.clear()
    rig.put(b11=ONES, b12=ONES, b13=torch.ones(3, dtype=torch.float64), b14=ONES)
    rig.do(Replay(9, inputs, outputs, floats))
    (failure,) = rig.failures
    assert (failure.operator, failure.shapes) == ("aten.mul_.Tensor", "float64[4], float64[3]")
    assert failure_of(rig, 22) == failure_of(rig, 23) == failure
    assert torch.equal(rig.get(21), ONES * 2)
    assert torch.equal(rig.get(11), ONES)
    assert torch.equal(rig.get(12), ONES)
    rig.failures.clear()
    assert "no buffer 14" in failure_of(rig, 14).message
    rig.failures.clear()
    rig.put(b11=ONES, b13=ONES, b14=ONES)
    rig.do(Replay(9, inputs, outputs, floats))
    assert torch.equal(rig.get(23), ONES * 4)
    assert rig.failures == []


@pytest.mark.parametrize("replays", [0, 1, 2], ids=["first", "second", "third"])
def test_a_failure_in_a_tape_leaves_what_was_to_be_written(replays: int) -> None:
    """The tape writes to a view of its first input; a view from before it sees that memory, too."""
    rig = Rig()
    rig.do(
        Define(1, ADD),
        Define(2, MUL_),
        Define(5, VIEW),
        Define(9, TapeSpec((5, -1, 2, 0, -2, 1, -1, -1, FREE, 0), 2, 1)),
    )
    for _ in range(replays):
        rig.put(b11=ONES, b12=ONES.view(2, 2))
        rig.do(Replay(9, (11, 12), (21,), (1.0,)))
        assert torch.equal(rig.get(21), ONES * 2)
    rig.put(b11=ONES, b12=torch.ones(3, dtype=torch.float64), b13=ONES)
    rig.do(Batch((5, 11, 31, 5, 13, 32)), Replay(9, (11, 12), (21,), (1.0,)))
    (failure,) = rig.failures
    assert failure.operator == "aten.mul_.Tensor"
    assert failure_of(rig, 21) == failure
    assert torch.equal(rig.get(11), ONES)
    assert torch.equal(rig.get(31), ONES.view(2, 2))
    assert torch.equal(rig.get(32), ONES.view(2, 2))


@pytest.mark.parametrize("replays", [0, 1, 2], ids=["first", "second", "third"])
def test_a_view_of_what_is_there_is_made_after_a_failure_in_a_tape(replays: int) -> None:
    rig = Rig()
    rig.do(Define(2, MUL_), Define(5, VIEW), Define(9, TapeSpec((2, -1, -2, 5, -1), 2)))
    for _ in range(replays):
        rig.put(b11=ONES, b12=ONES)
        rig.do(Replay(9, (11, 12), (21,)))
    rig.put(b11=ONES, b12=torch.ones(3, dtype=torch.float64))
    rig.do(Replay(9, (11, 12), (21,)))
    assert [failure.operator for failure in rig.failures] == ["aten.mul_.Tensor"]
    assert torch.equal(rig.get(21), ONES.view(2, 2))
    used = rig.used
    rig.do(Free((11,)))
    assert rig.used == used  # its view has the memory
    rig.do(Free((21,)))
    assert rig.used == used - 32


def test_a_tape_that_does_not_run_leaves_what_its_views_would_have_written() -> None:
    rig = Rig(faults=(Fault("error", "replay", 1),))
    rig.do(Define(2, MUL_), Define(5, VIEW), Define(9, TapeSpec((5, -1, 5, 0, 2, 1, -2, FREE, 0, FREE, 1), 2)))
    rig.put(b11=ONES, b12=ONES.view(2, 2))
    rig.do(Replay(9, (11, 12), (), ()))
    assert len(rig.failures) == 1
    assert torch.equal(rig.get(11), ONES)
    assert torch.equal(rig.get(12), ONES.view(2, 2))


@pytest.mark.parametrize("replays", [0, 2])
def test_a_void_input_voids_what_is_made_from_its_use_on(rig: Rig, replays: int) -> None:
    rig.do(Define(9, TapeSpec((1, -1, -1, 1, -2, -2, 2, -2, 0), 2, 2)))
    for _ in range(replays):
        rig.do(Replay(9, (11, 12), (21, 22), (1.0, 1.0)))
        rig.put(b12=ONES)
    rig.do(Batch((3, 11, 12, 31)), Replay(9, (31, 12), (21, 22), (1.0, 1.0)))
    (failure,) = rig.failures
    assert failure.operator == "aten.mm.default"
    assert failure_of(rig, 21) == failure_of(rig, 22) == failure
    assert torch.equal(rig.get(12), ONES)


def test_a_tape_that_could_not_be_defined_voids_what_it_would_have_made(rig: Rig) -> None:
    rig.do(Define(9, TapeSpec((1, -1, -2, FREE, 5), 2, 1)), Replay(9, (11, 12), (20,), (1.0,)))
    (failure,) = rig.failures
    assert (failure.kind, failure.operator) == ("protocol", "define")
    assert failure_of(rig, 20) == failure
    assert all(torch.equal(rig.get(number), ONES) for number in (11, 12, 13))


def test_a_tape_keeps_its_kernels(rig: Rig) -> None:
    rig.do(Define(9, TapeSpec((1, -1, -2), 2, 1)), Free((), (1,)))
    for _ in range(2):
        rig.do(Replay(9, (11, 12), (20,), (2.0,)))
        assert torch.equal(rig.get(20), ONES * 3)
    assert rig.failures == []


def test_storages_that_grow_in_a_tape_are_counted() -> None:
    script = Script(torch.zeros(2), torch.zeros(3))
    (view,) = script.run(aten.view.default, Ref(2), [3])
    script.run(aten.resize_.default, Ref(1), [40])
    script.run(aten.fill_.Scalar, Ref(1), 1)
    script.run(aten.resize_.default, Ref(view), [20])
    script.run(aten.fill_.Scalar, Ref(view), 2)
    rig = Rig()
    rig.do(*script.definitions(), Define(9, script.tape()))
    for _ in range(3):
        script.put(rig)
        rig.do(script.replay(9))
        script.check(rig)
        assert rig.used == bytes_held(script) == 4 * 60
    rig.do(Free(tuple(script.tensors)))
    assert rig.used == 0


@pytest.mark.parametrize("replays", [0, 1, 2], ids=["first", "second", "third"])
def test_a_tape_that_does_not_fit_fails_at_the_operator_that_does_not(replays: int) -> None:
    calls = (1, -1, -1, FREE, 0, 1, -1, -1, 1, 1, -1, FREE, 1)
    rig = Rig()
    rig.do(Define(1, ADD), Define(9, TapeSpec(calls, 1, 3)))
    rig.put(b1=ONES)
    for _ in range(replays):
        rig.do(Replay(9, (1,), (2,), (1.0, 1.0, 1.0)), Free((2,)))
    rig.machine.store.quota_bytes = 2 * 32
    rig.do(Replay(9, (1,), (2,), (1.0, 1.0, 1.0)))
    assert [(failure.kind, failure.operator) for failure in rig.failures] == [("memory", "aten.add.Tensor")]
    assert failure_of(rig, 2) == rig.failures[0]
    assert rig.used == 32
    rig.machine.store.quota_bytes = 3 * 32
    rig.failures.clear()
    rig.do(Replay(9, (1,), (2,), (1.0, 1.0, 1.0)))
    assert torch.equal(rig.get(2), ONES * 3)
    assert rig.failures == []


def test_the_peak_of_a_tape_is_that_of_its_operators() -> None:
    rig = Rig()
    rig.do(Define(1, ADD), Define(9, TapeSpec((1, -1, -1, 1, 0, -1, FREE, 0, FREE, -1), 1, 2)))
    for _ in range(3):
        rig.put(b1=ONES)
        rig.do(Ask("peak"), Replay(9, (1,), (2,), (1.0, 1.0)))
        (told,) = rig.do(Ask("memory"))
        assert told == WorkerMemory(32, 3 * 32, 0)
        rig.do(Free((2,)))


def test_every_operator_counts_as_progress(rig: Rig) -> None:
    rig.do(Define(9, TapeSpec((1, -1, -2, FREE, 0, 2, -1, -2), 2, 1)))
    for _ in range(3):
        before = rig.machine.progress.executed
        rig.do(Replay(9, (11, 12), (), (1.0,)))
        assert rig.machine.progress.executed - before == 3
        assert rig.machine.progress.doing == "aten.mul_.Tensor"
