"""The machine: instructions in order, failures that poison what depends on them, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onebox.graph import add_all
from onebox.wire import Many, Operator, Program, SlotArgument, TensorSpec, from_frame, spec_of, to_frame, with_deaths
from onebox.wire.protocol.groups import FormGroup, LeaveGroup, Reduced, Rendezvous, TicketCancelled
from onebox.wire.protocol.instructions import Ask, Call, Free, Get, OptimizerStep, Receive, Reduce, Send, Vote
from onebox.wire.protocol.requests import Define, FreeRange, OptimizerSpec, Put, Routine, Run, Shutdown
from onebox.wire.protocol.responses import Digest, OptimizerState, Scalars, WorkerMemory
from onebox.wire.protocol.snapshots import Fill, Read, Remembered, Snapshot, StateEntry, Take, Write
from onebox.worker.faults import Fault
from onebox.worker.memory.buffers import Poisoned
from onebox.worker.optimizer.host_parameters import HostParameters
from onebox.worker.optimizer.native import NativeOptimizer
from tests.unit.machines import Rig, define, elementwise

SPEC = TensorSpec("float64", (2, 2))
X = torch.tensor([[1.0, -2.0], [3.0, -4.0]], dtype=torch.float64)
RELU = elementwise("aten.relu.default", SPEC)
MM = elementwise("aten.mm.default", SPEC, 2)
THREE = TensorSpec("float64", (3, 3))


@pytest.fixture
def rig() -> Rig:
    """A machine with two programs, relu (100) and mm (101), and X in buffer 1."""
    rig = Rig()
    rig.do(define(100, RELU), define(101, MM))
    rig.put(b1=X)
    return rig


def failure_of(rig: Rig, number: int) -> Any:
    with pytest.raises(Poisoned) as caught:
        rig.get(number)
    return caught.value.failure


# ---- buffers


def test_what_is_put_can_be_got(rig: Rig) -> None:
    assert torch.equal(rig.get(1), X)
    assert rig.failures == []


def test_a_call_fills_its_outputs(rig: Rig) -> None:
    assert rig.do(Call(100, (1,), (2,)), Call(101, (2, 1), (3,))) == []
    assert torch.equal(rig.get(3), X.relu() @ X)


def test_a_call_may_write_over_its_inputs(rig: Rig) -> None:
    rig.do(Call(101, (1, 1), (1,)))
    assert torch.equal(rig.get(1), X @ X)


def test_what_a_call_takes_is_gone(rig: Rig) -> None:
    rig.do(Call(100, (1,), (2,), (0,)))
    assert failure_of(rig, 1).message == "there is no buffer 1"
    assert rig.used == X.nbytes


def test_free_passes_over_what_is_not_there(rig: Rig) -> None:
    rig.do(Free((1, 50, 51), (100, 200)), Free((1,), (100,)))
    assert rig.failures == []
    assert rig.used == 0


def test_an_answer_is_as_of_its_place_in_the_stream(rig: Rig) -> None:
    """An optimizer writes to its parameters in place; an answer before it in the same message must not change."""
    rig.put(b5=torch.ones(2, 2, dtype=torch.float64))
    rig.do(Define(7, OptimizerSpec("SGD", (((0,), {"lr": 1.0}),), (1,))))
    rig.do(Get((1,)), OptimizerStep(7, (5,)), Get((1,)))
    before, after = (from_frame(SPEC, bytes(frame)) for frame in rig.frames_out)
    assert torch.equal(before, X)
    assert torch.equal(after, X - 1)


def test_questions(rig: Rig) -> None:
    rig.put(b2=torch.tensor(2.5), b3=torch.tensor(True), b4=torch.tensor([7]))
    assert rig.do(Ask("scalars", (2, 3, 4))) == [Scalars((2.5, 1.0, 7.0))]
    assert rig.do(Ask("scalars", ())) == [Scalars(())]
    (memory,) = rig.do(Ask("memory"))
    assert memory == WorkerMemory(32 + 4 + 1 + 8, 45, 0)
    (one,), (again,) = rig.do(Ask("digest", (1, 2))), rig.do(Ask("digest", (1, 2)))
    assert isinstance(one, Digest)
    assert one == again
    rig.put(b2=torch.tensor(2.5000002))
    assert rig.do(Ask("digest", (1, 2))) != [one]


# ---- messages that are wrong


def test_a_missing_frame_voids_the_buffers(rig: Rig) -> None:
    rig.do(Put((2, 3), (SPEC, SPEC)), frames=[bytes(32)])
    assert [failure.kind for failure in rig.failures] == ["protocol"]
    assert "frame" in rig.failures[0].message
    assert failure_of(rig, 2) == failure_of(rig, 3) == rig.failures[0]


def test_after_a_failed_put_the_next_one_gets_its_own_frames(rig: Rig) -> None:
    wrong = TensorSpec("float64", (3,))
    other = torch.full((2, 2), 9.0, dtype=torch.float64)
    frames = [bytes(32), bytes(32), bytes(to_frame(other))]
    rig.do(Put((2, 3), (wrong, SPEC)), Put((4,), (SPEC,)), frames=frames)
    assert failure_of(rig, 2).kind == failure_of(rig, 3).kind == "protocol"
    assert torch.equal(rig.get(4), other)


@pytest.mark.parametrize(
    "instruction",
    [
        Put((2, 3), (SPEC,)),
        Put((2,), (SPEC, SPEC)),
        Put((2,), (TensorSpec("float64", (5,)),)),
        Put((2,), (TensorSpec("object", (2, 2)),)),
        Put((2,), (TensorSpec("float64", (-2, -2)),)),
        Call(99, (1,), (2,)),
        Call(100, (), (2,)),
        Call(100, (1, 1), (2,)),
        Call(100, (1,), (2, 3)),
        Call(100, (1,), (2,), (1,)),
        Call(100, (1,), (2,), (-5,)),
        Call(7, (1,), (2,)),
        OptimizerStep(99, (1,)),
        OptimizerStep(100, (1,)),
        Run(99),
        Run(100),
        Snapshot(1, (99,)),
        Snapshot(1, (1,), 99),
        Read(1, 0, 8),
        Fill((2,), (SPEC,), ((1, 0),)),
        Fill((2,), (SPEC,), ()),
        Write(1, 8, 8),
        Take(1, (8,), 5, 0),
        Receive(2, SPEC, 5, 0),
        Receive(2, TensorSpec("nn", (1,)), 5, 0),
        Reduce((1,), 5),
        Send(1, 5, 0),
        Define(50, Routine((Call(100, (-1,), (2,)),), 0)),
        Define(50, OptimizerSpec("SGD", (((0,), {"lr": 0.1}),), (99,))),
        Define(50, OptimizerSpec("SGD", (((3,), {"lr": 0.1}),), (1,))),
        Define(50, OptimizerSpec("SGD", (((0,), {"lr": 0.1}),), (1,), (StateEntry(7, "m", 1.0),))),
        Define(
            50, OptimizerSpec("SGD", (((0,), {"lr": 0.1}),), (1,), (StateEntry(0, "m", SPEC), StateEntry(0, "n", SPEC)))
        ),
        Define(50, OptimizerSpec("LBFGS", (((0,), {"lr": 0.1}),), (1,))),
        Define(50, OptimizerSpec("SGD", (((0,), {"speed": 0.1}),), (1,))),
        Rendezvous(1, (b"",)),
        Reduced(1),
        TicketCancelled(1),
        Shutdown(),
    ],
    ids=lambda instruction: type(instruction).__name__,
)
def test_a_wrong_instruction_is_one_failure_and_the_machine_goes_on(rig: Rig, instruction: Any) -> None:
    rig.do(define(7, RELU), Free((), (7,)))
    try:
        rig.do(instruction, frames=[bytes(32)])
    except Poisoned as error:
        assert isinstance(instruction, Snapshot | Read), "which are answered"
        assert error.failure == rig.failures[0]
    if isinstance(instruction, Define) and isinstance(instruction.what, Routine):
        rig.do(Run(50))
    assert rig.failures, "it has to be reported"
    assert rig.failures[0].message
    rig.failures.clear()
    rig.put(b60=X)
    rig.do(Call(100, (60,), (61,)))
    assert torch.equal(rig.get(61), X.relu())
    assert rig.failures == []


@pytest.mark.parametrize(
    "ask", [Ask("scalars", (1,)), Ask("digest", (99,)), Ask("optimizer", (99,)), Ask("optimizer", ())]
)
def test_a_question_that_has_no_answer_is_a_failure(rig: Rig, ask: Ask) -> None:
    with pytest.raises(Poisoned):
        rig.do(ask)


@pytest.mark.parametrize("reference", [-1, -2, -100])
@pytest.mark.parametrize(
    "make",
    [
        lambda r: Call(100, (r,), (2,)),
        lambda r: Call(100, (1,), (r,)),
        lambda r: Call(100, (r,), (2,), (0,)),
        lambda r: Free((r,)),
        lambda r: Reduce((r,), 1),
        lambda r: Ask("scalars", (r,)),
    ],
    ids=["input", "output", "taken", "freed", "reduced", "asked"],
)
def test_a_reference_beyond_the_bindings(rig: Rig, reference: int, make: Any) -> None:
    rig.do(Define(50, Routine((make(reference),), 0)))
    try:
        rig.do(Run(50))
    except Poisoned as error:
        assert isinstance(make(reference), Ask)
        rig.failures.append(error.failure)
    assert rig.failures[0].kind == "protocol"


# ---- failures


def test_the_first_failure_survives_to_the_last_reader(rig: Rig) -> None:
    rig.put(b2=torch.zeros(3, 3, dtype=torch.float64))
    uneven = with_deaths(Program((SPEC, THREE), (MM.operators[0],), (2,), 3))
    rig.do(define(102, uneven))
    rig.do(Call(102, (1, 2), (3,)), Call(100, (3,), (4,)), Call(100, (4,), (5,)), Call(100, (5,), (6,), (0,)))
    (first,) = rig.failures
    assert (first.kind, first.operator) == ("operator", "aten.mm.default")
    assert first.shapes == "float64[2, 2], float64[3, 3]"
    assert "mat1 and mat2" in first.message
    for number in (3, 4, 6):
        assert failure_of(rig, number) == first
    assert failure_of(rig, 5).message == "there is no buffer 5", "it was taken"
    assert torch.equal(rig.get(1), X), "what does not depend on it is as it was"


def test_a_program_that_was_refused_is_what_its_calls_tell_of(rig: Rig) -> None:
    bad = Program((SPEC,), (Operator("aten.relu_.default", (SlotArgument(0),), {}, (1,), (SPEC,)),), (1,), 2)
    rig.do(define(50, bad))
    rig.do(Call(50, (1,), (2,)), Call(100, (2,), (3,)))
    assert "allow-list" in rig.failures[0].message
    assert failure_of(rig, 3) == rig.failures[0]


def test_a_routine_over_an_optimizer_that_was_refused(rig: Rig) -> None:
    rig.do(
        Define(50, OptimizerSpec("LBFGS", (((0,), {"lr": 0.1}),), (1,))),
        Define(51, Routine((OptimizerStep(50, (1,)),), 0)),
    )
    rig.do(Run(51))
    assert "LBFGS" in rig.failures[0].message
    assert all(failure == rig.failures[0] for failure in rig.failures[1:])


def test_a_void_gradient_voids_the_parameters(rig: Rig) -> None:
    rig.do(Define(7, OptimizerSpec("SGD", (((0,), {"lr": 1.0}),), (1,))))
    rig.do(Call(101, (1, 99), (5,)))
    rig.do(OptimizerStep(7, (5,)))
    assert failure_of(rig, 1).message == "there is no buffer 99"


def test_a_void_buffer_can_be_filled_again(rig: Rig) -> None:
    rig.do(Call(99, (1,), (2,)))
    rig.put(b2=X)
    assert torch.equal(rig.get(2), X)


def test_a_buffer_that_does_not_fit_is_said_to(rig: Rig) -> None:
    rig.put(b2=torch.zeros(3, 3, dtype=torch.float64))
    rig.do(Call(101, (1, 2), (3,)))
    (failure,) = rig.failures
    assert (failure.kind, failure.operator) == ("protocol", "call")
    assert "input 1 of the program is float64[2, 2], but its buffer holds float64[3, 3]" in failure.message
    assert failure_of(rig, 3) == failure


def test_what_a_failed_call_would_have_taken_is_gone(rig: Rig) -> None:
    rig.put(b2=torch.zeros(3, 3, dtype=torch.float64))
    rig.do(Call(101, (1, 2), (3,), (0, 1)))
    assert rig.used == 0
    rig.put(b1=X)
    rig.do(Call(101, (1, 3), (4,), (0,)))
    assert rig.used == 0, "also when an input was void"


def test_the_quota_names_the_operator_that_needs_the_most() -> None:
    rig = Rig(quota_bytes=100)
    wide = TensorSpec("float64", (4, 4))
    double = Operator(
        "aten.cat.default",
        (Many((SlotArgument(0), SlotArgument(0))), 0),
        {},
        (1,),
        (TensorSpec("float64", (4, 2)),),
        (0,),
    )
    widen = Operator("aten.cat.default", (Many((SlotArgument(1), SlotArgument(1))), 1), {}, (2,), (wide,), (1,))
    first = Operator("aten.relu.default", (SlotArgument(2),), {}, (3,), (wide,), (2,))
    rig.put(b1=X)
    rig.do(define(50, Program((SPEC,), (double, widen, first), (3,), 4)), Call(50, (1,), (2,)))
    (failure,) = rig.failures
    assert (failure.kind, failure.operator) == ("memory", "aten.relu.default")
    assert "the quota is 100" in failure.message
    assert failure_of(rig, 2) == failure
    assert rig.used == 32
    assert rig.machine.store.peak_bytes == 32, "nothing was computed"


def test_the_quota_counts_buffers_and_optimizer_state() -> None:
    rig = Rig(quota_bytes=32 + 32 + 32 + 32)
    rig.put(b1=X, b2=X)
    rig.do(Define(7, OptimizerSpec("SGD", (((0,), {"lr": 1.0, "momentum": 0.9}),), (1,))), OptimizerStep(7, (2,)))
    assert rig.used == 96
    rig.put(b3=X)
    assert rig.failures == []
    rig.put(b4=X)
    assert [failure.kind for failure in rig.failures] == ["memory"]
    rig.do(Free((), (7,)))
    assert rig.used == 96
    rig.put(b4=X)
    assert torch.equal(rig.get(4), X)


@pytest.mark.parametrize("when", ["defined", "stepped"])
def test_optimizer_state_over_the_quota_is_a_failure_and_returns_its_bytes(when: str) -> None:
    rig = Rig(quota_bytes=100)
    rig.put(b1=X, b2=X)
    state = (StateEntry(0, "exp_avg", SPEC), StateEntry(0, "exp_avg_sq", SPEC)) if when == "defined" else ()
    adam = OptimizerSpec("Adam", (((0,), {"lr": 0.1}),), (1,), state)
    rig.do(Define(7, adam), OptimizerStep(7, (2,)), frames=[bytes(32)] * len(state))
    assert {failure.kind for failure in rig.failures} == {"memory"}
    if when == "stepped":
        assert failure_of(rig, 1) == rig.failures[0]
    rig.do(Free((1, 2), (7,)))
    assert rig.used == 0


def test_memory_is_accounted_for_to_the_last_byte(rig: Rig) -> None:
    adam = OptimizerSpec("Adam", (((0,), {"lr": 0.1}),), (1,))
    rig.put(b2=X)
    rig.do(Define(7, adam), OptimizerStep(7, (2,)), Call(100, (1,), (3,)), Call(100, (3,), (4,)))
    rig.do(Define(7, adam), OptimizerStep(7, (2,)))  # defined again: the old state is gone
    assert rig.used == 4 * 32 + 2 * 32 + 4
    rig.do(Define(7, Routine((), 0)))
    assert rig.used == 4 * 32
    rig.do(Free((1, 2, 3, 4), (7, 100, 101)))
    assert rig.used == 0
    assert len(rig.machine.store) == 0


def test_out_of_memory_is_told_apart(rig: Rig) -> None:
    huge = TensorSpec("float64", (2**45,))
    zeros = Operator("aten.zeros.default", (Many((2**45,)),), {}, (0,), (huge,))
    rig.do(define(50, Program((), (zeros,), (0,), 1)), Call(50, (), (2,)))
    assert [failure.kind for failure in rig.failures] == ["memory"]
    assert rig.failures[0].operator == "aten.zeros.default"


# ---- definitions and routines


def test_defining_again_replaces(rig: Rig) -> None:
    rig.do(define(100, elementwise("aten.neg.default", SPEC)), Call(100, (1,), (2,)))
    assert torch.equal(rig.get(2), -X)


def test_a_routine_runs_with_its_bindings(rig: Rig) -> None:
    rig.do(Define(50, Routine((Call(100, (-1,), (-2,)), Free((-1,)), Ask("scalars", (-3,))), 3)))
    rig.put(b2=X, b4=torch.tensor(5.0))
    assert rig.do(Run(50, (2, 3, 4))) == [Scalars((5.0,))]
    assert torch.equal(rig.get(3), X.relu())
    assert failure_of(rig, 2).message == "there is no buffer 2"


def test_a_routine_with_too_few_bindings_runs_nothing(rig: Rig) -> None:
    rig.do(Define(50, Routine((Free((1,)), Free((-1,))), 2)))
    rig.do(Run(50, (3,)))
    assert rig.failures[0].kind == "protocol"
    assert torch.equal(rig.get(1), X)


def test_a_routine_goes_on_behind_a_failure_and_answers_nothing_that_is_void(rig: Rig) -> None:
    rig.do(Define(50, Routine((Call(99, (1,), (2,)), Call(100, (1,), (3,)), Ask("scalars", (2,)), Free((1,))), 0)))
    with pytest.raises(Poisoned):
        rig.do(Run(50))
    assert torch.equal(rig.get(3), X.relu())
    assert rig.used == X.nbytes, "what it frees is freed"


def test_a_traced_run_times_each_instruction(rig: Rig) -> None:
    rig.do(Define(50, Routine((Call(100, (1,), (2,)), Call(100, (2,), (3,)), Free((3,))), 0)))
    rig.do(Run(50, trace=True))
    times = rig.times_ns
    assert len(times) == 6
    assert list(times) == sorted(times)
    rig.do(Run(50))
    assert rig.times_ns == ()


def test_traced_runs_of_one_message_follow_each_other_in_its_times(rig: Rig) -> None:
    rig.do(Define(50, Routine((Call(100, (1,), (2,)), Free((2,))), 0)))
    rig.do(Run(50, trace=True), Run(50, trace=True))
    assert len(rig.times_ns) == 8 and list(rig.times_ns) == sorted(rig.times_ns)
    assert len(rig.used_bytes) == 8


def test_a_traced_run_tells_what_each_instruction_has_in_use(rig: Rig) -> None:
    rig.do(Define(50, Routine((Call(100, (1,), (2,)), Call(100, (2,), (3,), (0,)), Free((1, 3))), 0)))
    rig.machine.store.reserve(5 * X.nbytes)
    before = rig.machine.store.peak_bytes
    rig.do(Run(50, trace=True))
    size = X.nbytes
    assert rig.used_bytes == (2 * size, 2 * size, 3 * size, 2 * size, 2 * size, 0)
    assert rig.machine.store.peak_bytes == before, "the peak of all times is not touched"
    rig.do(Run(50))
    assert rig.used_bytes == ()


def test_random_operators_depend_on_seed_step_and_micro_batch_and_on_nothing_else(rig: Rig) -> None:
    wide = TensorSpec("float64", (50,))
    draw = [Operator("aten.bernoulli.p", (SlotArgument(0), 0.5), {}, (n + 1,), (wide,), (), n) for n in range(2)]
    rig.do(define(50, Program((wide,), tuple(draw), (1, 2), 3)))
    rig.do(Define(51, Routine((Call(50, (1,), (2, 3), (), 0), Call(50, (1,), (4, 5), (), 1)), 0)))
    rig.put(b1=torch.zeros(50, dtype=torch.float64))

    def drawn(**where: int) -> list[list[float]]:
        torch.rand(3)  # somebody else draws too
        rig.do(Run(51, **where))
        return [rig.get(number).tolist() for number in (2, 3, 4, 5)]

    one = drawn(step=3, seed=1)
    assert len({tuple(values) for values in one}) == 4, "position and micro-batch count"
    assert drawn(step=3, seed=1) == one
    for other in (drawn(step=4, seed=1), drawn(step=3, seed=2), drawn(step=2**40, seed=-1)):
        assert all(a != b for a, b in zip(one, other, strict=True))


# ---- optimizers


def test_an_optimizer_steps_in_place_and_tells_its_state(rig: Rig) -> None:
    gradient = torch.full((2, 2), 0.5, dtype=torch.float64)
    expected = torch.nn.Parameter(X.clone())
    reference = torch.optim.Adam([expected], lr=0.1)
    rig.put(b2=gradient)
    rig.do(Define(7, OptimizerSpec("Adam", (((0,), {"lr": 0.1}),), (1,))))
    for _ in range(3):
        rig.do(OptimizerStep(7, (2,)))
        expected.grad = gradient.clone()
        reference.step()
    torch.testing.assert_close(rig.get(1), expected.detach(), rtol=0, atol=1e-15)
    (state,) = rig.do(Ask("optimizer", (7,)))
    assert isinstance(state, OptimizerState)
    assert [(entry.key, entry.value) for entry in state.entries] == [
        ("exp_avg", SPEC),
        ("exp_avg_sq", SPEC),
        ("step", TensorSpec("float32", ())),
    ]
    frames = [bytes(frame) for frame in rig.frames_out]
    assert from_frame(TensorSpec("float32", ()), frames[2]) == 3.0

    other = Rig()
    other.put(b1=rig.get(1), b2=gradient)
    other.do(Define(7, OptimizerSpec("Adam", (((0,), {"lr": 0.1}),), (1,), state.entries)), frames=frames)
    for each in (rig, other):
        each.do(OptimizerStep(7, (2,)))
    assert torch.equal(rig.get(1), other.get(1)), "an optimizer goes on from its state, bit for bit"


@pytest.mark.parametrize("host", [False, True])
def test_an_optimizer_goes_on_from_what_is_put_where_its_parameter_lies(
    host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With copies on the host as on a GPU, but for the GPU."""
    if host:
        monkeypatch.setattr(
            NativeOptimizer, "_copies", lambda own, parameters: HostParameters(parameters, own._accelerator)
        )
    rig = Rig()
    rig.put(b1=X, b2=torch.ones(2, 2, dtype=torch.float64))
    rig.do(Define(7, OptimizerSpec("SGD", (((0,), {"lr": 1.0, "momentum": 0.5}),), (1,), host=host)))
    rig.do(OptimizerStep(7, (2,)))
    rig.do(Put((1,), (SPEC,), there=True), frames=[bytes(to_frame(10 * X))])
    assert torch.equal(rig.get(1), 10 * X)
    rig.do(OptimizerStep(7, (2,)))
    assert torch.equal(rig.get(1), 10 * X - 1.5), "and it has its momentum"
    rig.do(Put((1,), (THREE,), there=True), frames=[bytes(72)])
    assert "float64[3, 3] for buffer 1 of float64[2, 2]" in failure_of(rig, 1).message


