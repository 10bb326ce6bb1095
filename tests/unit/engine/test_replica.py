"""Lowering: the routines of the replicas of one step, looked at as data."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from onebox.engine.buckets import bucket_ends, gradient_buckets
from onebox.engine.replica import Numbers, ReplicaLowering, Share, StepRoutine
from onebox.graph import ModelPrograms, NamedProgram, Port, capture, model_programs
from onebox.plan import Plan
from onebox.wire import Operator, Program, Slot, TensorSpec, with_deaths
from onebox.wire.messages import (
    Ask,
    Call,
    Free,
    OptimizerStep,
    Reduce,
    Routine,
    Step,
    StoredProgram,
    references,
)


@pytest.fixture(scope="module")
def model() -> ModelPrograms:
    made = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    return model_programs(capture(made, functional.mse_loss, (torch.zeros(2, 4), torch.zeros(2, 3))), backward=True)


STATE = {
    **{
        f"model.{layer}.{kind}": 10 * layer + place
        for layer in (0, 1, 3, 5)
        for place, kind in enumerate(("weight", "bias"))
    },
    "model.1.running_mean": 90,
    "model.1.running_var": 91,
    "model.1.num_batches_tracked": 92,
}
OPTIMIZER, GROUP = 99, 98


def lower(model: ModelPrograms, plan: Plan, batch: int, *, size_bytes: int = 1 << 20) -> list[StepRoutine]:
    """Return the routine of each replica."""
    assert model.backward is not None
    numbers = Numbers(state=STATE, optimizer=OPTIMIZER, group=GROUP, new=itertools.count(1000).__next__)
    buckets = gradient_buckets(model.backward, size_bytes)
    trained = [str(port.name) for port in model.backward.outputs]
    dealt = plan.micro_batches(batch)
    total = sum(map(len, dealt))
    routines = []
    for share in dealt:
        lowering = ReplicaLowering(
            numbers, trained=trained, buckets=buckets, max_norm=0.0, replicated=len(plan.devices) > 1
        )
        after = total - 1 - share[-1].index if share else total
        made = Share(micro_batches=share, after=after, total=total, batch=batch)
        routines.append(lowering.lower(made, {2: model}, {2: {}}, model, 2))
    return routines


def plan(workers: int, micro_batch: int = 2) -> Plan:
    return Plan(devices=tuple(range(workers)), shares=(1.0,) * workers, micro_batch=micro_batch, sync="workers")


def routine(made: StepRoutine) -> Routine:
    last = made.definitions[-1]
    assert last.number == made.number
    assert isinstance(last.what, Routine)
    return last.what


def steps(made: StepRoutine, kind: Any) -> list[Any]:
    return [step for step in routine(made).steps if isinstance(step, kind)]


def flow(made: StepRoutine) -> tuple[set[int], set[int]]:
    """Follow the buffers of a routine; return what must be there before and what is there afterwards."""
    before: set[int] = set()
    there: set[int] = set()

    def need(numbers: Any) -> None:
        before.update(number for number in numbers if number not in there)
        there.update(numbers)

    for step in routine(made).steps:
        match step:
            case Call():
                need(step.inputs)
                there.difference_update(step.inputs[position] for position in step.takes)
                there.update(step.outputs)
            case Free():
                there.difference_update(step.buffers)
            case Reduce() | Ask():
                need(step.buffers)
            case OptimizerStep():
                need(step.gradients)
    return before, there


@pytest.mark.parametrize("size_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("batch", [2, 4, 8, 10])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_routine_needs_only_what_is_there_and_leaves_only_what_was(
    workers: int, batch: int, size_bytes: int, model: ModelPrograms
) -> None:
    for made in lower(model, plan(workers), batch, size_bytes=size_bytes):
        before, after = flow(made)
        bindings = {number for number in before if number < 0}
        assert before - bindings - set(made.weights) <= set(STATE.values())
        assert all(-routine(made).bindings <= number for number in bindings)
        lasting = set(STATE.values()) | set(made.weights)
        losses = {number for step in steps(made, Ask) for number in step.buffers}
        assert after - lasting <= losses, "beside the losses nothing stays"


@pytest.mark.parametrize("size_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("batch", [2, 4, 10])
@pytest.mark.parametrize("workers", [2, 3])
def test_all_replicas_reduce_the_same_in_the_same_order(
    workers: int, batch: int, size_bytes: int, model: ModelPrograms
) -> None:
    """Sums are told apart by their order alone: a replica that leaves one out would hang or ruin all others."""
    made = lower(model, plan(workers), batch, size_bytes=size_bytes)
    shapes = [[len(step.buffers) for step in steps(each, Reduce)] for each in made]
    assert all(shape == shapes[0] for shape in shapes)
    assert sum(shapes[0]) == 8 + 2, "all gradients, and the running statistics"
    assert {step.group for each in made for step in steps(each, Reduce)} == {GROUP}


def test_one_replica_reduces_nothing(model: ModelPrograms) -> None:
    (made,) = lower(model, plan(1), 8)
    assert steps(made, Reduce) == []


def test_weights_of_the_losses_add_up_to_one(model: ModelPrograms) -> None:
    for workers, batch in itertools.product((1, 2, 3), (2, 4, 10)):
        made = lower(model, plan(workers), batch)
        assert sum(weight for each in made for weight in each.losses) == pytest.approx(1.0)
        for each in made:
            assert [weight for weight, _ in each.weights.values()] == list(each.losses)
            assert all(spec == TensorSpec("float32", ()) for _, spec in each.weights.values())


def test_reduction_starts_while_backward_is_running(model: ModelPrograms) -> None:
    one, _ = lower(model, plan(2), 8, size_bytes=100)
    kinds = [type(step) for step in routine(one).steps]
    first = kinds.index(Reduce)
    assert Call in kinds[first : len(kinds) - kinds[::-1].index(Reduce)], "calls between the first and the last"
    assert "backward 1 part 0" in one.labels[:first]
    assert "backward 1 part 1" in one.labels[first:]
    assert not any(label.startswith("backward 0 part") for label in one.labels), "of the last micro-batch only"


def test_labels_are_one_for_each_instruction(model: ModelPrograms) -> None:
    for made in lower(model, plan(3), 10):
        assert len(made.labels) == len(routine(made).steps)


def test_programs_are_stored_once(model: ModelPrograms) -> None:
    (made,) = lower(model, plan(1), 12)
    programs = [define for define in made.definitions if isinstance(define.what, StoredProgram)]
    assert len(steps(made, Call)) > len(programs)
    forward = [step.program for step in steps(made, Call) if step.micro_batch == 1]
    assert forward[0] in {step.program for step in steps(made, Call) if step.micro_batch == 0}
    defined = {define.number for define in programs}
    assert {step.program for step in steps(made, Call)} == defined


def test_the_optimizer_steps_once_behind_all_gradients(model: ModelPrograms) -> None:
    for made in lower(model, plan(2), 8):
        (step,) = steps(made, OptimizerStep)
        behind = routine(made).steps[routine(made).steps.index(step) + 1 :]
        assert not any(isinstance(other, Call | Reduce) for other in behind)
        assert step.optimizer == OPTIMIZER
        assert len(set(step.gradients)) == 8


def test_references_are_all_named(model: ModelPrograms) -> None:
    """What decides whether a routine is refused must know every kind of instruction."""
    kinds: set[type[Step]] = set()
    for made in lower(model, plan(2), 8):
        for step in routine(made).steps:
            kinds.add(type(step))
            numbers = {value for name in step.__struct_fields__ for value in _ints(getattr(step, name)) if value < 0}
            assert numbers <= set(references(step))
    assert {Call, Free, Reduce, Ask, OptimizerStep} <= kinds


def _ints(value: Any) -> list[int]:
    return (
        [value]
        if isinstance(value, int)
        else [v for v in value if isinstance(v, int)]
        if isinstance(value, tuple)
        else []
    )


# ---- buckets


def backward_of(*made: tuple[str, str, int]) -> NamedProgram:
    """Return a backward program that makes gradients of (name, type, elements), one operator each."""
    spec = TensorSpec("float32", (1,))
    operators = [
        Operator("aten.relu.default", (Slot(0),), {}, (number + 1,), (TensorSpec(dtype, (size,)),))
        for number, (_, dtype, size) in enumerate(made)
    ]
    outputs = tuple(range(len(made), 0, -1))  # in another order than they are made
    ports = tuple(Port("gradient", made[slot - 1][0]) for slot in outputs)
    program = with_deaths(Program((spec,), tuple(operators), outputs, len(made) + 1))
    return NamedProgram(program=program, inputs=(Port("weight", 0),), outputs=ports)


def test_buckets_are_in_the_order_of_the_gradients_and_full() -> None:
    backward = backward_of(("a", "float32", 10), ("b", "float32", 30), ("c", "float32", 5), ("d", "float32", 100))
    assert gradient_buckets(backward, 100) == [["a", "b"], ["c", "d"]]
    assert gradient_buckets(backward, 1) == [["a"], ["b"], ["c"], ["d"]]
    assert gradient_buckets(backward, 10_000) == [["a", "b", "c", "d"]]
    assert bucket_ends(backward, [["a", "b"], ["c", "d"]]) == [1]
    assert bucket_ends(backward, [["a", "b", "c", "d"]]) == []


def test_a_bucket_has_one_type() -> None:
    backward = backward_of(("a", "float32", 1), ("b", "float64", 1), ("c", "float64", 1), ("d", "float32", 1))
    assert gradient_buckets(backward, 1000) == [["a"], ["b", "c"], ["d"]]


def test_buckets_that_cannot_be_told_apart_are_not_cut() -> None:
    backward = backward_of(("a", "float32", 1), ("b", "float32", 1), ("c", "float32", 1))
    assert bucket_ends(backward, [["c"], ["a"], ["b"]]) == [], "the first is complete with the last operator"
