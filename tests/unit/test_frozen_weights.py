"""Frozen weights as integers: what they stand for, what is changed and refused, and what a plan keeps of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import onebox
from onebox.errors import UsageError
from onebox.frozen_weights import FrozenFormat, QuantizedLinear, dequantized, frozen_bytes, quantized
from onebox.graph import ModelPrograms, TracedModel
from tests.kit.captures import capture

FORMATS: tuple[FrozenFormat, ...] = ("int8", "int4")
STEPS = {"int8": 127, "int4": 8}


class Adapted(nn.Module):
    """A frozen layer with a small trained one beside it.

    Args:
        size: Inputs and outputs.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.down, self.up = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(inputs) + self.up(self.down(inputs)))


def adapted(size: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(size), Adapted(size), nn.Linear(size, 4)).double()


@pytest.mark.parametrize("stored", FORMATS)
def test_an_element_is_off_by_half_a_step_of_its_group_at_most(stored: FrozenFormat) -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight[3] = 0
    weight[4] *= 1e-20
    codes, scales = quantized(weight, stored, 32)
    found = dequantized(codes, scales, stored, torch.float64)
    farthest = weight.view(24, 3, 32).abs().amax(-1).repeat_interleave(32, -1)
    step = farthest / STEPS[stored] * (1 + 2**-8)  # a scale has 8 bits
    beyond = step if stored == "int4" else 0 * step  # the end of the range away from the farthest element
    assert ((found - weight).abs() <= step / 2 + farthest * 2**-8 + beyond / 2).all()
    assert (found[3] == 0).all()
    assert codes.nbytes + scales.nbytes == frozen_bytes((24, 96), stored, 32)


@pytest.mark.parametrize("stored", FORMATS)
def test_codes_that_a_weight_stands_for_are_found_again(stored: FrozenFormat) -> None:
    low, high = (-127, 127) if stored == "int8" else (-8, 7)
    generator = torch.Generator().manual_seed(2)
    whole = torch.randint(low, high + 1, (6, 4, 16), generator=generator).double()
    whole[:, :, 5] = low  # else another scale fits as well
    weight = (whole * 2.0 ** torch.arange(-3, 1).view(1, 4, 1)).view(6, 64)
    assert torch.equal(dequantized(*quantized(weight, stored, 16), stored, torch.float64), weight)


@pytest.mark.parametrize("stored", FORMATS)
def test_outputs_and_gradients_are_those_of_the_weight_that_is_stood_for(stored: FrozenFormat) -> None:
    layer = nn.Linear(64, 8).requires_grad_(False).double()
    made = QuantizedLinear.of(layer, stored, 16)
    layer.weight.copy_(dequantized(made.codes, made.scales, stored, torch.float64))
    inputs = torch.randn(3, 5, 64, dtype=torch.float64, requires_grad=True)
    expected, found = layer(inputs), made(inputs)
    assert torch.equal(found, expected) or torch.allclose(found, expected, rtol=0, atol=1e-13)
    (ours,) = torch.autograd.grad(found.square().sum(), inputs)
    (theirs,) = torch.autograd.grad(expected.square().sum(), inputs)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    assert made(inputs.float()).dtype is torch.float64  # of the bias
    assert QuantizedLinear(64, 8, stored, 16)(inputs.bfloat16()).dtype is torch.bfloat16
    assert torch.allclose(made.weight.double(), layer.weight, rtol=0, atol=1e-6)


def test_only_frozen_linear_layers_of_their_own_are_changed() -> None:
    model = nn.ModuleDict(
        {
            "frozen": nn.Linear(64, 64).requires_grad_(False),
            "trained": nn.Linear(64, 64),
            "words": nn.Embedding(8, 64).requires_grad_(False),
            "tied": nn.Linear(64, 8, bias=False).requires_grad_(False),
            "lm_head": nn.Linear(64, 8).requires_grad_(False),
            "once": nn.Linear(64, 8, bias=False).requires_grad_(False),
            "twice": nn.ModuleList([nn.Linear(64, 8, bias=False).requires_grad_(False)] * 2),
        }
    )
    model["tied"].weight = model["words"].weight
    assert onebox.quantize_frozen(model) == ["frozen", "once", "twice.0"]
    assert model["twice"][0] is model["twice"][1]
    assert not any(parameter.requires_grad for parameter in model["frozen"].parameters())


def test_what_cannot_be_quantised_is_refused_and_left() -> None:
    model = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(48, 4).requires_grad_(False))
    with pytest.raises(UsageError, match=r"stored='nf4': allowed are 'int8' and 'int4'"):
        onebox.quantize_frozen(model, "nf4")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"group=64: 1 has 48 inputs; allowed are even divisors"):
        onebox.quantize_frozen(model)
    assert all(type(layer) is nn.Linear for layer in model)
    with pytest.raises(UsageError, match="no linear layer has a frozen weight of its own: freeze the model first"):
        onebox.quantize_frozen(nn.Sequential(nn.Linear(64, 64)))
    hooked = nn.Sequential(nn.Linear(64, 64).requires_grad_(False))
    hooked[0].register_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    with pytest.raises(UsageError, match="0 has hooks, which its replacement has not"):
        onebox.quantize_frozen(hooked)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64).requires_grad_(False))
    with pytest.raises(UsageError, match="no linear layer has a frozen weight of its own"):
        onebox.quantize_frozen(nn.Sequential(normed))


@pytest.mark.parametrize("stored", FORMATS)
def test_a_state_of_the_layers_before_can_be_loaded(stored: FrozenFormat) -> None:
    full = adapted()
    model, there = copy.deepcopy(full), copy.deepcopy(full)
    onebox.quantize_frozen(model, stored, group=16)
    with torch.device("meta"):
        empty = adapted()
    onebox.quantize_frozen(empty, stored, group=16)
    empty.to_empty(device="cpu").load_state_dict(there.state_dict())
    again = copy.deepcopy(empty)
    again.load_state_dict(model.state_dict())
    for loaded in (empty, again):
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("stored", FORMATS)
def test_a_plan_keeps_no_weight_from_forward_to_backward(stored: FrozenFormat) -> None:
    """Nor does it pass one from stage to stage: the largest value is one of the batch."""
    model = adapted(size=32)
    names = programs(model)[0]
    onebox.quantize_frozen(model, stored, group=16)
    quantised, made = programs(model)
    assert quantised == names  # the same cuts
    sizes = [part.specs()[port].size_bytes for part in made.phases.values() for port in part.outputs]
    assert max(sizes) == 4 * 32 * 8
    assert not any(
        port.kind == "gradient" and "base" in str(port.name) for part in made.phases.values() for port in part.outputs
    )


def programs(model: nn.Module) -> tuple[tuple[str, ...], ModelPrograms]:
    batch = torch.randn(4, 32, dtype=torch.float64), torch.randint(0, 4, (4,))
    traced = TracedModel(capture(model, functional.cross_entropy, batch), backward=True)
    return traced.segments, traced.divide([[name] for name in traced.segments])
