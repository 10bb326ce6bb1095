"""Operators of a GPU have the shapes and types that the capture on a CPU promised, in every precision.

A worker refuses an operator whose result is of another shape or type, so that a run to its end is the check; the losses
show that it computed the right thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import onebox
from tests.kit.models import CASES

pytestmark = pytest.mark.gpu

CLOSE = {"fp32": 1e-3, "bf16": 0.1}
"""Difference of the losses of two steps from those in float64, relative to them."""


@pytest.fixture(scope="module")
def pool(device: str) -> Iterator[onebox.Pool]:
    """One worker."""
    with onebox.open(device, threads=1) as pool:
        yield pool


def losses(pool: onebox.Pool, model: nn.Module, loss: Any, batches: Any, precision: str) -> list[float]:
    """Return the losses of two steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with onebox.Trainer(model, loss, optimizer, pool=pool, precision=precision, seed=1) as trainer:
        return [float(trainer.step(*batch)) for batch in batches]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_models_in_less_precision(name: str, precision: str, pool: onebox.Pool) -> None:
    case = CASES[name]
    found = losses(pool, case.model(torch.float32), case.loss, case.batches([8, 8], torch.float32), precision)
    with onebox.open("cpu", threads=1) as other:
        expected = losses(other, case.model(), case.loss, case.batches([8, 8]), "fp32")
    if case.draws:
        assert all(0 < loss < 10 for loss in found), "a GPU draws other numbers"
    else:
        assert found == pytest.approx(expected, rel=CLOSE[precision], abs=CLOSE[precision])


class Apply(nn.Module):
    """A function behind a layer with parameters.

    Args:
        function: It.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before = nn.Conv2d(6, 6, 1)
        self.function = function

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map [B, 6, H, W] to what the function makes of the layer's output."""
        return self.function(self.before(x_BCHW))


class Attend(nn.Module):
    """Scaled dot-product attention over the rows of pixels.

    Args:
        causal: Whether a pixel reads only those before it.
    """

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.before = nn.Conv2d(6, 6, 1)
        self.causal = causal

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map [B, 6, H, W] to the same shape."""
        y_BCHW = self.before(x_BCHW)
        return functional.scaled_dot_product_attention(y_BCHW, y_BCHW, y_BCHW, is_causal=self.causal)


def _frozen_norm() -> nn.Module:
    norm = nn.BatchNorm2d(6)
    norm.weight.requires_grad_(False)
    norm.bias.requires_grad_(False)
    return nn.Sequential(nn.Conv2d(6, 6, 1), norm)


def _evaluating_norm() -> nn.Module:
    """Return a batch norm that uses its running statistics in training."""
    return nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6).eval())


def _norm(layer: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(6, 6, 1), layer())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm, frozen": _frozen_norm,
    "batch norm, in evaluation": _evaluating_norm,
    "batch norm without parameters": lambda: _norm(lambda: nn.BatchNorm2d(6, affine=False)),
    "batch norm without statistics": lambda: _norm(lambda: nn.BatchNorm2d(6, track_running_stats=False)),
    "instance norm": lambda: _norm(lambda: nn.InstanceNorm2d(6, affine=True)),
    "group norm": lambda: _norm(lambda: nn.GroupNorm(3, 6)),
    "layer norm": lambda: _norm(lambda: nn.LayerNorm((6, 8, 8))),
    "rms norm": lambda: _norm(lambda: nn.RMSNorm((8,))),
    "logsigmoid": lambda: Apply(functional.logsigmoid),
    "softmax in float32": lambda: Apply(lambda x: functional.softmax(x, 1, dtype=torch.float32)),
    "rrelu": lambda: Apply(lambda x: functional.rrelu(x, 0.3, 0.3)),
    "prelu": lambda: _norm(lambda: nn.PReLU(6)),
    "max pool": lambda: Apply(lambda x: functional.max_pool2d(x, 3, 2, 1)),
    "adaptive max pool": lambda: Apply(lambda x: functional.adaptive_max_pool2d(x, 3)),
    "fractional average": lambda: Apply(lambda x: functional.adaptive_avg_pool2d(x, 3)),
    "upsampling": lambda: Apply(lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear")),
    "transposed convolution": lambda: nn.ConvTranspose2d(6, 4, 3, stride=2),
    "grouped convolution": lambda: nn.Conv2d(6, 6, 3, groups=3),
    "depthwise convolution": lambda: nn.Conv2d(6, 6, 3, groups=6, padding=1),
    "attention": lambda: Attend(causal=False),
    "causal attention": lambda: Attend(causal=True),
    "cumulative sum": lambda: Apply(lambda x: x.cumsum(1)),
    "sorted": lambda: Apply(lambda x: x.sort(1).values),
    "top two": lambda: Apply(lambda x: x.topk(2, 1).values),
    "indexed": lambda: Apply(lambda x: x[:, torch.tensor([0, 2, 2])]),
    "standard deviation": lambda: Apply(lambda x: x.std(1)),
}


def _mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss that needs nothing of the targets but their number."""
    return outputs.square().mean() + 0 * targets.sum()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_a_gpu_computes_otherwise(name: str, precision: str, pool: onebox.Pool) -> None:
    torch.manual_seed(0)
    model = LAYERS[name]()
    inputs = torch.randn(8, 6, 8, 8)
    batches = [(inputs, torch.zeros(8))] * 2
    twin = LAYERS[name]().double()
    twin.load_state_dict(model.state_dict())
    found = losses(pool, model, _mean_square, batches, precision)
    expected = []
    optimizer = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        value = _mean_square(twin(batch[0].double()), batch[1].double())
        value.backward()
        optimizer.step()
        expected.append(float(value.detach()))
    assert found == pytest.approx(expected, rel=CLOSE[precision], abs=CLOSE[precision])
