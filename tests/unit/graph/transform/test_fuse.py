"""Activations that are written out become single operators, however they are written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from onebox.graph import ModelPrograms, TracedModel
from tests.kit.captures import capture
from tests.kit.models import CASES
from tests.unit.graph.lower.test_recompute import saved_bytes
from tests.unit.graph.staged import SIZE, assert_alike, order_of, run, trace

Activation = Callable[[Tensor], Tensor]


def new(x: Tensor) -> Tensor:
    """As GPT-2 of Hugging Face has it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def fast(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def by_erf(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def by_sigmoid(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def by_exp(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def quick(x: Tensor) -> Tensor:
    """Another function than GELU, if one that is close to it."""
    return x * torch.sigmoid(1.702 * x)


def sloppy(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.797885 * (x + 0.044715 * x**3)))


class Net(nn.Module):
    """Two layers with an activation between them.

    Args:
        activation: The activation.
    """

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.first, self.second, self.activation = nn.Linear(6, 8), nn.Linear(8, 3), activation

    def forward(self, x: Tensor) -> Tensor:
        """Classify."""
        return self.second(self.activation(self.first(x)))


def programs(model: nn.Module, *, fuse: bool) -> ModelPrograms:
    batch = torch.randn(4, 6, dtype=torch.float64), torch.randint(3, (4,))
    return TracedModel(capture(model, functional.cross_entropy, batch, fuse=fuse), backward=True).divide()


def operators(model: ModelPrograms) -> Counter[str]:
    every = [operator.name for part in model.phases.values() for operator in part.program.operators]
    return Counter(name.removeprefix("aten.").removesuffix(".default") for name in every)


of_later_torch = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 traces these otherwise")


@of_later_torch
@pytest.mark.parametrize(
    ("activation", "name"),
    [(new, "gelu"), (fast, "gelu"), (by_erf, "gelu"), (by_sigmoid, "silu"), (by_exp, "silu")],
)
def test_what_has_the_values_of_an_operator_becomes_that(activation: Activation, name: str) -> None:
    found = operators(programs(Net(activation).double(), fuse=True))
    assert (found[name], found[f"{name}_backward"]) == (1, 1)
    assert not {"tanh", "erf", "sigmoid", "exp"} & set(found)


@pytest.mark.parametrize("activation", [quick, sloppy, torch.tanh, lambda x: x * torch.tanh(functional.softplus(x))])
def test_other_functions_stay(activation: Activation) -> None:
    model = Net(activation).double()
    assert operators(programs(model, fuse=True)) == operators(programs(model, fuse=False))


@of_later_torch
def test_an_activation_of_which_a_part_is_read_elsewhere_stays() -> None:
    """Its gradient needs the parts in any case: as one operator, too, it would take more time and memory."""

    def shared(x: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        return x * gate + gate

    found = operators(programs(Net(shared).double(), fuse=True))
    assert (found["silu"], found["sigmoid"]) == (0, 1)


def test_two_inputs_are_no_activation() -> None:
    class Gated(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * torch.sigmoid(self.first(2 * x)))

    assert not operators(programs(Gated(new).double(), fuse=True))["silu"]


def test_a_transformer_makes_the_same_and_keeps_less() -> None:
    case = CASES["gpt2"]
    batch = case.batches([SIZE])[0]
    plain = trace(case.model(), case.loss, batch)
    model = TracedModel(capture(case.model(), case.loss, batch, fuse=True), backward=True, halves=True)
    assert model.segments == plain.model.segments
    fused, captured = model.divide(), plain.model.divide()
    for halves in (False, True):
        found, expected = (run(each, plain.given, order_of(each, halves=halves)) for each in (fused, captured))
        assert_alike(found, expected, 1e-10)
    assert operators(fused)["gelu"] == 2
    assert saved_bytes(fused, 0) < 0.8 * saved_bytes(captured, 0)
