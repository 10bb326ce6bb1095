"""Lowering: functional ATen graphs become tapes that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from onebox.errors import CaptureError
from onebox.graph.lower.lowering import arguments_of, canonical, lower, random_positions
from onebox.wire import Complex, DType, MemoryFormat, OwnDevice, Program, SlotArgument, encode
from onebox.wire.protocol.requests import Define, Envelope, StoredProgram
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.progress import WorkerProgress
from tests.unit.programs import CPU


def lowered(function: Callable[..., Any], *inputs: Tensor) -> Program:
    """Trace a function and lower what its results need."""
    graph: fx.Graph = make_fx(function)(*inputs).graph
    graph.eliminate_dead_code()
    given = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = [node for node in graph.nodes if node.op == "output"]
    results = output.args[0] if isinstance(output.args[0], list | tuple) else [output.args[0]]
    wanted = [canonical(node) for node in results]
    needed = set(wanted)
    for node in reversed(graph.nodes):
        if node in needed:
            needed |= {canonical(argument) for argument in arguments_of(node)} | set(arguments_of(node))
    body = [node for node in graph.nodes if node in needed and node.op == "call_function"]
    return lower(body, given, wanted, random_positions(graph))


def same(function: Callable[..., Any], *inputs: Tensor) -> Program:
    """Require that the tape gives, bit for bit, what the function gives; return the program."""
    program = lowered(function, *inputs)
    found = CompiledProgram(program, CPU).run(
        [tensor.clone() for tensor in inputs], lambda position: None, WorkerProgress()
    )
    expected = function(*inputs)
    expected = list(expected) if isinstance(expected, list | tuple) else [expected]
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    encode(Envelope(1, False, (Define(1, StoredProgram(program)),)))
    return program


X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


def test_arguments_of_all_kinds() -> None:
    same(lambda x: torch.clamp(x, min=-0.5, max=0.5).sum(dim=[0, 1], keepdim=True), X)
    same(lambda x: torch.cat([x, x.relu()], 1) @ torch.ones(8, 2, dtype=torch.float64), X)
    same(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), X)
    same(lambda x, index: x[index][:, None, 1:], X, torch.tensor([2, 0]))
    same(lambda x: torch.where(x > 0, x, 0.0).to(torch.float32).mean(), X)
    same(lambda x: torch.arange(4, dtype=torch.float64) * x, X)


def test_a_type_a_device_and_a_memory_format_travel_by_name() -> None:
    program = lowered(lambda x: torch.zeros(2, dtype=torch.float32) + x.to(torch.float32).sum(), X)
    (zeros,) = [operator for operator in program.operators if operator.name == "aten.zeros.default"]
    assert zeros.kwargs["dtype"] == DType("float32")
    assert zeros.kwargs["device"] == OwnDevice()
    assert "pin_memory" not in zeros.kwargs
    image = torch.randn(1, 2, 3, 3)
    program = same(lambda x: x.clone(memory_format=torch.channels_last).relu(), image)
    assert program.operators[0].kwargs["memory_format"] == MemoryFormat("channels_last")


def test_several_outputs_and_those_that_nobody_reads() -> None:
    same(lambda x: torch.max(x, 1), X)
    program = same(lambda x: torch.max(x, 1)[1], X)
    assert program.operators[0].outs[0] is None
    assert program.operators[0].specs[0] is not None, "it takes memory while the operator runs"
    same(lambda x: [part * 2 for part in torch.split(x, 2, 1)], X)
    program = same(lambda x: torch.split(x, 2, 1)[1].relu(), X)
    assert program.operators[0].outs == (None, 1)


def test_the_same_output_picked_twice_has_one_slot() -> None:
    program = same(lambda x: (torch.max(x, 1)[0] + 1, torch.max(x, 1)[0] + 2), X)
    assert (
        len({slot for operator in program.operators for slot in operator.outs if slot is not None}) == program.slots - 1
    )


def test_operators_that_hand_on_their_argument_are_left_out() -> None:
    program = same(lambda x: (x.detach().clone() * 2).detach().t().t() + 1, X)
    assert [operator.name for operator in program.operators] == ["aten.mul.Tensor", "aten.add.Tensor"]


def test_an_output_may_be_an_input_or_come_twice() -> None:
    program = same(lambda x: (x, x.relu(), x.detach()), X)
    assert program.outputs == (0, 1, 0)


def test_random_operators_have_positions_in_order() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5) + torch.bernoulli(x.abs()) + torch.rand(3, 4)

    program = lowered(function, X)
    random = [operator.position for operator in program.operators if operator.position >= 0]
    assert random == list(range(len(random)))
    assert len(random) >= 3


def test_everything_but_outputs_dies() -> None:
    program = lowered(lambda x: (x.relu() * x).sum(), X)
    dies = {slot for operator in program.operators for slot in operator.dies}
    assert dies == set(range(program.slots)) - set(program.outputs)


def test_an_operator_of_another_library_is_refused() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.ops.prims.add.default, (1, 2))
    node.meta["val"] = X
    with pytest.raises(CaptureError, match=r"prims\.add\.default"):
        lower([node], [], [node], {})


def test_a_python_function_is_refused() -> None:
    graph = fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = X
    node = graph.call_function(torch.nn.functional.relu, (given,))
    node.meta["val"] = X
    with pytest.raises(CaptureError, match="relu"):
        lower([node], [given], [node], {})


def test_a_type_that_cannot_travel_is_refused() -> None:
    with pytest.raises(Exception, match=r"tensors of torch.uint16 cannot be trained with; allowed: .*complex64"):
        lowered(lambda x: x.to(torch.uint16), X)


def test_complex_numbers_are_not_left_to_be_conjugated() -> None:
    """What is sent is what lies in memory; and a number that stands for a tensor is computed where it is traced."""
    program = lowered(lambda x: torch.complex(x, x).conj() * (0.5 + 2j), X)
    assert [operator.name for operator in program.operators] == [
        "aten.complex.default",
        "aten.conj_physical.default",
        "aten.mul.Tensor",
    ]
    assert program.operators[-1].args[1] == Complex(0.5, 2.0)


def test_slots_are_those_of_the_inputs_first() -> None:
    program = lowered(lambda a, b: b - a, X, X + 1)
    assert program.operators[0].args[:2] == (SlotArgument(1), SlotArgument(0))
