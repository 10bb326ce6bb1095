"""Lazy modules on a virtual device: moved, converted and loaded before they have shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("pool")


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))


def _images(device: str) -> Tensor:
    return (torch.arange(2 * 3 * 8 * 8, dtype=torch.float64) / 100).view(2, 3, 8, 8).to(device)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_that_was_moved_is_the_one_of_the_cpu() -> None:
    found = {}
    for device in ("cpu", "vgpu:1"):
        torch.manual_seed(0)
        module = _lazy().to(device).to(torch.float64)
        first = module(_images(device))
        first.sum().backward()
        slopes = [parameter.grad.cpu() for parameter in module.parameters() if parameter.grad is not None]
        found[device] = (first.detach().cpu(), slopes, {k: v.cpu() for k, v in module.state_dict().items()})
        assert {parameter.device for parameter in module.parameters()} == {torch.device(device)}
        assert all(isinstance(parameter, nn.Parameter) for parameter in module.parameters())
        assert not any("Lazy" in type(part).__name__ for part in module)
    assert len(found["cpu"][1]) == 6
    torch.testing.assert_close(found["vgpu:1"], found["cpu"], rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_takes_its_shapes_from_a_state() -> None:
    trained = _lazy().to(torch.float64)
    expected = trained(_images("cpu"))
    loaded = _lazy().to("vgpu:0").to(torch.float64)
    loaded.load_state_dict(trained.state_dict())
    trained.eval(), loaded.eval()
    torch.testing.assert_close(loaded(_images("vgpu:0")).cpu(), trained(_images("cpu")), rtol=1e-12, atol=1e-12)
    assert expected.shape == (2, 5)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_goes_back_before_it_has_shapes() -> None:
    module = _lazy().to("vgpu:0").cpu().to(torch.float64)
    assert module(_images("cpu")).device.type == "cpu"
