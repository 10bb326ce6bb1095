"""The interpreter: it computes what the program says, and refuses programs that are none before anything runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import (
    DType,
    LayoutArgument,
    Many,
    MemoryFormat,
    Operator,
    OwnDevice,
    Program,
    SlotArgument,
    TensorSpec,
    Value,
    with_deaths,
)
from onebox.worker.execution.errors import describe_failure
from onebox.worker.programs.interpreter import CompiledProgram, OperatorFailed
from onebox.worker.progress import WorkerProgress
from tests.unit.programs import CPU, Sample, run_plainly, samples

SPEC = TensorSpec("float64", (2, 3))
X = torch.arange(6, dtype=torch.float64).view(2, 3) - 2


def no_seed(position: int) -> None:
    raise AssertionError("no operator here is random")


def run(program: Program, *inputs: Tensor, seed: Callable[[int], None] = no_seed) -> list[Tensor]:
    return CompiledProgram(program, CPU).run(list(inputs), seed, WorkerProgress())


def program(*operators: Operator, outputs: tuple[int, ...] = (1,), slots: int = 8) -> Program:
    """Return a program of one input."""
    return Program((SPEC,), operators, outputs, slots)


def relu(source: int = 0, target: int = 1, **changed: Any) -> Operator:
    return Operator("aten.relu.default", (SlotArgument(source),), {}, (target,), (SPEC,), **changed)


@given(samples())
def test_the_tape_computes_what_the_operators_do(sample: Sample) -> None:
    expected = run_plainly(sample.program, sample.inputs)
    tape = CompiledProgram(sample.program, CPU)
    for _ in range(2):  # the second run is unchecked
        made = tape.run([tensor.clone() for tensor in sample.inputs], no_seed, WorkerProgress())
        for slot, tensor in zip(sample.program.outputs, made, strict=True):
            torch.testing.assert_close(tensor, expected[slot], rtol=0, atol=0)


@given(samples())
def test_progress_counts_operators(sample: Sample) -> None:
    progress = WorkerProgress()
    CompiledProgram(sample.program, CPU).run(list(sample.inputs), no_seed, progress)
    assert progress.executed == len(sample.program.operators)


def test_nothing_stays_behind_after_a_run() -> None:
    tape = CompiledProgram(with_deaths(program(relu(0, 1), relu(1, 2), outputs=(2,))), CPU)
    given_ = [X.clone()]
    watched = weakref.ref(given_[0])
    (made,) = tape.run(given_, no_seed, WorkerProgress())
    assert given_ == [], "the list is emptied"
    assert watched() is None, "the tape keeps no input"
    watched = weakref.ref(made)
    del made
    assert watched() is None


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "spec", "expected"),
    [
        ("aten.sum.dim_IntList", (SlotArgument(0), Many((0, 1)), True), {}, TensorSpec("float64", (1, 1)), 3.0),
        (
            "aten.zeros.default",
            (Many((2,)),),
            {"dtype": DType("int64"), "device": OwnDevice()},
            TensorSpec("int64", (2,)),
            0,
        ),
        ("aten.clone.default", (SlotArgument(0),), {"memory_format": MemoryFormat("contiguous_format")}, SPEC, -2.0),
        (
            "aten.full.default",
            (Many((1,)), 7),
            {"layout": LayoutArgument(), "dtype": DType("int8")},
            TensorSpec("int8", (1,)),
            7,
        ),
        ("aten.div.Tensor_mode", (SlotArgument(0), SlotArgument(0)), {"rounding_mode": "floor"}, SPEC, 1.0),
    ],
    ids=["list", "type and device", "memory format", "layout", "text"],
)
def test_arguments_of_all_kinds(
    name: str, args: tuple[Value, ...], kwargs: dict[str, Value], spec: TensorSpec, expected: float
) -> None:
    (made,) = run(program(Operator(name, args, kwargs, (1,), (spec,))), X)
    assert made.view(-1)[0].item() == expected


def test_tensors_that_are_missing_in_a_list() -> None:
    pick = Operator(
        "aten._unsafe_index.Tensor",
        (SlotArgument(0), Many((None, SlotArgument(1)))),
        {},
        (2,),
        (TensorSpec("float64", (2, 1)),),
    )
    (made,) = run(Program((SPEC, TensorSpec("int64", (1,))), (pick,), (2,), 3), X, torch.tensor([2]))
    assert made.tolist() == [[0.0], [3.0]]


def test_tensors_by_keyword() -> None:
    bias = Operator(
        "aten.native_layer_norm.default", (SlotArgument(0), Many((3,)), None),
        {"bias": SlotArgument(1), "eps": 1e-5}, (2, None, None),
        (SPEC, None, None),
    )  # fmt: skip
    spec = TensorSpec("float64", (3,))
    (made,) = run(Program((SPEC, spec), (bias,), (2,), 3), X, torch.ones(3, dtype=torch.float64))
    expected = torch.nn.functional.layer_norm(X, (3,), None, torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(made, expected, rtol=0, atol=0)


def test_random_operators_are_seeded_by_their_position() -> None:
    seeds: list[int] = []

    def seed(position: int) -> None:
        seeds.append(position)
        torch.manual_seed(position)

    draw = [Operator("aten.bernoulli.p", (SlotArgument(0), 0.5), {}, (n + 1,), (SPEC,), (), n + 5) for n in range(3)]
    with torch.random.fork_rng(devices=[]):
        first = run(program(*draw, outputs=(1, 2, 3)), X, seed=seed)
        again = run(program(*draw, outputs=(1, 2, 3)), X, seed=seed)
    assert seeds == [5, 6, 7] * 2
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# ---- what is refused when a program is stored


@pytest.mark.feature("Security: Run only operators of a list")
@pytest.mark.parametrize(
    "name",
    [
        "aten.add_.Tensor",
        "aten.relu_.default",
        "aten.copy_.default",
        "aten.set_.source_Storage",
        "aten.set_.source_Tensor",
        "aten.resize_.default",
        "aten.add.out",
        "aten.from_file.default",
        "aten._local_scalar_dense.default",
        "aten.nonzero.default",
        "aten.pin_memory.default",
        "aten.record_stream.default",
        "aten.native_batch_norm.default",
        "aten.nothing.default",
        "aten.relu",
        "relu",
        "",
        "prims.add.default",
        "quantized.add.default",
        "os.system",
        "aten.__class__.__init__",
    ],
)
def test_operators_that_are_not_on_the_list(name: str) -> None:
    with pytest.raises(WireError, match="allow-list"):
        CompiledProgram(program(Operator(name, (SlotArgument(0),), {}, (1,), (SPEC,))), CPU)


def broken(**changed: Any) -> Operator:
    return Operator(
        **{"name": "aten.relu.default", "args": (SlotArgument(0),), "kwargs": {}, "outs": (1,), "specs": (SPEC,)}
        | changed
    )


@pytest.mark.parametrize(
    "wrong",
    [
        program(broken(args=(SlotArgument(1),))),
        program(broken(args=(SlotArgument(-1),))),
        program(broken(args=(SlotArgument(99),))),
        program(broken(name="aten.cat.default", args=(Many((SlotArgument(0), SlotArgument(5))), 0))),
        program(broken(outs=(99,)), outputs=(0,)),
        program(broken(outs=(-1,)), outputs=(0,)),
        program(broken(outs=(0,)), outputs=(0,)),
        program(relu(0, 1), relu(0, 1)),
        program(relu(0, 1), outputs=(2,)),
        program(relu(0, 1), outputs=(-1,)),
        program(relu(0, 1, dies=(5,))),
        program(relu(0, 1, dies=(0,)), relu(0, 2), outputs=(2,)),
        program(relu(0, 1, dies=(1,)), outputs=(1,)),
        program(broken(outs=()), outputs=(0,)),
        program(broken(outs=(1, 2), specs=(SPEC, SPEC))),
        program(broken(outs=(None,), specs=(None,)), outputs=(0,)),
        program(broken(name="aten.max.dim", args=(SlotArgument(0), 0), outs=(1,), specs=(SPEC,))),
        program(broken(specs=())),
        program(broken(specs=(None,))),
        program(broken(specs=(SPEC, SPEC))),
        program(broken(specs=(TensorSpec("float8_e5m2", (2,)),))),
        program(broken(specs=(TensorSpec("float32", (-2,)),))),
        program(broken(name="aten.max.dim", args=(SlotArgument(0), 0), outs=(1, None),
        specs=(SPEC, TensorSpec("int", (3,))))),
        Program((TensorSpec("Tensor", (2,)),), (), (0,), 1),
        Program((SPEC, SPEC), (), (1,), 1),
        program(relu(0, 1), slots=2**40),
        program(relu(0, 1), slots=-1),
        program(broken(kwargs={"dtype": DType("float8_e5m2")})),
        program(broken(kwargs={"dtype": DType("nn")})),
        program(broken(kwargs={"memory_format": MemoryFormat("__class__")})),
    ],
    ids=[
        "unfilled", "negative", "not there", "unfilled in a list", "output not there", "output negative",
        "output over an input", "filled twice", "result unfilled", "result negative", "death of nothing",
        "read after death", "result dead", "no outputs", "too many outputs", "only output unread", "too few outputs",
        "no specification", "missing specification", "too many specifications", "type", "size",
        "unread type", "input type",
        "fewer slots than inputs", "slots without end", "negative slots", "argument type", "argument name",
        "argument memory format",
    ],
)  # fmt: skip
def test_programs_that_are_none(wrong: Program) -> None:
    with pytest.raises(WireError):
        CompiledProgram(wrong, CPU)


# ---- what is found when a program runs


def test_a_failing_operator_is_named_with_its_shapes() -> None:
    other = TensorSpec("float64", (4,))
    add = Operator("aten.add.Tensor", (SlotArgument(0), SlotArgument(1)), {}, (2,), (SPEC,))
    with pytest.raises(OperatorFailed) as caught:
        run(Program((SPEC, other), (add,), (2,), 3), X, torch.zeros(4, dtype=torch.float64))
    assert caught.value.operator == "aten.add.Tensor"
    assert caught.value.shapes == "float64[2, 3], float64[4]"
    assert "size of tensor" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("float64", (3, 2)),
        TensorSpec("float64", (6,)),
        TensorSpec("float32", (2, 3)),
        TensorSpec("float64", ()),
    ],
    ids=str,
)
def test_a_result_that_is_not_what_the_program_says(spec: TensorSpec) -> None:
    with pytest.raises(OperatorFailed) as caught:
        run(program(broken(specs=(spec,))), X)
    assert caught.value.operator == "aten.relu.default"
    assert "the program says" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "value",
    [Many((1, 2)), "text", True, None, DType("int64"), MemoryFormat("contiguous_format"), OwnDevice(), 2**62, Many(())],
    ids=str,
)
def test_an_argument_of_a_wrong_kind_is_the_operators_failure(value: Value) -> None:
    with pytest.raises((OperatorFailed, WireError)):
        run(program(broken(args=(value,))), X)


def test_after_a_failure_the_tape_still_works() -> None:
    index = TensorSpec("int64", (2,))
    pick = Operator(
        "aten.index_select.default", (SlotArgument(0), 0, SlotArgument(1)), {}, (2,), (TensorSpec("float64", (2, 3)),)
    )
    tape = CompiledProgram(Program((SPEC, index), (pick,), (2,), 3), CPU)
    with pytest.raises(OperatorFailed, match="index_select"):
        tape.run([X, torch.tensor([0, 7])], no_seed, WorkerProgress())
    (made,) = tape.run([X, torch.tensor([1, 0])], no_seed, WorkerProgress())
    assert torch.equal(made, X[[1, 0]])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([X, X], "of 1 inputs is given 2"),
        ([], "of 1 inputs is given 0"),
        ([X.float()], r"input 0 .* is float64\[2, 3\], but its buffer holds float32\[2, 3\]"),
        ([X.t()], r"input 0 .* is float64\[2, 3\], but its buffer holds float64\[3, 2\]"),
        ([X.view(6)], r"holds float64\[6\]"),
    ],
    ids=["too many", "too few", "type", "shape", "rank"],
)
def test_inputs_are_checked_in_every_run(inputs: list[Tensor], message: str) -> None:
    tape = CompiledProgram(program(relu()), CPU)
    for _ in range(2):
        with pytest.raises(WireError, match=message):
            tape.run(list(inputs), no_seed, WorkerProgress())
        tape.run([X], no_seed, WorkerProgress())


def test_outputs_that_nobody_reads_may_be_specified() -> None:
    index = TensorSpec("int64", (3,))
    top = Operator("aten.max.dim", (SlotArgument(0), 0), {}, (1, None), (TensorSpec("float64", (3,)), index))
    (made,) = run(program(top), X)
    assert torch.equal(made, X.amax(0))


@given(st.integers(0, 5), st.integers(0, 5))
def test_a_footprint_is_computed_once_for_each_set_of_inputs(count: int, again: int) -> None:
    tape = CompiledProgram(with_deaths(program(relu())), CPU)
    assert tape.footprint(()) is tape.footprint(())
    assert tape.footprint((0,)).net_bytes == 0
    assert tape.footprint(()).net_bytes == SPEC.size_bytes


# ---- strides


def flattened(name: str = "aten.view.default") -> Program:
    return program(Operator(name, (SlotArgument(0), Many((6,))), {}, (1,), (TensorSpec("float64", (6,)),)))


TURNED = X.t().contiguous().t()
"""The same numbers in another order of memory."""


@pytest.mark.parametrize("name", ["aten.view.default", "aten._unsafe_view.default"])
def test_a_view_that_strides_do_not_allow_is_a_copy_and_any_other_stays_a_view(name: str) -> None:
    tape = CompiledProgram(flattened(name), CPU)
    for given_ in (X, TURNED, X, TURNED):
        (made,) = tape.run([given_], no_seed, WorkerProgress())
        assert made.tolist() == X.flatten().tolist()
        assert (made.data_ptr() == given_.data_ptr()) == (given_ is X)


def test_an_operator_that_refuses_strides_is_given_contiguous_tensors() -> None:
    x = torch.arange(12, dtype=torch.float64).view(1, 2, 6)
    turned = x.mT.contiguous().mT
    made_ = tuple(TensorSpec("float64", shape) for shape in ((1, 2, 6), (1, 2), (1, 2)))
    norm = Operator(
        "aten.native_group_norm.default", (SlotArgument(0), None, None, 1, 2, 6, 2, 1e-5), {}, (1, 2, 3), made_
    )
    tape = CompiledProgram(Program((made_[0],), (norm,), (1, 2, 3), 4), CPU)
    expected = torch.native_group_norm(x, None, None, 1, 2, 6, 2, 1e-5)
    with pytest.raises(RuntimeError, match="contiguous"):
        torch.native_group_norm(turned, None, None, 1, 2, 6, 2, 1e-5)
    for given_ in (x, turned, turned, x):
        made = tape.run([given_], no_seed, WorkerProgress())
        assert all(map(torch.equal, made, expected))


def test_an_expanded_tensor_stays_expanded_where_the_operator_takes_it() -> None:
    once = torch.arange(6, dtype=torch.float64).view(1, 2, 3).mT
    shape, half = (1 << 40, 3, 2), (1 << 40, 3)
    pair = Operator("aten.view_as_complex.default", (SlotArgument(0),), {}, (1,), (TensorSpec("complex128", half),))
    tape = CompiledProgram(Program((TensorSpec("float64", shape),), (pair,), (1,), 2), CPU)
    (made,) = tape.run([once.expand(shape)], no_seed, WorkerProgress())
    assert made[7].tolist() == [0 + 3j, 1 + 4j, 2 + 5j]


def test_a_lack_of_memory_for_contiguous_tensors_is_reported_as_such() -> None:
    shape = (2, 1 << 44)
    flat = Operator(
        "aten.view.default", (SlotArgument(0), Many((1 << 45,))), {}, (1,), (TensorSpec("float64", (1 << 45,)),)
    )
    tape = CompiledProgram(Program((TensorSpec("float64", shape),), (flat,), (1,), 2), CPU)
    with pytest.raises(OperatorFailed, match=r"aten\.view") as caught:
        tape.run([torch.ones(2, 1, dtype=torch.float64).expand(shape)], no_seed, WorkerProgress())
    assert describe_failure(caught.value, "a step").kind == "memory"


def test_a_lack_of_memory_for_contiguous_tensors_hides_no_other_error() -> None:
    specs = tuple(TensorSpec("float64", shape) for shape in ((2, 1 << 44), (3, 2)))
    product = Operator(
        "aten.mm.default", (SlotArgument(0), SlotArgument(1)), {}, (2,), (TensorSpec("float64", (2, 2)),)
    )
    tape = CompiledProgram(Program(specs, (product,), (2,), 3), CPU)
    with pytest.raises(OperatorFailed) as caught:
        tape.run([torch.ones(2, 1).double().expand(2, 1 << 44), torch.ones(3, 2).double()], no_seed, WorkerProgress())
    assert "shapes cannot be multiplied" in str(caught.value.__cause__)


def test_an_operator_that_fails_for_another_reason_runs_at_most_twice() -> None:
    draw = Operator("aten.bernoulli.p", (SlotArgument(0), 2.0), {}, (1,), (SPEC,), position=0)
    seeds: list[int] = []
    with pytest.raises(OperatorFailed):
        CompiledProgram(program(draw), CPU).run([TURNED], seeds.append, WorkerProgress())
    assert len(seeds) == 2


def test_a_rule_about_strides_is_not_avoided_by_contiguous_tensors() -> None:
    distances = program(
        Operator("aten._pdist_forward.default", (SlotArgument(0), 2.0), {}, (1,), (TensorSpec("float64", (1,)),))
    )
    tape = CompiledProgram(distances, CPU)
    assert torch.equal(tape.run([X], no_seed, WorkerProgress())[0], torch.pdist(X))
    with pytest.raises(OperatorFailed, match="_pdist_forward") as caught:
        tape.run([TURNED], no_seed, WorkerProgress())
    assert "strides" in str(caught.value.__cause__)


def test_an_error_that_has_nothing_to_do_with_strides_is_the_operators_own() -> None:
    index = TensorSpec("int64", (2,))
    pick = Operator("aten.index_select.default", (SlotArgument(0), 0, SlotArgument(1)), {}, (2,), (SPEC,))
    tape = CompiledProgram(Program((SPEC, index), (pick,), (2,), 3), CPU)
    with pytest.raises(OperatorFailed, match="index_select") as caught:
        tape.run([TURNED, torch.tensor([0, 7])], no_seed, WorkerProgress())
    assert "index" in str(caught.value.__cause__)
    (made,) = tape.run([TURNED, torch.tensor([1, 0])], no_seed, WorkerProgress())
    assert torch.equal(made, X[[1, 0]])