def test_rows_are_answered(rig: Rig) -> None:
    rig.do(Define(7, OptimizerSpec("SGD", (((0,), {"lr": 1.0, "momentum": 0.5}),), (1,))))
    rig.put(b2=torch.arange(4, dtype=torch.float64).view(2, 2))
    rig.do(OptimizerStep(7, (2,)))
    asks = Get((2,), 1, 1), Remembered(7, 0, "momentum_buffer"), Remembered(7, 0, "momentum_buffer", 0, 1)
    found = rig.do(*asks)
    assert [each.specs for each in found] == [
        (TensorSpec("float64", (1, 2)),),
        (SPEC,),
        (TensorSpec("float64", (1, 2)),),
    ]
    values = [from_frame(each.specs[0], bytes(f)) for each, f in zip(found, rig.frames_out, strict=True)]
    assert [value.flatten().tolist() for value in values] == [[2, 3], [0, 1, 2, 3], [0, 1]]


@pytest.mark.parametrize(
    "ask",
    [
        Get((1,), 1, 2),
        Get((1,), -1, 1),
        Get((1,), 0, -1),
        Remembered(7, 0, "exp_avg"),
        Remembered(7, 1, "momentum_buffer"),
        Remembered(7, 0, "momentum_buffer", 2, 1),
        Remembered(8, 0, "momentum_buffer"),
    ],
)
def test_what_is_not_there_is_not_answered(rig: Rig, ask: Get | Remembered) -> None:
    rig.do(Define(7, OptimizerSpec("SGD", (((0,), {"lr": 1.0, "momentum": 0.5}),), (1,))))
    rig.put(b2=X)
    rig.do(OptimizerStep(7, (2,)))
    with pytest.raises(Poisoned):
        rig.do(ask)


