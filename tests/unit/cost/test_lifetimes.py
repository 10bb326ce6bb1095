"""Memory from lifetimes: what is predicted is what a run of the tape takes, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from onebox.cost import Footprint, alive_at, footprint, owners
from onebox.errors import WireError
from onebox.wire import (
    RECURRENT,
    RECURRENT_BACKWARD,
    RECURRENT_KINDS,
    Many,
    Operator,
    Program,
    SlotArgument,
    TensorSpec,
    spec_of,
    with_deaths,
)
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.progress import WorkerProgress
from tests.unit.programs import CPU, Meter, Sample, samples


@given(samples(), st.data())
def test_a_run_takes_what_was_predicted(sample: Sample, data: st.DataObject) -> None:
    program = sample.program
    takes = data.draw(st.sets(st.integers(0, len(program.inputs) - 1)))
    tape = CompiledProgram(program, CPU)
    given_ = [tensor.clone() for tensor in sample.inputs]
    kept = [tensor for number, tensor in enumerate(given_) if number not in takes]
    with Meter(given_) as meter:
        outputs = tape.run(given_, lambda position: None, WorkerProgress())
        after = meter.now()
    predicted = footprint(program, takes)
    assert predicted.peak_bytes == meter.peak_bytes - meter.base_bytes
    assert predicted.net_bytes == after - meter.base_bytes
    del outputs, kept


@given(samples())
def test_the_peak_is_where_it_is_said_to_be(sample: Sample) -> None:
    whole = footprint(sample.program)
    before = Program(
        sample.program.inputs,
        sample.program.operators[: whole.peak_operator],
        sample.program.outputs,
        sample.program.slots,
    )
    if whole.peak_bytes:
        assert footprint(before).peak_bytes < whole.peak_bytes


@given(samples(), st.data())
def test_what_is_there_at_the_peak_adds_up_to_it(sample: Sample, data: st.DataObject) -> None:
    program = sample.program
    takes = data.draw(st.sets(st.integers(0, len(program.inputs) - 1)))
    whole = footprint(program, takes)
    if whole.peak_bytes:
        there = alive_at(program, whole.peak_operator, takes)
        operator = program.operators[whole.peak_operator]
        unread = [s for slot, s in zip(operator.outs, operator.specs, strict=True) if slot is None and s is not None]
        given_ = sum(spec.size_bytes for spec in program.inputs)
        assert sum(there.values()) + sum(s.size_bytes for s in unread) == given_ + whole.peak_bytes


@given(samples())
def test_giving_inputs_away_never_costs_more(sample: Sample) -> None:
    kept = footprint(sample.program)
    taken = footprint(sample.program, range(len(sample.program.inputs)))
    assert taken.peak_bytes <= kept.peak_bytes
    assert taken.net_bytes <= kept.net_bytes


SPEC = TensorSpec("float32", (100,))


def relu(source: int, target: int) -> Operator:
    return Operator("aten.relu.default", (SlotArgument(source),), {}, (target,), (SPEC,))


def view(source: int, target: int) -> Operator:
    return Operator(
        "aten.unsqueeze.default", (SlotArgument(source), 0), {}, (target,), (TensorSpec("float32", (1, 100)),)
    )


@pytest.mark.parametrize(
    ("operators", "outputs", "takes", "expected"),
    [
        ((relu(0, 1),), (1,), (), Footprint(peak_bytes=400, peak_operator=0, net_bytes=400)),
        ((relu(0, 1),), (1,), (0,), Footprint(peak_bytes=400, peak_operator=0, net_bytes=0)),
        ((relu(0, 1), relu(1, 2), relu(2, 3)), (3,), (0,), Footprint(peak_bytes=400, peak_operator=0, net_bytes=0)),
        ((relu(0, 1), relu(1, 2), relu(2, 3)), (3,), (), Footprint(peak_bytes=800, peak_operator=1, net_bytes=400)),
        ((view(0, 1),), (1,), (0,), Footprint(peak_bytes=0, peak_operator=0, net_bytes=0)),
        ((relu(0, 1), view(1, 2)), (2,), (0,), Footprint(peak_bytes=400, peak_operator=0, net_bytes=0)),
        ((view(0, 1), relu(1, 2)), (2,), (0,), Footprint(peak_bytes=400, peak_operator=1, net_bytes=0)),
        ((relu(0, 1),), (0,), (0,), Footprint(peak_bytes=400, peak_operator=0, net_bytes=0)),
        ((), (0,), (0,), Footprint(peak_bytes=0, peak_operator=0, net_bytes=0)),
        ((), (), (0,), Footprint(peak_bytes=0, peak_operator=0, net_bytes=-400)),
    ],
)  # fmt: skip
def test_small_programs(
    operators: tuple[Operator, ...], outputs: tuple[int, ...], takes: tuple[int, ...], expected: Footprint
) -> None:
    program = with_deaths(Program((SPEC,), operators, outputs, 4))
    assert footprint(program, takes) == expected


def test_a_view_of_a_view_lies_in_the_memory_of_what_was_computed() -> None:
    deep = Operator("aten.unsqueeze.default", (SlotArgument(2), 0), {}, (3,), (TensorSpec("float32", (1, 1, 100)),))
    program = with_deaths(Program((SPEC,), (relu(0, 1), view(1, 2), deep, view(0, 4)), (3,), 5))
    assert owners(program) == {0: 0, 1: 1, 2: 1, 3: 1, 4: 0}


def test_a_list_of_views_costs_nothing() -> None:
    halves = Operator(
        "aten.split.Tensor",
        (SlotArgument(0), 50),
        {},
        (1, 2),
        (TensorSpec("float32", (50,)), TensorSpec("float32", (50,))),
    )
    program = with_deaths(Program((SPEC,), (halves,), (1, 2), 3))
    assert footprint(program).peak_bytes == 0
    one = with_deaths(Program((SPEC,), (halves,), (2,), 3))
    assert footprint(one, takes=(0,)).net_bytes == 0, "half of it keeps all of it"


@pytest.mark.parametrize(("specified", "peak"), [(True, 400), (False, 0)])
def test_what_nobody_reads_is_there_while_its_operator_runs(specified: bool, peak: int) -> None:
    """A batch of 100 rows of one number each: the maxima take 4 bytes, their places 8 bytes."""
    column, row = TensorSpec("float32", (1, 100)), TensorSpec("int64", (50,))
    place = row if specified else None
    top = Operator("aten.max.dim", (SlotArgument(0), 1), {}, (1, None), (TensorSpec("float32", (1,)), place))
    program = with_deaths(Program((column,), (top,), (1,), 2))
    assert footprint(program) == Footprint(peak_bytes=4 + peak, peak_operator=0, net_bytes=4)


def test_views_that_nobody_reads_cost_nothing() -> None:
    half = TensorSpec("float32", (50,))
    halves = Operator("aten.split.Tensor", (SlotArgument(0), 50), {}, (1, None), (half, half))
    assert footprint(with_deaths(Program((SPEC,), (halves,), (1,), 2))).peak_bytes == 0


def test_random_bytes_are_counted_in_their_own_type() -> None:
    keep = Operator("aten.gt.Scalar", (SlotArgument(0), 0), {}, (1,), (TensorSpec("bool", (100,)),))
    assert footprint(with_deaths(Program((SPEC,), (keep,), (1,), 2))).peak_bytes == 100
    assert torch.ones(100).gt(0).nbytes == 100


@pytest.mark.parametrize("kind", RECURRENT_KINDS)
@pytest.mark.parametrize("backward", [False, True])
def test_a_recurrent_layer_needs_memory_for_all_its_steps(kind: str, backward: bool) -> None:
    """At least what PyTorch takes on a CPU, and less than twice that."""
    gates = {"lstm": 4, "gru": 3}.get(kind, 1)
    steps, samples, width = 30, 8, 16
    x = torch.randn(steps, samples, width, dtype=torch.float64)
    states = [torch.zeros(2, samples, width, dtype=torch.float64)] * (2 if kind == "lstm" else 1)
    weights = [torch.randn(gates * width, width, dtype=torch.float64) for _ in range(4)]
    given_: list[torch.Tensor] = [x, *states, *weights]
    slots = [SlotArgument(place + backward) for place in range(len(given_))]
    split = 1 + len(states)
    args: tuple[Any, ...] = (slots[0], Many(tuple(slots[1:split])), Many(tuple(slots[split:])), kind, False, True)
    if backward:
        made: list[torch.Tensor] = list(given_)
        given_ = [torch.randn(steps, samples, 2 * width, dtype=torch.float64), *given_]
        none = (None,) * len(states)
        args = (Many((SlotArgument(0), *none)), *args, Many((True,) * len(made)))
    else:
        made = [given_[0].new_empty(steps, samples, 2 * width), *states]
    name = str(RECURRENT_BACKWARD if backward else RECURRENT)
    outs = tuple(range(len(given_), len(given_) + len(made)))
    operator = Operator(name, args, {}, outs, tuple(map(spec_of, made)))
    inputs = tuple(map(spec_of, given_))
    program = with_deaths(Program(inputs, (operator,), outs, len(given_) + len(made)))
    tape = CompiledProgram(program, CPU)
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as meter:
        tape.run(list(given_), lambda position: None, WorkerProgress())
    now = most = 0
    for event in meter.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    assert most <= footprint(program).peak_bytes < 2 * most


@pytest.mark.parametrize(
    "args",
    [
        (),
        (SlotArgument(0),),
        (SlotArgument(0), Many((SlotArgument(0),)), Many((SlotArgument(0),)), "system"),
        (SlotArgument(0), Many(()), Many(()), "gru"),
    ],
)
def test_what_is_no_recurrent_layer_is_refused(args: tuple[Any, ...]) -> None:
    spec = TensorSpec("float32", (2, 3, 4))
    program = with_deaths(Program((spec,), (Operator(str(RECURRENT), args, {}, (1,), (spec,)),), (1,), 2))
    with pytest.raises(WireError, match="recurrent"):
        footprint(program)
