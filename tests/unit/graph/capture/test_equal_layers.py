"""Equal layers, of which Dynamo reads one: a change of any is noticed; layers that differ are read for themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from onebox.errors import CaptureError
from onebox.graph.capture.export import Captured, capture
from tests.unit.graph.capture.test_guards import EXAMPLE, LAYERS, Held

Call = Callable[[Any, Any, Tensor], Tensor]


class Stack(nn.Module):
    """Layers, called one after the other."""

    def __init__(self, layers: list[nn.Module], call: Call = lambda stack, layer, x_BD: layer(x_BD)) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(layers)
        self.call = call
        self.held = Held()

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return what they compute."""
        for layer in self.layers:
            x_BD = self.call(self, layer, x_BD)
        return x_BD


class Layer(nn.Module):
    """A layer that reads an attribute and an object that others may have, too."""

    def __init__(self, compute: Callable[[Any, Tensor], Any] = lambda layer, y: y * layer.k * layer.held.k) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.compute, self.k, self.held = compute, 1.0, Held()

    def forward(self, x_BD: Tensor) -> Any:
        """Return the computed."""
        return self.compute(self, self.line(x_BD))


def captured(model: nn.Module, mode: Any = "train") -> Captured:
    made = capture(model, mse_loss, EXAMPLE, mode=mode)
    assert made.unread is None
    assert made.watch.changed is None
    return made


def equal(made: Captured) -> int:
    """Return for how many layers equal ones were read."""
    return len(set(made.watch.guards[0].equal_layers))


def layers(compute: Callable[[Any, Tensor], Any] = lambda layer, y: y * layer.k * layer.held.k) -> list[Any]:
    return [Layer(compute) for _ in range(LAYERS)]


def test_a_change_of_an_equal_layer_is_named() -> None:
    model = Stack(layers())
    made = captured(model)
    assert equal(made) == LAYERS
    model.layers[3].k = 2.0
    assert made.watch.changed == "model.layers.3.k (now 2.0)"
    model.layers[3].k = 1.0
    assert made.watch.changed is None
    model.layers[2] = Layer()
    assert "model.layers.2" in str(made.watch.changed)


def differing(count: int) -> Stack:
    model = Stack(layers())
    for number in range(count):
        model.layers[1 + number].k = 2.0 + number
    return model


def frozen() -> Stack:
    model = Stack(layers(lambda layer, y: y * (layer.k if layer.line.weight.requires_grad else layer.held.k)))
    model.layers[2].line.requires_grad_(False)
    return model


def narrow() -> Stack:
    model = Stack(layers(lambda layer, y: y * (layer.k if layer.line.weight.stride(0) == 4 else layer.held.k)))
    line: Any = model.layers[2].line
    line.weight = nn.Parameter(line.weight.detach().t())
    return model


def tied() -> Stack:
    model = Stack(layers())
    model.layers[3].line.weight = model.layers[1].line.weight
    return model


def one_object() -> Stack:
    model = Stack(layers(lambda layer, y: y * (layer.k if layer.held is layer.other else layer.held.k)))
    for layer in model.layers:
        layer.other = Held()
    model.layers[2].other = model.layers[2].held
    return model


