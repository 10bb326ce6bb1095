"""The model of ``slow_links.py``, a character GPT, with the text that it reads, its batches and its optimizer.

The text is the source of Python's standard library, which every machine has that runs this: each sixteenth file is
held out. All of it depends on a seed and a step only, so that all sides read the same.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

CHARACTERS = 128
"""Of ASCII; others count as the last one."""

HELD_OUT = 16
"""One file of so many is not trained on."""

RISE, FLOOR = 0.1, 0.1
"""The part of a run over which the learning rate rises, and the part of it that is left in the end."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a model and of what it reads in a step.

    Args:
        width: Of each token.
        layers: Of attention and perceptron.
        heads: Of attention.
        context: Characters of a sequence.
        batch: Sequences of a step, over all devices.
        held_out: Sequences of the held-out text on which a loss is measured.
        rate: The highest learning rate.
    """

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    held_out: int
    rate: float

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.context


SIZES = {
    "tiny": Size(width=32, layers=2, heads=2, context=16, batch=16, held_out=64, rate=3e-3),
    "full": Size(width=384, layers=3, heads=6, context=64, batch=64, held_out=512, rate=1e-3),
}
"""``full`` has 5.4 million parameters."""


def size_of(name: str, batch: int = 0) -> Size:
    """Return sizes by their name, with another batch if one is given."""
    return replace(SIZES[name], batch=batch) if batch else SIZES[name]


class _Layer(nn.Module):
    """Attention and a perceptron, each behind a norm and added to what it reads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        mixed = self.into(self.before_attention(x_BTD))
        q, k, v = mixed.view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.perceptron(self.before_perceptron(x_BTD))


class Gpt(nn.Module):
    """A GPT over single characters.

    Args:
        size: Its sizes.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.layers = nn.Sequential(*(_Layer(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, CHARACTERS, bias=False)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        """Map characters [B, T], uint8, to logits [B, 128, T] of the next ones."""
        x_BTD = self.characters(characters.long()) + self.places(torch.arange(characters.shape[1]))
        logits: Tensor = self.head(self.norm(self.layers(x_BTD))).transpose(1, 2)
        return logits


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of logits [B, 128, T] for the characters [B, T], uint8, that come next."""
    return nn.functional.cross_entropy(logits, targets.long())


def made(size: Size, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Gpt, torch.optim.Optimizer]:
    """Return a model and its optimizer, the same for each seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = Gpt(size).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=size.rate, betas=(0.9, 0.95), weight_decay=0.1)


def rate_factor(step: int, steps: int) -> float:
    """Return the learning rate of a step as a part of the highest: up in a line, and down by a cosine.

    Args:
        step: From 0.
        steps: Of the run; 0 for one that has the highest rate always.
    """
    if not steps:
        return 1.0
    rise = max(1, round(RISE * steps))
    falling = FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
    return min(1.0, (step + 1) / rise) * falling


@functools.cache
def text() -> tuple[Tensor, Tensor]:
    """Return the characters to train on and those that are held out, uint8."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    read = [
        torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).clamp_(max=CHARACTERS - 1) for file in files
    ]
    held_out = [each for place, each in enumerate(read) if place % HELD_OUT == HELD_OUT - 1]
    return torch.cat([each for place, each in enumerate(read) if place % HELD_OUT != HELD_OUT - 1]), torch.cat(held_out)


def _windows(characters: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    places = starts[:, None] + torch.arange(context + 1)
    rows = characters[places]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batch(size: Size, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets [B, T] of a step, uint8, anywhere in the text."""
    training = text()[0]
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    starts = torch.randint(len(training) - size.context, (size.batch,), generator=generator)
    return _windows(training, starts, size.context)


def part(whole: tuple[Tensor, Tensor], rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return the part of a batch that one of several devices reads.

    Raises:
        ValueError: The batch is not a multiple of the devices, so that their tokens would not be equal.
    """
    rows = len(whole[0])
    if rows % ranks:
        raise ValueError(
            f"{rows} sequences for {ranks} devices: a multiple is needed, so that all read the same number"
        )
    own = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
    return whole[0][own], whole[1][own]


@torch.no_grad()
def held_out_loss(model: nn.Module, size: Size) -> float:
    """Return the mean loss of a model on sequences that are spread over the held-out text."""
    characters = text()[1]
    starts = torch.linspace(0, len(characters) - size.context - 1, size.held_out).long()
    inputs, targets = _windows(characters, starts, size.context)
    losses = [loss_of(model(x), y) for x, y in zip(inputs.split(64), targets.split(64), strict=True)]
    weights = [len(x) for x in inputs.split(64)]
    return sum(float(loss) * weight for loss, weight in zip(losses, weights, strict=True)) / size.held_out
