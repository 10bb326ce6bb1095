"""What a client that compiles asks of stored programs: how outputs lie, and whose random numbers they draw."""

from __future__ import annotations

import pytest
import torch

from onebox.wire import Operator, Program, SlotArgument, Strided, TensorSpec, with_deaths
from onebox.wire.protocol.instructions import Call
from onebox.wire.protocol.requests import Define, Routine, Run, StoredProgram
from tests.unit.machines import Rig

SPEC = TensorSpec("float64", (2, 3))
X = torch.arange(6.0, dtype=torch.float64).view(2, 3)


def program(name: str, position: int = -1) -> Program:
    """Return a program of one operator from a matrix to a matrix, by way of a copy and a transposed view of that."""
    turned = TensorSpec("float64", (3, 2))
    operators = (
        Operator("aten.clone.default", (SlotArgument(0),), {}, (1,), (SPEC,)),
        Operator("aten.t.default", (SlotArgument(1),), {}, (2,), (turned,)),
        Operator(name, (SlotArgument(2),), {}, (3,), (turned,), (), position),
    )
    return with_deaths(Program((SPEC,), operators, (3,), 4))


def strides(layouts: tuple[Strided | None, ...]) -> tuple[int, ...]:
    rig = Rig()
    rig.put(b1=X)
    rig.do(Define(5, StoredProgram(program("aten.relu.default"), 0.0, layouts)), Call(5, (1,), (2,)))
    assert rig.failures == []
    made = rig.machine.store.get(2)
    assert torch.equal(made, X.t())
    return made.stride()


def test_outputs_lie_as_they_are_made_where_nothing_is_said() -> None:
    assert strides(()) == (1, 3)
    assert strides((None,)) == (1, 3)


@pytest.mark.parametrize("wanted", [(1, 3), (2, 1), (4, 2)])
def test_outputs_lie_as_is_said(wanted: tuple[int, int]) -> None:
    assert strides((Strided("float64", (3, 2), wanted, 0, 48),)) == wanted


def test_layouts_that_do_not_fit_are_refused() -> None:
    rig = Rig()
    rig.put(b1=X)
    layout = Strided("float64", (2, 2), (2, 1), 0, 32)
    rig.do(Define(5, StoredProgram(program("aten.relu.default"), 0.0, (layout,))), Call(5, (1,), (2,)))
    rig.do(Define(6, StoredProgram(program("aten.relu.default"), 0.0, (None, None))))
    assert [failure.kind for failure in rig.failures] == ["protocol"] * 2


def test_a_program_without_positions_draws_the_next_numbers_of_the_device() -> None:
    rig = Rig()
    rig.put(b1=X)
    rig.do(Define(5, StoredProgram(program("aten.rand_like.default"))))
    torch.manual_seed(3)
    rig.do(Call(5, (1,), (2,)), Call(5, (1,), (3,)))
    torch.manual_seed(3)
    for number in (2, 3):
        assert torch.equal(rig.machine.store.get(number), torch.rand_like(X.t()))


def test_a_program_that_seeds_its_numbers_leaves_those_of_the_device_alone() -> None:
    rig = Rig()
    rig.put(b1=X)
    routine = Routine((Call(5, (1,), (2,)), Call(5, (1,), (3,), micro_batch=1)), 0)
    rig.do(Define(5, StoredProgram(program("aten.rand_like.default", 0))), Define(6, routine))
    torch.manual_seed(3)
    rig.do(Run(6, seed=1))
    after = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(4))
    first = rig.machine.store.get(2).clone()
    assert not torch.equal(first, rig.machine.store.get(3))
    rig.do(Run(6, seed=1))
    assert torch.equal(first, rig.machine.store.get(2))
