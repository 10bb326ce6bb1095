"""Graphs on virtual devices, cut into programs and single operators, compute what the graph computes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from onebox.graph.lower.lowering import canonical
from onebox.vgpu import install
from onebox.vgpu.compile import dynamo
from onebox.vgpu.compile.sections import Section, Single, copies_needed, output_nodes, sections
from onebox.vgpu.runtime import context
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.progress import WorkerProgress

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    install()
    context.begin_device()  # as whoever traces tensors of it has some
    dynamo.DYNAMO.apply()


def traced(function: Callable[..., Any], *places: str) -> fx.Graph:
    """Trace a function of float64 matrices [3, 3], each on a device."""

    def listed(*given: Tensor) -> list[Any]:
        made = function(*given)
        return list(made) if isinstance(made, tuple | list) else [made]

    with FakeTensorMode():
        examples = [torch.empty(3, 3, dtype=torch.float64, device=place) for place in places]
        return make_fx(listed)(*examples).graph


def computed(graph: fx.Graph, inputs: list[Tensor]) -> list[Any]:
    """Run the steps of a graph here, programs as a worker does."""
    values: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))

    def value(node: fx.Node) -> Any:
        return values[canonical(node)]

    for step in sections(graph):
        if isinstance(step, Section):
            made = CompiledProgram(step.program, CPU).run(
                [*map(value, step.inputs)], lambda position: None, WorkerProgress()
            )
            values |= dict(zip(step.outputs, made, strict=True))
        elif step.node.op == "get_attr":
            values[step.node] = getattr(graph.owning_module, str(step.node.target))
        else:
            args, kwargs = fx.map_arg((step.node.args, step.node.kwargs), value)
            values[step.node] = step.node.target(*args, **{k: CPU if k == "device" else v for k, v in kwargs.items()})
    return [value(node) for node in output_nodes(graph)]


def shape(graph: fx.Graph) -> list[str]:
    """Return what the steps of a graph are."""
    return [str(step.device) if isinstance(step, Section) else str(step.node.target) for step in sections(graph)]


def test_a_graph_on_one_device_is_one_program() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first, second = (x @ y).split([1, 2])
        return torch.softmax(second, 1).sum() + first, x.t().clone(), y.detach() * torch.ones(3, device=y.device)

    graph = traced(function, "vgpu:0", "vgpu:0")
    assert shape(graph) == ["vgpu:0"]
    x, y = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    torch.testing.assert_close(computed(graph, [x, y]), list(function(x, y)))


def test_what_moves_between_devices_is_issued_by_the_client() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x.sin().to(y.device) + y.cos()).to(x.device) * x.cos()

    graph = traced(function, "vgpu:0", "vgpu:1")
    moves = [step for step in shape(graph) if step == "aten._to_copy.default"]
    assert len(moves) == 2
    assert set(shape(graph)) == {"vgpu:0", "vgpu:1", "aten._to_copy.default"}


def test_what_programs_do_not_know_is_issued_by_the_client() -> None:
    def function(x: Tensor) -> Tensor:
        return (x * 2).to(torch.float8_e4m3fn).to(x.dtype) + 1  # no program holds a type of eight bits

    graph = traced(function, "vgpu:0")
    steps = shape(graph)
    assert steps[0] == steps[-1] == "vgpu:0"
    assert all(step.startswith("aten") for step in steps[1:-1])
    assert any("copy" in step for step in steps)
    x = torch.randn(3, 3, dtype=torch.float64)
    torch.testing.assert_close(computed(graph, [x]), [function(x)])


def test_strides_are_read_outside_of_programs() -> None:
    graph = traced(lambda x: (x * 2).as_strided((2, 2), (1, 3)) + 1, "vgpu:0")
    assert shape(graph) == ["vgpu:0", "aten.as_strided.default", "vgpu:0"]
    (step,) = sections(traced(lambda x: x.view(9), "vgpu:0"))
    assert isinstance(step, Section)
    assert [each.name for each in step.program.operators] == ["aten.reshape.default"]


def test_what_is_not_needed_is_left_out() -> None:
    def function(x: Tensor) -> Tensor:
        x.exp()
        return x + 1

    (step,) = sections(traced(function, "vgpu:0"))
    assert isinstance(step, Section)
    assert [each.name for each in step.program.operators] == ["aten.add.Tensor"]


def test_clones_that_leave_are_copied_only_where_memory_would_be_shared() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        z = x * 3
        return x.clone(), y, y.clone().view(9), z.clone(), x.t(), z.sum()

    graph = traced(function, "vgpu:0")
    results = output_nodes(graph)
    copied = copies_needed(results)
    assert [node in copied for node in results] == [True, False, True, False, False, False]


OPERATIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    operator.add,
    operator.mul,
    operator.matmul,
    lambda x, y: x.t() - y,
    lambda x, y: torch.stack([x, y]).max(0)[0],
    lambda x, y: torch.where(x > y, x.clone(), y.detach()),
    lambda x, y: x.reshape(9).view(3, 3) / (y.abs() + 1),
    lambda x, y: torch.fft.fft(x).real + y,
    lambda x, y: x[:, [2, 0, 1]] + y.expand(3, 3),
]


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9), st.integers(0, 9), st.sampled_from([0, 1, 2])),
        min_size=1,
        max_size=8,
    ),
    wanted=st.lists(st.integers(0, 13), min_size=1, max_size=4),
)
@settings(max_examples=20, deadline=None)
def test_any_graph_over_devices_computes_what_it_says(steps: list[Any], wanted: list[int]) -> None:
    def function(*given: Tensor) -> list[Tensor]:
        places = ["vgpu:0", "vgpu:1", "cpu"]
        values = list(given)
        for operation, left, right, place in steps:
            x, y = values[left % len(values)], values[right % len(values)]
            where = places[place] if given[0].device.type == "vgpu" else "cpu"
            values.append(operation(x.to(where), y.to(where)).tanh())
        return [values[number % len(values)] for number in wanted]

    graph = traced(function, "vgpu:0", "vgpu:1")
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(3, 3, dtype=torch.float64, generator=generator) for _ in range(2)]
    torch.testing.assert_close(computed(graph, inputs), function(*inputs))
    assert all(isinstance(step, Section | Single) for step in sections(graph))
