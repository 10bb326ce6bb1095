"""A model on any device is captured as one on the host is, and is left as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from onebox.graph import model_programs
from onebox.graph.capture.export import capture
from onebox.graph.capture.host_devices import HostDevices, on_host


class Model(nn.Module):
    """A weight with two names, a recurrent layer (which lists its weights itself), a buffer, a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.lstm = nn.LSTM(3, 3)
        self.register_buffer("offset", torch.ones(3))
        self.scale = torch.full((3,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        here = self.first.weight.device
        x = self.second(self.first(x.to(here))) * self.scale.to(device=here) + torch.zeros(3, device=here)
        return self.lstm(self.frozen(x + self.offset))[0].to(here, torch.float32)


def test_a_model_elsewhere_gives_the_same_programs() -> None:
    model = Model()
    elsewhere = copy.deepcopy(model).to("meta")
    elsewhere.second.weight = elsewhere.first.weight
    example = torch.ones(2, 3), torch.ones(2, 3)
    programs = [model_programs(capture(each, mse_loss, example), backward=True) for each in (model, elsewhere)]
    assert programs[0].forward == programs[1].forward
    assert programs[0].backward == programs[1].backward
    assert programs[0].constants.keys() == programs[1].constants.keys()
    assert all(parameter.device.type == "meta" for parameter in elsewhere.parameters())


def test_a_constant_keeps_its_values() -> None:
    (constant,) = model_programs(
        capture(Model(), mse_loss, (torch.ones(2, 3), torch.ones(2, 3))), backward=True
    ).constants.values()
    assert torch.equal(constant, torch.full((3,), 2.0))


def test_everything_is_put_back() -> None:
    model = Model().to("meta")
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    flat = [id(tensor) for tensor in model.lstm._flat_weights]
    with on_host(model):
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
        assert {tensor.device.type for tensor in model.lstm._flat_weights} == {"cpu"}
        assert not model.frozen.weight.requires_grad
        assert model.first.weight.requires_grad
        assert isinstance(model.first.weight, nn.Parameter)
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == before
    assert [id(tensor) for tensor in model.lstm._flat_weights] == flat


def test_it_is_put_back_after_an_error() -> None:
    model = nn.Linear(2, 2, device="meta")
    weight = model.weight
    with pytest.raises(KeyError), on_host(model):
        raise KeyError
    assert model.weight is weight


def test_devices_that_forward_names_are_the_host() -> None:
    x = torch.ones(2)
    with HostDevices():
        made = [
            x.to("meta"),
            x.to("meta", torch.float64),
            x.to(device="meta"),
            x.to(torch.device("meta")),
            torch.zeros(2, device="meta"),
            x.new_zeros(2, device=torch.device("meta")),
            x.to(torch.float64),
            x.to(x, True),
        ]
        assert torch.device("meta").type == "meta"
        assert torch.device(type="meta", index=1).index == 1
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert made[1].dtype == torch.float64