def in_modes(stack: Any, layer: Any, x_BD: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        first = layer(x_BD)
    return first.float() + layer(x_BD)


def numbered(stack: Any, layer: Any, x_BD: Tensor) -> Tensor:
    layer.held.k = 1.0 if x_BD.requires_grad else 0.5
    return layer(x_BD)


def scaled_by_result(stack: Any, layer: Any, x_BD: Tensor) -> Tensor:
    y_BD, k = layer(x_BD)
    return y_BD if k == 1 else y_BD * stack.held.k


TAKEN: dict[str, tuple[Callable[[], Stack], int, Callable[[Any], Any]]] = {
    "one differs": (lambda: differing(1), LAYERS, lambda model: setattr(model.layers[1], "k", 5.0)),
    "all differ": (lambda: differing(4), LAYERS - 1, lambda model: setattr(model.layers[4], "k", 7.0)),
    "one is frozen": (frozen, LAYERS - 1, lambda model: setattr(model.layers[2].held, "k", 2.0)),
    "one is transposed": (narrow, LAYERS, lambda model: setattr(model.layers[2].held, "k", 2.0)),
    "weights are shared": (tied, LAYERS, lambda model: setattr(model.layers[3], "k", 2.0)),
    "one holds an object twice": (one_object, LAYERS, lambda model: setattr(model.layers[2], "k", 2.0)),
    "called in other modes": (
        lambda: Stack(layers(), in_modes),
        LAYERS,
        lambda model: setattr(model.layers[3], "k", 2.0),
    ),
    "called twice": (
        lambda: Stack(layers(), lambda stack, layer, x: layer(layer(x))),
        LAYERS,
        lambda model: setattr(model.layers[3], "k", 2.0),
    ),
    "dropout": (
        lambda: Stack(layers(lambda layer, y: nn.functional.dropout(y, layer.k / 2, layer.training))),
        LAYERS,
        lambda model: setattr(model.layers[3], "k", 0.5),
    ),
    "results in a tuple": (
        lambda: Stack(layers(lambda layer, y: (y * layer.k, (y, None), 2.0)), lambda stack, layer, x: layer(x)[0]),
        LAYERS,
        lambda model: setattr(model.layers[3], "k", 2.0),
    ),
    "a result decides": (
        lambda: Stack(
            layers(lambda layer, y: (y, layer.k)),
            scaled_by_result,
        ),
        LAYERS,
        lambda model: setattr(model.layers[3], "k", 2.0),
    ),
    "within a checkpoint": (
        lambda: Stack(layers(), lambda stack, layer, x: checkpoint(layer, x, use_reentrant=False)),
        0,
        lambda model: setattr(model.layers[3], "k", 2.0),
    ),
    "state is set before each call": (
        lambda: Stack(layers(), numbered),
        0,
        lambda model: setattr(model.layers[3], "k", 2.0),
    ),
    "the layer returns what it is given": (
        lambda: Stack(layers(lambda layer, y: y), lambda stack, layer, x: layer.compute(layer, layer(x))),
        LAYERS,
        lambda model: setattr(model.layers[3], "compute", lambda layer, y: -y),
    ),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_layers_that_differ_are_read_for_themselves(kind: str) -> None:
    make, count, change = TAKEN[kind]
    model = make()
    made = captured(model)
    assert equal(made) == count
    change(model)
    assert made.watch.changed is not None


class Writing(Layer):
    """A layer that changes what it is given, or returns it."""

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return the argument."""
        return x_BD.mul_(self.k) if self.k > 1 else x_BD


@pytest.mark.parametrize("k", [1.0, 2.0])
def test_a_layer_that_writes_or_returns_its_argument_is_read_where_it_is_called(k: float) -> None:
    own: list[Any] = [Writing() for _ in range(LAYERS)]
    for layer in own:
        layer.k = k
    made = captured(nn.Sequential(nn.Linear(4, 4), *own))
    assert equal(made) == 0
    own[3].k = 3 - k
    assert made.watch.changed is not None


def counts(layer: Any, y: Tensor) -> Tensor:
    layer.calls = getattr(layer, "calls", 0) + 1
    return y


def test_what_a_layer_does_to_pythons_state_is_done() -> None:
    if torch.__version__ < "2.13":
        pytest.skip("before torch 2.13 it is refused")
    model = Stack(layers(counts))
    for layer in model.layers:
        layer.calls = 0
    made = captured(model)
    assert equal(made) == 0
    assert made.watch.effects is not None
    made.watch.effects()
    assert [layer.calls for layer in model.layers] == [1] * LAYERS


def test_layers_are_compared_in_evaluation_mode_too() -> None:
    model = Stack(layers())
    made = captured(model, "evaluate")
    assert equal(made) == LAYERS
    model.layers[0].k = 2.0
    assert made.watch.changed == "model.layers.0.k (now 2.0)"


def test_a_layer_that_decides_by_values_is_refused_by_its_line() -> None:
    with pytest.raises(CaptureError, match=r"test_equal_layers\.py:\d+"):
        captured(Stack(layers(lambda layer, y: y if y.sum() > 0 else -y)))
