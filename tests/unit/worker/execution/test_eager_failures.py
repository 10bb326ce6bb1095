"""Eager operators that fail stop what follows and leave what exists; instructions that are wrong do no harm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onebox.wire import (
    FREE,
    Complex,
    GeneratorArgument,
    GeneratorSpec,
    Hole,
    KernelSpec,
    Many,
    SlotArgument,
    Strided,
    TapeSpec,
    spec_of,
    to_frame,
)
from onebox.wire.protocol.eager import KeepGenerator, Perform, Replay, SetGenerator, StreamHeader
from onebox.wire.protocol.instructions import Ask, Call, Get
from onebox.wire.protocol.requests import Define, FreeRange, Put
from onebox.wire.protocol.responses import FilledSlots, WorkerMemory
from onebox.worker.faults import Fault
from onebox.worker.memory.buffers import Poisoned
from tests.unit.machines import Batch, Rig, define, elementwise
from tests.unit.worker.scripts import ADD, FOUR, MM, MUL_, ONES, VIEW, failure_of, small_rig


@pytest.fixture
def rig() -> Rig:
    return small_rig()


def test_what_follows_a_failed_operator_is_skipped(rig: Rig) -> None:
    rig.do(Batch((1, 11, 12, 19, 3, 11, 12, 20, 1, 20, 11, 21, 1, 11, 12, 22, FREE, 13), (2.0, 1.0, 2.0)))
    (failure,) = rig.failures
    assert (failure.kind, failure.operator, failure.shapes) == ("operator", "aten.mm.default", "float64[4], float64[4]")
    assert failure_of(rig, 20) == failure_of(rig, 21) == failure_of(rig, 22) == failure
    assert torch.equal(rig.get(19), ONES * 3)
    assert "no buffer 13" in failure_of(rig, 13).message


@pytest.mark.parametrize(
    "view",
    [
        Strided("float64", (4,), (1,), 1), Strided("float64", (2, 3), (2, 1)), Strided("float32", (4,), (2,), 2),
        Strided("complex128", (2,), (1,), 1), Strided("complex128", (3,), (1,), 0, 0, True),
    ],
)  # fmt: skip
def test_a_view_beyond_its_buffer_is_a_failure(rig: Rig, view: Strided) -> None:
    zero = KernelSpec("aten.zero_.default", (SlotArgument(0),), {}, 1, 0, (None,), (view,))
    rig.do(Define(60, zero), Batch((60, 11)))
    (failure,) = rig.failures
    assert failure.operator == "aten.zero_.default"
    assert torch.equal(rig.get(11), ONES) and rig.get(11).untyped_storage().nbytes() == 32


def test_a_failure_names_the_shapes_that_the_operator_saw(rig: Rig) -> None:
    views = (Strided("float64", (3, 1), (1, 1)), Strided("float64", (2, 2), (2, 1)))
    product = KernelSpec("aten.mm.default", (SlotArgument(0), SlotArgument(1)), {}, 2, 0, (None,), views)
    rig.do(Define(60, product), Batch((60, 11, 12)))
    (failure,) = rig.failures
    assert failure.shapes == "float64[3, 1], float64[2, 2]"


def test_what_was_to_be_written_keeps_its_values(rig: Rig) -> None:
    rig.put(b14=torch.ones(3, dtype=torch.float64))
    used = rig.used
    rig.do(Batch((2, 11, 14, 1, 11, 12, 20, 2, 12, 13), (1.0,)))
    (failure,) = rig.failures
    assert failure.operator == "aten.mul_.Tensor"
    assert failure_of(rig, 20) == failure
    assert all(torch.equal(rig.get(number), ONES) for number in (11, 12, 13))
    assert rig.used == used


def test_views_of_what_is_there_are_made_after_a_failure(rig: Rig) -> None:
    transpose = KernelSpec("aten.t_.default", (SlotArgument(0),), {}, 1, 0)
    rig.put(b14=torch.ones(3, dtype=torch.float64), b15=torch.arange(6.0).view(2, 3))
    rig.do(
        Define(5, VIEW),
        Define(6, transpose),
        Batch((5, 11, 20, 2, 20, 14, 5, 11, 21, 1, 11, 12, 22, 5, 22, 23, 6, 15), (1.0,)),
    )
    (failure,) = rig.failures
    assert torch.equal(rig.get(20), ONES.view(2, 2))
    assert torch.equal(rig.get(21), ONES.view(2, 2))
    assert failure_of(rig, 22) == failure_of(rig, 23) == failure
    assert torch.equal(rig.get(15), torch.arange(6.0).view(2, 3).t())


def test_a_kernel_that_is_not_allowed_voids_what_it_would_have_made(rig: Rig) -> None:
    rig.do(
        Define(5, KernelSpec("aten.set_.source_Storage", (SlotArgument(0), SlotArgument(1)), {}, 2, 0)),
        Define(6, KernelSpec("aten.save.default", (SlotArgument(0), "/tmp/x"), {}, 1, 0, (FOUR,))),
    )
    rig.do(Batch((5, 11, 12, 1, 11, 12, 20), (1.0,)))
    rig.do(Batch((6, 13, 30)))
    rig.do(Batch((1, 12, 12, 21), (1.0,)))
    assert all("allow-list" in failure.message for failure in rig.failures)
    assert failure_of(rig, 20) == rig.failures[0]
    assert failure_of(rig, 30) == rig.failures[1]
    assert torch.equal(rig.get(11), ONES)
    assert torch.equal(rig.get(21), ONES * 2)


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        (Strided("float64", (5,), (1,)), r"returned torch.float64 \[4\] where torch.float64 \[5\]"),
        (Strided("float32", (4,), (1,)), r"where torch.float32 \[4\]"),
        (Strided("float64", (2, 2), (2, 1)), r"where torch.float64 \[2, 2\]"),
    ],
)
def test_another_result_than_was_told_is_a_failure(rig: Rig, told: Strided, problem: str) -> None:
    rig.do(Define(5, KernelSpec("aten.neg.default", (SlotArgument(0),), {}, 1, 0, (told,))), Batch((5, 11, 20)))
    assert failure_of(rig, 20).kind == "operator"
    with pytest.raises(Poisoned, match=problem):
        rig.get(20)


@pytest.mark.parametrize("tape", [1, 98, 99])
def test_what_a_replay_frees_ends_where_it_does_not_run_too(rig: Rig, tape: int) -> None:
    rig.do(Batch((1, 11, 12, 20), (1.0,)))
    rig.do(Define(98, TapeSpec((97, -1), 1)), Replay(tape, (11,), (), (), (20, 12)), Replay(tape, (), (), (), (19,)))
    assert rig.do(Ask("filled", (11, 12, 20))) == [FilledSlots((11,))]


def test_a_view_is_never_laid_out_anew(rig: Rig) -> None:
    told = Strided("float64", (2, 2), (1, 2))
    rig.do(
        Define(5, KernelSpec("aten.view.default", (SlotArgument(0), Many((2, 2))), {}, 1, 0, (told,))),
        Batch((5, 11, 20)),
    )
    assert "view with strides [2, 1]" in failure_of(rig, 20).message


@pytest.mark.parametrize(
    "instruction",
    [
        Replay(1, (), ()), Replay(99, (), ()), Replay(51, (11,), (20,), (1.0,)), Replay(51, (11, 12), (20,)),
        Replay(51, (11, 12), (), (1.0,)), Replay(51, (11, 12), (20,), (1.0, 2.0)), Replay(51, (11, 11), (20,), (1.0,)),
        Replay(51, (11, 12), (12,), (1.0,)), Replay(51, (11, 12), (20, 20), (1.0,)), Replay(50, (11,), (20,)),
        Replay(51, (11, 98), (20,), (1.0,)),
        Define(60, KernelSpec("aten.add.Tensor", (SlotArgument(2), SlotArgument(1)), {}, 2, 0)),
        Define(60, KernelSpec("aten.add.Tensor", (SlotArgument(-1), SlotArgument(1)), {}, 2, 0)),
        Define(60, KernelSpec("aten.add.Tensor", (SlotArgument(0), SlotArgument(1)), {"alpha": Hole(0)}, 2, 0)),
        Define(60, KernelSpec("aten.add.Tensor", (SlotArgument(0), SlotArgument(1)), {"alpha": Hole(-1)}, 2, 1)),
        Define(60, KernelSpec("aten.cat.default", (Many((SlotArgument(0), SlotArgument(7))),), {}, 1, 0)),
        Define(60, KernelSpec("aten.add.Tensor", (SlotArgument(0), SlotArgument(1)), {}, -1, 0)),
        Define(60, KernelSpec("aten.add.Tensor", (SlotArgument(0), SlotArgument(1)), {}, 2, 0, (FOUR, FOUR))),
        Define(60, KernelSpec("aten.add.Tensor", (SlotArgument(0), SlotArgument(1)),
        {}, 2, 0, (Strided("float64", (4,), ()),))),
        Define(60, KernelSpec("aten.add.Tensor", (SlotArgument(0), SlotArgument(1)),
        {}, 2, 0, (Strided("object", (4,), (1,)),))),
        Define(60, KernelSpec("aten.add.Tensor", (SlotArgument(0), SlotArgument(1)),
        {}, 2, 0, (Strided("float64", (-4,), (1,)),))),
        *(
            Define(60, KernelSpec("aten.zero_.default", (SlotArgument(0),), {}, 1, 0, (None,), views))
            for views in (
                (FOUR, FOUR), (Strided("float64", (4,), ()),), (Strided("float64", (4,), (-1,)),),
                (Strided("float64", (-4,), (1,)),), (Strided("float64", (4,), (1,), -1),),
                (Strided("object", (4,), (1,)),),
            )
        ),
        Define(60, KernelSpec("aten.randn.generator", (Many((4,)),), {"generator": GeneratorArgument(99)}, 0, 0)),
        Define(60, KernelSpec("aten.randn.generator", (Many((4,)),), {"generator": GeneratorArgument(1)}, 0, 0)),
        Define(60, KernelSpec("aten.nothing.default", (), {}, 0, 0)),
        Define(60, KernelSpec("", (), {}, 10**12, 10**12)),
        Define(FREE, ADD), Define(60, GeneratorSpec(2**63 - 1)), Define(60, TapeSpec((99, -1), 1)),
        Define(60, TapeSpec((1, -1), 2, 1)), Define(60, TapeSpec((1,), 2, 1)), Define(60, TapeSpec((-1, -1, -2), 2)),
        Define(60, TapeSpec((1, -1, -3), 2, 1)), Define(60, TapeSpec((1, -1, 0), 2, 1)),
        Define(60, TapeSpec((1, -1, -2), 2, 0)), Define(60, TapeSpec((1, -1, -2), 2, 2)),
        Define(60, TapeSpec((1, -1, -2, FREE, 1), 2, 1)), Define(60, TapeSpec((FREE, -1, 1, -1, -2), 2, 1)),
        Define(60, TapeSpec((1, -1, -2, FREE, -1, 2, -1, -2), 2, 1)), Define(60, TapeSpec((1, -1, -2, FREE), 2, 1)),
        Define(60, TapeSpec((1, -1, -2, FREE, 0, FREE, 0), 2, 1)), Define(60, TapeSpec((FREE, -1), 2)),
        Define(60, TapeSpec((FREE,), 0)), Define(60, TapeSpec((), -1)), Define(60, TapeSpec((), 10**15)),
        Define(60, KernelSpec("aten.add.Tensor", (SlotArgument(0), SlotArgument(0)), {}, 2, 0)),
        Define(60, TapeSpec((), 0, 10**13)),
        Define(60, KernelSpec("aten.neg.default", (SlotArgument(0),), {}, 1, 10**13)),
        Define(60, TapeSpec((), 0, -3)), Define(60, TapeSpec((51,), 0)),
        Perform(ADD, (11, 12), (1.0,), 30), Perform(MUL_, (11,), (), 30), Perform(MUL_, (11, 98), (), 30),
        Perform(KernelSpec("aten.save.default", (SlotArgument(0), "x"), {}, 1, 0), (11,), (), 30),
        Perform(KernelSpec("aten.neg_.default", (SlotArgument(-2),), {}, 1, 0), (11,), (), 30),
        SetGenerator(98, 1), SetGenerator(1, 1), SetGenerator(0, None), SetGenerator(98, None),
        KeepGenerator(98, 30), KeepGenerator(1, 30), SetGenerator(0, None, 11),
    ],
)  # fmt: skip
def test_a_wrong_instruction_is_a_failure_and_the_machine_goes_on(rig: Rig, instruction: Any) -> None:
    rig.do(Define(51, TapeSpec((1, -1, -2), 2, 1)))
    before = rig.machine.store.used_bytes
    try:
        rig.do(instruction)
    except Poisoned:
        assert isinstance(instruction, Perform | Ask)
    if instruction == Define(60, GeneratorSpec(2**63 - 1)):
        assert rig.failures == []
        return
    assert rig.failures
    assert rig.failures[0].message
    assert rig.machine.store.used_bytes <= before
    rig.failures.clear()
    rig.put(b61=ONES)
    rig.do(Batch((1, 61, 61, 62), (1.0,)))
    assert torch.equal(rig.get(62), ONES * 2)
    assert rig.failures == []


def test_arguments_of_other_kinds_are_the_operators_own_business(rig: Rig) -> None:
    for number, kernel in enumerate(
        (
            KernelSpec("aten.neg.default", ("text",), {}, 0, 0, (FOUR,)),
            KernelSpec("aten.neg.default", (), {"nothing": 3}, 0, 0, (FOUR,)),
            KernelSpec("aten.neg.default", (Many((SlotArgument(0),)),), {}, 1, 0, (FOUR,)),
            KernelSpec("aten.add.Tensor", (SlotArgument(0), Complex(1.0, 2.0)), {}, 1, 0, (FOUR,)),
        ),
        70,
    ):
        rig.do(Define(number, kernel), Batch((number, *(11,) * kernel.inputs, 100 + number)))
        assert failure_of(rig, 100 + number).kind == "operator"


def test_a_fault_voids_what_all_calls_would_have_made() -> None:
    rig = Rig(faults=(Fault("error", "replay", 1), Fault("memory", "replay", 2)))
    rig.do(Define(1, ADD), Define(2, MUL_), Define(9, TapeSpec((2, -1, -2, 1, -1, -2, FREE, -2), 2, 1)))
    rig.put(b11=ONES, b12=ONES, b13=ONES, b14=ONES)
    rig.do(Batch((2, 11, 12, 1, 12, 12, 20, FREE, 12), (1.0,)))
    assert failure_of(rig, 20) == rig.failures[0]
    assert torch.equal(rig.get(11), ONES)
    assert "no buffer 12" in failure_of(rig, 12).message
    rig.failures.clear()
    rig.do(Replay(9, (13, 14), (21,), (1.0,)))
    assert [failure.kind for failure in rig.failures] == ["memory"]
    assert failure_of(rig, 21) == rig.failures[0]
    assert torch.equal(rig.get(13), ONES)
    assert "no buffer 14" in failure_of(rig, 14).message


def test_the_quota_names_the_operator() -> None:
    rig = Rig(quota_bytes=3 * 32)
    rig.do(Define(1, ADD))
    rig.put(b11=ONES, b12=ONES)
    rig.do(Batch((1, 11, 12, 20, 1, 11, 12, 21), (1.0, 1.0)))
    (failure,) = rig.failures
    assert (failure.kind, failure.operator) == ("memory", "aten.add.Tensor")
    assert "quota" in failure.message
    assert torch.equal(rig.get(20), ONES * 2)
    assert failure_of(rig, 21) == failure
    rig.do(Batch((FREE, 20, 1, 11, 12, 21), (1.0,)))
    assert torch.equal(rig.get(21), ONES * 2)


def test_what_grows_counts_against_the_quota() -> None:
    rig = Rig(quota_bytes=100)
    rig.put(b1=ONES)
    rig.do(Define(1, KernelSpec("aten.resize_.default", (SlotArgument(0), Many((20,))), {}, 1, 0)), Batch((1, 1)))
    assert [(failure.kind, failure.operator) for failure in rig.failures] == [("memory", "aten.resize_.default")]
    assert rig.used == 0


def test_what_cannot_grow_leaves_its_other_views_as_they_were() -> None:
    rig = Rig(quota_bytes=100)
    rig.put(b1=ONES)
    resize = KernelSpec("aten.resize_.default", (SlotArgument(0), Many((20,))), {}, 1, 0)
    rig.do(Define(1, resize), Define(5, VIEW), Batch((5, 1, 2, 1, 2)))
    assert [(failure.kind, failure.operator) for failure in rig.failures] == [("memory", "aten.resize_.default")]
    assert torch.equal(rig.get(1), ONES)
    assert rig.used == 32
    assert failure_of(rig, 2).kind == "memory"


def test_a_lack_of_memory_precedes_what_an_operator_writes() -> None:
    """It writes the statistics of a batch, and returns the normalised batch."""
    rig = Rig(quota_bytes=600)
    out = Strided("float64", (4, 8), (8, 1), 0, 256)
    small = Strided("float64", (8,), (1,), 0, 64)
    arguments = (SlotArgument(0), None, None, SlotArgument(1), SlotArgument(2), True, 0.5, 1e-5)
    rig.put(b1=torch.ones(4, 8, dtype=torch.float64), b2=torch.zeros(8, dtype=torch.float64), b3=ONES.repeat(2))
    rig.do(
        Define(1, KernelSpec("aten._native_batch_norm_legit.default", arguments, {}, 3, 0, (out, small, small))),
        Batch((1, 1, 2, 3, 20, 21, 22)),
    )
    assert [failure.kind for failure in rig.failures] == ["memory"]
    assert torch.equal(rig.get(2), torch.zeros(8, dtype=torch.float64))


# ---- a script's stream


def test_a_stream_stops_until_the_script_has_been_told(rig: Rig) -> None:
    def begin(message: int, told: int = 0) -> StreamHeader:
        return StreamHeader(1, message, told)

    double = Batch((1, 11, 11, 30), (1.0,))
    rig.put(b14=torch.ones(3, dtype=torch.float64))
    rig.do(begin(1), Batch((3, 11, 12, 20)), Batch((2, 11, 13)), double)
    (failure,) = rig.failures
    spec, frame = spec_of(ONES), bytes(to_frame(ONES))
    rig.do(begin(2), Batch((2, 11, 13)), Put((40,), (spec,)), KeepGenerator(0, 41), frames=[frame])
    rig.do(begin(3), SetGenerator(0, 7), Put((11,), (spec,)), frames=[bytes(to_frame(ONES * 5))])
    assert rig.failures == [failure]  # once
    assert failure_of(rig, 30) == failure_of(rig, 40) == failure_of(rig, 41) == failure_of(rig, 20) == failure
    with pytest.raises(Poisoned) as caught:
        rig.do(begin(4), Get((11,)))
    assert caught.value.failure == failure
    (memory,) = rig.do(begin(5), Ask("memory"))
    assert isinstance(memory, WorkerMemory)
    with pytest.raises(Poisoned):
        rig.do(begin(6), Perform(ADD, (11, 11), (1.0,), 50))
    assert torch.equal(rig.get(11), ONES)  # for others, and there is the same
    rig.do(begin(7, told=4), double)
    assert torch.equal(rig.get(30), ONES * 2)


def test_a_late_word_of_the_script_does_not_end_a_later_stop(rig: Rig) -> None:
    rig.do(StreamHeader(1, 5, 0), Batch((3, 11, 12, 20)))
    rig.do(StreamHeader(1, 6, 4), Batch((2, 11, 13)))
    rig.do(StreamHeader(1, 7, 5), Batch((3, 11, 12, 21)))
    rig.do(StreamHeader(1, 8, 6), Batch((1, 11, 11, 22), (1.0,)))
    assert len(rig.failures) == 2
    assert failure_of(rig, 22) == rig.failures[1]
    rig.do(StreamHeader(1, 9, 7), Batch((1, 11, 11, 22), (1.0,)))
    assert torch.equal(rig.get(22), ONES * 2)


def test_the_use_of_a_void_tensor_stops_the_stream_with_the_first_failure(rig: Rig) -> None:
    rig.do(Define(5, VIEW), StreamHeader(1, 1, 0), Batch((3, 11, 12, 20)))
    rig.do(StreamHeader(1, 2, 1), Batch((5, 20, 21, 1, 11, 11, 22), (1.0,)))  # a view reads nothing
    assert torch.equal(rig.get(22), ONES * 2)
    assert len(rig.failures) == 1
    rig.do(StreamHeader(1, 3, 1), Batch((2, 11, 20, 1, 11, 11, 23), (1.0,)))
    assert rig.failures[1] == rig.failures[0] == failure_of(rig, 23)
    assert torch.equal(rig.get(11), ONES)


def test_streams_of_two_scripts_stop_by_themselves(rig: Rig) -> None:
    rig.do(StreamHeader(100, 1), Batch((3, 11, 12, 20)))
    rig.do(StreamHeader(200, 1), Batch((1, 11, 11, 21), (1.0,)))
    assert torch.equal(rig.get(21), ONES * 2)
    rig.do(FreeRange(100, 200))
    rig.do(StreamHeader(100, 2), Batch((1, 11, 11, 22), (1.0,)))
    assert torch.equal(rig.get(22), ONES * 2)


def test_an_operator_that_is_answered_does_not_stop_the_stream(rig: Rig) -> None:
    with pytest.raises(Poisoned):
        rig.do(StreamHeader(1, 1), Perform(KernelSpec("aten.mm.default", MM.args, {}, 2, 0), (11, 12), (), 50))
    rig.do(StreamHeader(1, 2), Batch((1, 11, 11, 22), (1.0,)))
    assert torch.equal(rig.get(22), ONES * 2)


def test_a_program_that_fails_stops_the_stream(rig: Rig) -> None:
    rig.do(define(90, elementwise("aten.neg.default", spec_of(ONES))))
    rig.put(b14=torch.ones(3, dtype=torch.float64))
    used = rig.used
    rig.do(StreamHeader(1, 1), Call(90, (14,), (20,), (0,)), Call(90, (11,), (21,)), Call(90, (13,), (22,), (0,)))
    assert failure_of(rig, 20) == failure_of(rig, 21) == failure_of(rig, 22) == rig.failures[0]
    assert rig.used == used - 24 - 32  # what the calls were to take is freed
    rig.do(StreamHeader(1, 2, 1), Call(90, (11,), (21,)))
    assert torch.equal(rig.get(21), -ONES)