def test_clipping_answers_with_the_norm_and_scales_all_gradients(rig: Rig) -> None:
    rig.put(b2=X, b3=torch.full((2, 2), 3.0, dtype=torch.float64), b4=torch.full((2, 2), 4.0, dtype=torch.float64))
    rig.do(Define(7, OptimizerSpec("SGD", (((0, 1), {"lr": 1.0}),), (1, 2))))
    (answer,) = rig.do(OptimizerStep(7, (3, 4), 5.0))
    assert answer == Scalars((10.0,))
    torch.testing.assert_close(rig.get(1), X - 1.5, rtol=1e-6, atol=0)
    torch.testing.assert_close(rig.get(2), X - 2.0, rtol=1e-6, atol=0)
    assert rig.get(3)[0, 0] == 3.0, "the gradients themselves stay"
    (answer,) = rig.do(OptimizerStep(7, (3, 4), 100.0))
    torch.testing.assert_close(rig.get(1), X - 4.5, rtol=1e-6, atol=0)


def test_options_come_with_a_run_and_stay(rig: Rig) -> None:
    rig.put(b2=torch.ones(2, 2, dtype=torch.float64))
    rig.do(
        Define(7, OptimizerSpec("SGD", (((0,), {"lr": 1.0}),), (1,))), Define(50, Routine((OptimizerStep(7, (2,)),), 0))
    )
    rig.do(Run(50), Run(50, options=({"lr": 0.25},)), Run(50))
    assert torch.equal(rig.get(1), X - 1.5)
    rig.do(Run(50, options=({"lr": 0.25}, {"lr": 0.5})))
    assert rig.failures[0].kind == "protocol"


