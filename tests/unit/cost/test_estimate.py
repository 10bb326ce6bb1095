"""Times that nobody has measured: operations are counted as PyTorch counts them, bytes as they are moved."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from onebox.cost.estimate import DeviceRates, flops_of, program_s
from onebox.graph import TracedModel
from onebox.wire import Many, Operator, Program, SlotArgument, TensorSpec, specs_by_slot, with_deaths
from tests.kit.captures import capture

RATES = DeviceRates(flops=1e9, bandwidth_bps=1e8, operator_s=1e-6)


class Net(nn.Module):
    """Convolutions one way and the other, and products of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.Flatten(),
            nn.Linear(4 * 64, 10, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y + torch.bmm(y.unsqueeze(1), y.unsqueeze(2)).flatten(1)


def test_operations_are_those_that_pytorch_counts() -> None:
    model, x, y = Net(), torch.randn(3, 4, 8, 8), torch.tensor([0, 1, 2])
    traced = TracedModel(capture(model, functional.cross_entropy, (x, y)), backward=True)
    programs = [part.program for part in traced.divide(None).phases.values()]
    counted = sum(flops_of(o, specs_by_slot(program)) for program in programs for o in program.operators)
    with FlopCounterMode(display=False) as meter:
        functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    assert counted == meter.get_total_flops() > 0


@pytest.mark.parametrize("layers", [nn.LSTM(6, 8, 2, bidirectional=True, proj_size=3), nn.GRU(6, 8), nn.RNN(6, 8, 3)])
def test_a_recurrent_layer_is_counted_by_its_products(layers: nn.RNNBase) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.layers(x)[0].sum()
            return made

    x = torch.randn(7, 2, 6, dtype=torch.float64, requires_grad=True)
    traced = TracedModel(capture(Last(), lambda outputs, _: outputs, (x.detach(), torch.zeros(7))), backward=True)
    programs = {phase.kind: part.program for phase, part in traced.divide(None).phases.items()}
    forward, backward = (
        sum(flops_of(o, specs_by_slot(programs[kind])) for o in programs[kind].operators) for kind in ("F", "B")
    )
    with FlopCounterMode(display=False) as meter:
        layers(x)
    assert forward == meter.get_total_flops() > 0
    assert backward == 3 * forward, "it computes the layer again, and two products for each"
    steps = program_s(programs["F"], RATES) - len(programs["F"].operators) * RATES.operator_s
    assert steps > forward / RATES.flops + 7 * RATES.operator_s, "each time step starts kernels of its own"


def single(name: str, *specs: TensorSpec, made: TensorSpec) -> Program:
    """Return a program of one operator over some inputs."""
    slots = tuple(SlotArgument(place) for place in range(len(specs)))
    operator = Operator(name, slots, {}, (len(specs),), (made,))
    return with_deaths(Program(specs, (operator,), (len(specs),), len(specs) + 1))


def test_a_filter_of_a_group_meets_the_channels_of_its_group_alone() -> None:
    maps, weight = TensorSpec("float32", (3, 4, 8, 8)), TensorSpec("float32", (8, 2, 3, 3))
    made = TensorSpec("float32", (3, 8, 8, 8))
    ones, none = Many((1, 1)), Many((0, 0))
    arguments = (SlotArgument(0), SlotArgument(1), None, ones, ones, ones, False, none, 2)
    operator = Operator("aten.convolution.default", arguments, {}, (2,), (made,))
    assert flops_of(operator, {0: maps, 1: weight, 2: made}) == 2 * (3 * 8 * 8 * 8) * (2 * 3 * 3)


def test_attention_is_counted_by_its_products() -> None:
    heads = TensorSpec("float32", (2, 4, 16, 8))
    program = single("aten._scaled_dot_product_flash_attention_for_cpu.default", heads, heads, heads, made=heads)
    assert flops_of(program.operators[0], specs_by_slot(program)) == 2 * (2 * 2 * 4 * 16 * 16 * 8)


def test_an_operator_takes_what_takes_longest_and_a_view_nothing() -> None:
    square, flat = TensorSpec("float32", (100, 100)), TensorSpec("float32", (10000,))
    product = single("aten.mm.default", square, square, made=square)
    assert program_s(product, RATES) == pytest.approx(2e6 / 1e9 + 1e-6)
    assert program_s(single("aten.relu.default", square, made=square), RATES) == pytest.approx(8e4 / 1e8 + 1e-6)
    assert program_s(single("aten.view.default", square, made=flat), RATES) == 0


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_rates_are_positive_and_finite(rate: float) -> None:
    with pytest.raises(ValueError, match="flops"):
        DeviceRates(flops=rate, bandwidth_bps=1.0, operator_s=1.0)
