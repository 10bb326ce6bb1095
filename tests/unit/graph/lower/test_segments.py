"""Segments: where forward is cut, what goes with what, and that names do not depend on shapes or on the mode."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from onebox.graph import Port, TracedModel
from tests.kit.captures import capture
from tests.kit.models import CASES
from tests.unit.graph.staged import traced_case


@functools.cache
def evaluated(name: str, size: int) -> tuple[str, ...]:
    """Return the names of a case's segments in eval mode."""
    case = CASES[name]
    captured = capture(case.model().eval(), case.loss, case.batches([size])[0], mode="evaluate")
    return TracedModel(captured, backward=False).segments


@pytest.mark.parametrize("name", CASES)
def test_names_are_the_same_for_evaluation_and_for_another_size(name: str) -> None:
    """A plan that was made for one capture holds for all captures of the model."""
    assert evaluated(name, 5) == traced_case(name).model.segments


@pytest.mark.parametrize("name", ["mlp", "cnn", "tied", "late"])
def test_names_are_the_same_without_halves_and_for_another_size(name: str) -> None:
    case = CASES[name]
    traced = TracedModel(capture(case.model(), case.loss, case.batches([2])[0]), backward=True)
    assert traced.segments == traced_case(name).model.segments


@pytest.mark.parametrize("name", CASES)
def test_every_node_has_a_segment_and_no_segment_is_empty(name: str) -> None:
    traced = traced_case(name).model
    found = traced._segments
    nodes = [node for node in traced._joint.graph.nodes if node.op == "call_function"]
    assert set(found.of) == set(nodes)
    assert set(found.of.values()) == set(range(len(found.names)))
    assert len(set(found.names)) == len(found.names)


@pytest.mark.parametrize("name", CASES)
def test_segments_are_in_the_order_of_forward(name: str) -> None:
    """No node of forward needs one of a later segment: all in a row is always a possible order of stages."""
    traced = traced_case(name).model
    found = traced._segments
    for node in traced._ahead & set(found.of):
        assert all(found.of[source] <= found.of[node] for source in node.all_input_nodes if source in found.of)
    traced.divide([[segment] for segment in found.names])


# ---- what goes with what


def trace(model: nn.Module, *shape: int, outputs: int = 3, loss: Any = functional.mse_loss) -> TracedModel:
    """Trace a model of one input."""
    batch = torch.randn(2, *shape), torch.randn(2, outputs)
    return TracedModel(capture(model, loss, batch), backward=True)


def operators(traced: TracedModel, stage: int, stages: Sequence[Sequence[str]] | None = None) -> list[str]:
    """Return the names of the operators of forward of a stage; each segment is one if nothing else is said."""
    program = traced.divide(stages or [[name] for name in traced.segments]).of(stage, "F").program
    return [operator.name.split(".")[1] for operator in program.operators]


def test_what_has_no_matrix_goes_with_the_layer_before() -> None:
    """Activations, norms, dropout, pools and sums; what comes before the first layer goes with that."""
    model = nn.Sequential(
        nn.LayerNorm(4), nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), nn.Dropout(0.1), nn.Linear(6, 3), nn.Sigmoid()
    )
    traced = trace(model, 4)
    assert traced.segments == ("model.1", "model.5")
    first, second = operators(traced, 0), operators(traced, 1)
    assert [name for name in first if name != "t"] == [
        "native_layer_norm", "addmm", "relu", "native_layer_norm", "native_dropout"
    ]  # fmt: skip
    assert [name for name in second if name != "t"] == ["addmm", "sigmoid", "mse_loss"]


class Residual(nn.Module):
    """A sum behind a layer, of its output and of what came before it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.c(self.b(y) + y)


def test_a_residual_sum_goes_with_the_layer_before() -> None:
    traced = trace(Residual(), 4)
    assert traced.segments == ("model.a", "model.b", "model.c")
    assert "add" in operators(traced, 1)
    assert "add" not in operators(traced, 2)


def test_the_loss_goes_with_the_last_layer() -> None:
    for loss in (functional.mse_loss, nn.SmoothL1Loss()):
        traced = trace(nn.Linear(4, 3), 4, loss=loss)
        assert traced.segments == ("model",)
        assert Port("result", 0) in traced.divide().of(0, "F").outputs


class Vectors(nn.Module):
    """Parameters of one dimension alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * self.scale + self.shift


