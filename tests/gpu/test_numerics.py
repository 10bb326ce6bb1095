"""Precision and determinism are what was asked for: no TF32 by itself, and the same bits twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import onebox

pytestmark = pytest.mark.gpu

ROUNDED = 1e-5
"""Relative error of products of 512 float32 numbers; those of TF32 have 1e-3."""


@pytest.fixture(scope="module")
def pool(device: str) -> Iterator[onebox.Pool]:
    """One worker."""
    with onebox.open(device, threads=1) as pool:
        yield pool


def _product() -> nn.Module:
    return nn.Linear(512, 64, bias=False)


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (32, 4, 4)), nn.Conv2d(32, 64, 4, bias=False), nn.Flatten())


def _largest(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the largest difference, so that no other is hidden in a mean."""
    return (outputs - targets).abs().max()


def _error(make: Callable[[], nn.Module], pool: onebox.Pool, numerics: onebox.Numerics) -> float:
    """Return the largest error of a step's outputs, relative to the largest output."""
    torch.manual_seed(0)
    model = make()
    inputs = torch.randn(64, 512)
    exact = model.double()(inputs.double()).detach()
    model.float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = onebox.Engine(numerics=numerics)
    with onebox.Trainer(model, _largest, optimizer, pool=pool, engine=engine) as trainer:
        return float(trainer.step(inputs, exact.float())) / float(exact.abs().max())


@pytest.mark.parametrize("make", [_product, _convolution])
def test_float32_is_no_tf32_where_it_is_not_to_be(make: Callable[[], nn.Module], pool: onebox.Pool) -> None:
    assert _error(make, pool, onebox.Numerics(matmul="highest", tf32_convolutions=False)) <= ROUNDED


@pytest.mark.parametrize("make", [_product, _convolution])
def test_float32_is_tf32_where_it_may_be(make: Callable[[], nn.Module], pool: onebox.Pool, on_gpu: None) -> None:
    if torch.cuda.get_device_capability(0) < (8, 0):
        pytest.skip("this GPU has no TF32")
    assert _error(make, pool, onebox.Numerics(matmul="high", tf32_convolutions=True)) > ROUNDED


def test_the_same_bits_twice(pool: onebox.Pool) -> None:
    """Convolutions and pools, whose gradients a GPU may add up in any order."""

    engine = onebox.Engine(numerics=onebox.Numerics(deterministic=True))

    def trained() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        with onebox.Trainer(model, nn.functional.cross_entropy, optimizer, pool=pool, seed=3, engine=engine) as trainer:
            return [
                float(trainer.step(torch.randn(16, 3, 16, 16, generator=generator), torch.arange(16) % 10))
                for _ in range(5)
            ]

    assert trained() == trained()
