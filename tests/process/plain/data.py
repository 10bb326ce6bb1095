"""Small models and batches that the cases share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FEATURES, CLASSES, SAMPLES = 8, 4, 16


def randn(*shape: int, seed: int = 1) -> Tensor:
    """Return normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, *shape: int, seed: int = 2) -> Tensor:
    """Return integers from ``low`` up to but without ``high``."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def labelled(count: int = 4, samples: int = SAMPLES, shape: tuple[int, ...] = (FEATURES,)) -> list[tuple[Any, Tensor]]:
    """Return batches of inputs of a shape with labels."""
    return [(randn(samples, *shape, seed=n), integers(0, CLASSES, samples, seed=100 + n)) for n in range(count)]


def tokens(count: int = 3, length: int = 5, kinds: int = 20) -> list[tuple[Any, Tensor]]:
    """Return batches of token numbers with labels."""
    return [
        (integers(0, kinds, SAMPLES, length, seed=n), integers(0, CLASSES, SAMPLES, seed=100 + n)) for n in range(count)
    ]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def still(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that leaves the weights as they are."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def mlp() -> nn.Sequential:
    """8 to 16 to 4."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))


class Between(nn.Module):
    """Two linear layers with something between.

    Args:
        between: From (module, hidden values [B, 8]) to values [B, 8].
    """

    def __init__(self, between: Callable[[Any, Tensor], Tensor] = lambda module, h: h.relu()) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, CLASSES)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, 8] to [B, 4]."""
        return self.last(self.between(self, self.first(x)))