def test_a_model_without_matrices_is_one_segment() -> None:
    assert len(trace(Vectors(), 3).segments) == 1


class Twice(nn.Module):
    """One module that reads two matrices, and another that reads the first again."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.layer = nn.Linear(4, 3)
        self.layer.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = (x @ self.one).tanh() @ self.two
        return self.layer((x @ self.one).tanh())


def test_a_module_that_begins_several_segments_has_numbers() -> None:
    """A matrix is a place to cut where it is read first; read again by the same module it is none."""
    assert trace(Twice(), 4).segments == ("model", "model#2", "model.layer")


def test_a_tied_weight_is_a_place_to_cut_where_another_module_reads_it() -> None:
    assert traced_case("tied").model.segments == ("model.first", "model.other", "model", "model.head")
    assert traced_case("gpt2").model.segments[-1] == "model.lm_head"


class Counted(nn.Module):
    """A constant that is made at the beginning, and read there and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.arange(4.0)
        return self.b(self.a(x * numbers).relu()) * numbers


def test_constants_are_made_where_they_are_read_and_do_not_travel() -> None:
    traced = trace(Counted(), 4, outputs=4)
    assert [operators(traced, stage).count("arange") for stage in (0, 1)] == [1, 1]
    model = traced.divide([["model.a"], ["model.b"]])
    assert len([port for port in model.of(1, "F").inputs if port.kind == "value"]) == 1


# ---- backward


@pytest.mark.parametrize("name", ["mlp", "cnn", "vit", "unet", "inception", "recurrent", "late"])
def test_the_gradient_of_a_parameter_is_made_where_it_is_read(name: str) -> None:
    """So that it needs no other values than forward of that stage had, and goes nowhere."""
    traced = traced_case(name).model
    model = traced.divide([[segment] for segment in traced.segments])
    readers: dict[str | int, set[int]] = {}
    for stage in range(model.stages):
        for port in model.of(stage, "F").inputs:
            if port.kind == "parameter":
                readers.setdefault(port.name, set()).add(stage)
    for stage in range(model.stages):
        for port in model.of(stage, "B").outputs:
            if port.kind == "gradient":
                assert stage in readers[port.name]


@pytest.mark.parametrize("name", CASES)
def test_backward_of_a_stage_takes_little_from_forward_of_others(name: str) -> None:
    """What backward saves stays on its stage; only what crosses forward is read again by another stage's backward."""
    traced = traced_case(name).model
    names = traced.segments
    model = traced.divide([names[: len(names) // 2], names[len(names) // 2 :]])
    makers = {port: phase for phase, part in model.phases.items() for port in part.outputs if phase.kind in "FB"}
    for stage in range(model.stages):
        taken = {port for port in model.of(stage, "B").inputs if port.kind == "value" and makers[port].kind == "F"}
        foreign = {port for port in taken if makers[port].stage != stage}
        assert foreign <= set(model.of(stage, "F").inputs)


def test_nodes_of_backward_belong_to_the_segment_of_their_operator() -> None:
    traced = traced_case("mlp").model
    found = traced._segments

    def segment_of(target: Any, among: list[fx.Node]) -> list[int]:
        return sorted(found.of[node] for node in among if node.target is target)

    aten = torch.ops.aten
    behind = [node for node in found.of if node not in traced._ahead]
    assert segment_of(aten.tanh_backward.default, behind) == [0]
    assert segment_of(aten.gelu_backward.default, behind) == [1]
    assert segment_of(aten.native_layer_norm_backward.default, behind) == [1]
    assert segment_of(aten.mm.default, behind) == [0, 1, 1, 2, 2]
