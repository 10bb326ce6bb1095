"""Small models of the recording, with weights and batches that every machine makes alike: fractions drawn as integers.

They are kept apart from the models of the other tests, whose changes would change the recording. Shape letters:
B samples, C channels, H rows, W columns, T words, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

CLASSES = 5
WORDS = 19
TOKENS = 4

Batch = tuple[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its data.

    Args:
        build: Makes the model.
        data: Makes inputs and targets of so many samples from a generator.
        segments: The names of its segments, in their order.
        loss: Maps (outputs, targets) to a mean over samples.
    """

    build: Callable[[], nn.Module]
    data: Callable[[int, torch.Generator], Batch]
    segments: tuple[str, ...]
    loss: Callable[[Any, Any], Tensor] = field(default=functional.cross_entropy)

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """Return the model with the same weights each time."""
        model = self.build().to(dtype)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                scale = 1.0 if parameter.dim() == 1 else 2.0 / max(1, parameter[0].numel()) ** 0.5
                parameter.copy_(fractions(tuple(parameter.shape), generator) * round(scale * 64) / 64)
        return model

    def batches(self, sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Batch]:
        """Return a batch of each size, the same each time."""
        generator = torch.Generator().manual_seed(11)
        found = [self.data(size, generator) for size in sizes]
        return pytree.tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, found)


def fractions(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return multiples of 1/256 from -1 to 1, in float64."""
    return torch.randint(-256, 257, shape, generator=generator).double() / 256


def classes(size: int, generator: torch.Generator) -> Tensor:
    """Return a class for each sample."""
    return torch.randint(CLASSES, (size,), generator=generator)


def features(size: int, generator: torch.Generator) -> Batch:
    """Return features [B, 10] and classes [B]."""
    return fractions((size, 10), generator) * 2, classes(size, generator)


def images(size: int, generator: torch.Generator) -> Batch:
    """Return images [B, 2, 16, 16] and classes [B]: large enough for their activations to be offloaded."""
    return fractions((size, 2, 16, 16), generator) * 2, classes(size, generator)


def words(size: int, generator: torch.Generator) -> Batch:
    """Return words [B, T] and classes [B]."""
    return torch.randint(WORDS, (size, TOKENS), generator=generator), classes(size, generator)


def deep() -> nn.Module:
    """Four linear layers."""
    return nn.Sequential(
        *(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)),
        *(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, CLASSES)),
    )


def cnn() -> nn.Module:
    """Four convolutions with batch norm, and a linear layer."""
    layers: list[nn.Module] = []
    for before, channels in ((2, 8), (8, 8), (8, 12), (12, 12)):
        layers += [nn.Conv2d(before, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, CLASSES))


class Tied(nn.Module):
    """A weight in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.other = nn.Linear(10, 10)
        self.other.weight = self.first.weight
        self.head = nn.Linear(10, CLASSES)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Classify features [B, 10]."""
        x_BD = torch.tanh(self.first(x_BD))
        return self.head(torch.tanh(self.other(x_BD)) @ self.other.weight)


class Recurrent(nn.Module):
    """An LSTM of two layers and a GRU in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 10, num_layers=2, batch_first=True)
        self.gru = nn.GRU(10, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Classify words [B, T]."""
        states_BTD, _ = self.lstm(self.embed(x_BT))
        states_BTD, _ = self.gru(states_BTD)
        return self.head(states_BTD[:, -1])


class Dropping(nn.Module):
    """Dropout between layers, in attention, and as ``functional.dropout``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 12)
        self.attend = nn.MultiheadAttention(12, 3, dropout=0.2, batch_first=True)
        self.body = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 12))
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Classify words [B, T]."""
        x_BTD = functional.dropout(self.embed(x_BT), 0.1, self.training)
        y_BTD, _ = self.attend(x_BTD, x_BTD, x_BTD, need_weights=False)
        return self.head((x_BTD + self.body(x_BTD + y_BTD)).mean(1))


class Wide(nn.Module):
    """A layer for each of many optimizers, and GELU written out, as Hugging Face's GPT-2 does it."""

    def __init__(self, layers: int = 13) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(layers))
        self.head = nn.Linear(10, CLASSES)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Classify features [B, 10]."""
        total_BD = x_BD
        for layer in self.layers:
            y_BD = layer(x_BD)
            total_BD = total_BD + 0.5 * y_BD * (1.0 + torch.tanh(0.7978845608 * (y_BD + 0.044715 * y_BD**3)))
        return self.head(total_BD)


CASES: dict[str, Case] = {
    "deep": Case(build=deep, data=features, segments=("model.0", "model.2", "model.5", "model.7")),
    "cnn": Case(build=cnn, data=images, segments=("model.0", "model.3", "model.6", "model.9", "model.14")),
    "tied": Case(build=Tied, data=features, segments=("model.first", "model.other", "model", "model.head")),
    "recurrent": Case(
        build=Recurrent,
        data=words,
        segments=("model.embed", "model.lstm", "model.lstm#2", "model.gru", "model.head"),
    ),
    "dropping": Case(
        build=Dropping,
        data=words,
        segments=(
            *("model.embed", "model.attend", "model.attend#2"),
            *("model.body.0", "model.body.3", "model.head"),
        ),
    ),
    "gelu": Case(build=lambda: Wide(2), data=features, segments=()),
    "wide": Case(build=Wide, data=features, segments=()),
}
