"""Programs: what an operator reads, what a slot holds, when a slot dies."""

from __future__ import annotations

import pytest
from hypothesis import given

from onebox.errors import WireError
from onebox.wire import (
    DType,
    Many,
    Operator,
    Program,
    SlotArgument,
    TensorSpec,
    is_random,
    overload,
    reads,
    shares_memory,
    specs_by_slot,
    with_deaths,
)
from tests.unit.programs import Sample, run_plainly, samples

SPEC = TensorSpec("float64", (2,))


def test_an_operator_reads_its_slots_in_order_with_repeats() -> None:
    operator = Operator(
        "x",
        (SlotArgument(3), 1, Many((SlotArgument(1), None, 2)), SlotArgument(3)),
        {"a": SlotArgument(0), "d": DType("bool")},
        (4,),
        (SPEC,),
    )
    assert reads(operator) == [3, 1, 3, 0]


@given(samples())
def test_specifications_are_those_of_the_values(sample: Sample) -> None:
    values = run_plainly(sample.program, sample.inputs)
    specs = specs_by_slot(sample.program)
    assert specs.keys() == values.keys()
    assert all(specs[slot].shape == tuple(value.shape) for slot, value in values.items())


@given(samples())
def test_every_slot_dies_once_after_its_last_use_unless_it_is_given_out(sample: Sample) -> None:
    program = sample.program
    dead: set[int] = set()
    for operator in program.operators:
        assert not dead & set(reads(operator)), "a dead slot is read"
        assert not dead & set(operator.outs)
        assert not dead & set(operator.dies), "a slot dies twice"
        dead |= set(operator.dies)
    used = {slot for operator in program.operators for slot in (*reads(operator), *operator.outs)}
    assert dead == used - set(program.outputs) - {None}


@given(samples())
def test_setting_deaths_again_changes_nothing(sample: Sample) -> None:
    assert with_deaths(sample.program) == sample.program


def test_what_nobody_reads_dies_where_it_is_made() -> None:
    program = Program(
        (SPEC,),
        (
            Operator("aten.relu.default", (SlotArgument(0),), {}, (1,), (SPEC,)),
            Operator("aten.neg.default", (SlotArgument(0),), {}, (2,), (SPEC,)),
        ),
        (2,),
        3,
    )
    assert [operator.dies for operator in with_deaths(program).operators] == [(1,), (0,)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten.view.default", True),
        ("aten.t.default", True),
        ("aten._unsafe_view.default", True),
        ("aten.split.Tensor", True),
        ("aten.expand.default", True),
        ("aten.add.Tensor", False),
        ("aten.clone.default", False),
        ("aten.mm.default", False),
        ("aten.max.dim", False),
    ],
)
def test_views_are_known(name: str, expected: bool) -> None:
    assert shares_memory(overload(name)) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten.native_dropout.default", True),
        ("aten.bernoulli.p", True),
        ("aten.rand.default", True),
        ("aten.relu.default", False),
    ],
)
def test_random_operators_are_known(name: str, expected: bool) -> None:
    assert is_random(overload(name)) is expected


@pytest.mark.parametrize(
    "name",
    ["", "aten", "aten.add", "aten.add.Nothing", "aten.nothing.default", "prims.add.default", "os.system.default",
     "onebox.recurrent", "onebox.other.default", "aten.__class__.default", "aten.add.Tensor.x",
     "aten.__init__.__globals__", "aten..default"],
)  # fmt: skip
def test_names_that_are_no_operators_are_refused(name: str) -> None:
    with pytest.raises(WireError, match="no operator"):
        overload(name)