# ---- groups and faults


def test_a_worker_that_cannot_contribute_leaves_its_group(rig: Rig) -> None:
    rig.do(FormGroup(5, 0, 2, "client", "127.0.0.1", 1.0))
    rig.do(Call(99, (1,), (2,)), Reduce((2,), 5))
    assert [type(saying).__name__ for saying in rig.said] == ["Left"]
    assert rig.said[0].group == 5


def test_after_it_has_left_everything_tells_of_the_first_failure(rig: Rig) -> None:
    """Also gradients that it could compute: a question about any of them is answered with what went wrong first."""
    rig.do(FormGroup(5, 0, 2, "client", "127.0.0.1", 1.0))
    rig.do(Call(99, (1,), (2,)), Reduce((2,), 5), Reduce((1,), 5))
    assert failure_of(rig, 1) == failure_of(rig, 2) == rig.failures[0]


def test_a_sum_that_does_not_come_is_a_lost_peer(rig: Rig) -> None:
    rig.do(FormGroup(5, 0, 2, "client", "127.0.0.1", 1.0), Reduce((1,), 5))
    assert rig.failures == []
    with pytest.raises(Poisoned) as caught:
        rig.get(1)
    assert caught.value.failure.kind == "peer"


def test_leaving_a_group_twice_is_no_failure(rig: Rig) -> None:
    rig.do(FormGroup(5, 0, 2, "client", "127.0.0.1", 1.0), LeaveGroup(5), LeaveGroup(5), LeaveGroup(6))
    assert rig.failures == []
    rig.do(Reduce((1,), 5))
    assert rig.failures[0].kind == "peer"


@pytest.mark.parametrize(("kind", "reported"), [("error", "operator"), ("memory", "memory")])
def test_a_fault_comes_with_its_instruction_and_no_other(kind: Any, reported: str) -> None:
    rig = Rig(faults=(Fault(kind, "call", 2),))
    rig.do(define(100, RELU))
    rig.put(b1=X)
    rig.do(Call(100, (1,), (2,)), Call(100, (1,), (3,)), Call(100, (1,), (4,)))
    assert [failure.kind for failure in rig.failures] == [reported]
    assert torch.equal(rig.get(2), rig.get(4))
    assert failure_of(rig, 3) == rig.failures[0]


def test_progress_counts_and_says_what_it_is_at(rig: Rig) -> None:
    before = rig.machine.progress.executed
    rig.do(Call(100, (1,), (2,)))
    assert rig.machine.progress.executed - before == 2, "the instruction and its operator"
    assert rig.machine.progress.doing == "call"


def test_adding_up_takes_no_more_memory_than_the_sum(rig: Rig) -> None:
    rig.put(b2=X)
    rig.do(define(50, add_all([spec_of(X)])), Call(50, (1, 2), (1,), (0, 1)))
    assert torch.equal(rig.get(1), 2 * X)
    assert rig.machine.store.peak_bytes == 3 * 32


# ---- what a client process leaves


def test_the_buffers_and_definitions_of_a_range_are_freed(rig: Rig) -> None:
    """Also those that are void; all others stay."""
    rig.put(b1000=X, b1001=X, b2000=X)
    rig.do(define(1100, RELU), define(2100, RELU), Call(1100, (1000,), (1002,)), Call(100, (77,), (1003,)))
    assert len(rig.failures) == 1
    rig.do(FreeRange(1000, 2000))
    assert len(rig.failures) == 1
    assert rig.used == 2 * X.nbytes
    assert torch.equal(rig.get(1), X) and torch.equal(rig.get(2000), X)
    assert [failure_of(rig, number).message for number in (1000, 1002, 1003)] == [
        f"there is no buffer {number}" for number in (1000, 1002, 1003)
    ]
    rig.do(Call(2100, (2000,), (2001,)), Call(1100, (2000,), (2002,)))
    assert torch.equal(rig.get(2001), X.relu())
    assert "1100" in failure_of(rig, 2002).message


def test_a_range_in_which_nothing_is_can_be_freed(rig: Rig) -> None:
    rig.do(FreeRange(1000, 2000), FreeRange(5, 5))
    assert rig.failures == [] and torch.equal(rig.get(1), X)


@pytest.mark.parametrize(
    "step",
    [Call(100, (1,), (2,), age=-1), Reduce((1,), 1, age=-4), Send(1, 1, 0, age=-1), Receive(2, SPEC, 1, 0, age=-1)],
)
def test_a_routine_is_of_this_step_or_earlier_ones(rig: Rig, step: Call | Reduce | Send | Receive) -> None:
    rig.do(Define(50, Routine((step,), 0)))
    assert "an age below 0" in rig.failures[-1].message


def test_a_void_run_computes_nothing(rig: Rig) -> None:
    """Stand-ins take the place of what its calls would return, and its vote is an objection."""
    rig.do(Define(50, Routine((Call(100, (1,), (2,)), Vote(7)), 0, optimizer=7)))
    rig.do(Run(50, step=3))
    assert torch.equal(rig.get(2), X.relu())
    rig.do(Run(50, step=4, void=True))
    assert rig.get(2).isnan().all()
    assert rig.failures == []
