"""What both sides of ``pipeline.py`` train: models made of parts that take about equally long, and parts that sleep.

A stage is one or more neighbouring parts. Nothing but one tensor goes from a part to the next.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.9
_PR_SET_TIMERSLACK = 29
"""Of ``prctl(2)``: by how many nanoseconds the kernel may let a sleep of this thread end late."""


class Parts(nn.Module):
    """Parts, one behind the other.

    Args:
        parts: They.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, value: Tensor) -> Tensor:
        """Return what the last part makes of a value."""
        for part in self.parts:
            value = part(value)
        return value


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its data.

    Args:
        make: Makes the parts, the same every time.
        loss: Maps (outputs, targets) to a mean over samples.
        inputs: Makes the inputs of so many samples.
        classes: Targets are class numbers below this.
        positions: Targets of a sample.
        micro_batch: Samples of a micro-batch.
        count: Micro-batches of a batch.
    """

    make: Callable[[], list[nn.Module]]
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Callable[[int], Tensor]
    classes: int
    positions: int
    micro_batch: int
    count: int

    @property
    def batch(self) -> int:
        """Samples of a batch."""
        return self.micro_batch * self.count

    def model(self, dtype: torch.dtype = torch.float32) -> Parts:
        """Return the model, the same every time."""
        torch.manual_seed(0)
        return Parts(self.make()).to(dtype)

    def data(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a batch, the same every time."""
        torch.manual_seed(1)
        shape = (self.batch,) if self.positions == 1 else (self.batch, self.positions)
        return self.inputs(self.batch), torch.randint(0, self.classes, shape)


def sgd(parameters: Any) -> torch.optim.SGD:
    """Return the optimizer of both sides."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=MOMENTUM)


# ---- a convolutional network


class Pixels(nn.Module):
    """From bytes to numbers from 0 to 1, of the type of a parameter that comes next."""

    def __init__(self, following: nn.Conv2d) -> None:
        super().__init__()
        self.following = following

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8 images [B, 3, 32, 32] to what the first convolution makes of them."""
        return self.following(images.to(self.following.weight.dtype) / 255)


def _cnn() -> list[nn.Module]:
    """Return a network of the VGG kind for images of 32 x 32: seven convolutions, two linear layers."""

    def conv(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]

    return [
        nn.Sequential(Pixels(nn.Conv2d(3, 32, 3, padding=1)), nn.ReLU(), nn.MaxPool2d(2), *conv(32, 48)),
        nn.Sequential(*conv(48, 64), nn.MaxPool2d(2), *conv(64, 64)),
        nn.Sequential(*conv(64, 128), *conv(128, 96), nn.MaxPool2d(2)),
        nn.Sequential(
            *conv(96, 192), *conv(192, 192), nn.Flatten(), nn.Linear(3072, 128), nn.ReLU(), nn.Linear(128, 10)
        ),
    ]


# ---- a transformer

_TOKENS, _WORDS, _WIDTH, _HEADS = 64, 256, 160, 5


class Block(nn.Module):
    """A block with its normalisations behind the sums, so that one tensor goes from block to block."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.merge = nn.Linear(_WIDTH, _WIDTH)
        self.first = nn.LayerNorm(_WIDTH)
        self.widen = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.narrow = nn.Linear(4 * _WIDTH, _WIDTH)
        self.second = nn.LayerNorm(_WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map [B, T, D] to the same."""
        batch, tokens, width = x_BTD.shape
        heads = self.project(x_BTD).view(batch, tokens, 3, _HEADS, width // _HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = self.first(x_BTD + self.merge(mixed.transpose(1, 2).reshape(batch, tokens, width)))
        return self.second(x_BTD + self.narrow(nn.functional.gelu(self.widen(x_BTD))))


def _transformer() -> list[nn.Module]:
    parts: list[nn.Module] = [Block() for _ in range(4)]
    parts[0] = nn.Sequential(nn.Embedding(_WORDS, _WIDTH), parts[0])
    parts[3] = nn.Sequential(parts[3], nn.Linear(_WIDTH, _WORDS))
    return parts


def _by_word(logits: Tensor, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


CASES = {
    "cnn": Case(
        make=_cnn,
        loss=nn.functional.cross_entropy,
        inputs=lambda count: torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8),
        classes=10,
        positions=1,
        micro_batch=24,
        count=8,
    ),
    "transformer": Case(
        make=_transformer,
        loss=_by_word,
        inputs=lambda count: torch.randint(0, _WORDS, (count, _TOKENS)),
        classes=_WORDS,
        positions=_TOKENS,
        micro_batch=8,
        count=8,
    ),
}


# ---- layers for devices that compute nothing


@dataclass(frozen=True, kw_only=True)
class Linears:
    """A row of small linear layers, one a part; what they take is emulated.

    Args:
        parts: How many parts.
        count: Micro-batches of a batch.
        micro_batch: Samples of each.
        tokens: Of a sample; without any, a sample is one vector and there is no embedding.
        width: Of the layers.
    """

    parts: int
    count: int
    micro_batch: int = 1
    tokens: int = 0
    width: int = 8

    def case(self) -> Case:
        """Return it."""
        return Case(
            make=self._make,
            loss=_by_word if self.tokens else nn.functional.cross_entropy,
            inputs=self._inputs,
            classes=self.width,
            positions=self.tokens or 1,
            micro_batch=self.micro_batch,
            count=self.count,
        )

    def _make(self) -> list[nn.Module]:
        width = self.width
        if not self.tokens:
            return [nn.Linear(width, width, bias=False) for _ in range(self.parts)]
        return [nn.Embedding(_WORDS, width), *(nn.Linear(width, width) for _ in range(self.parts))]

    def _inputs(self, samples: int) -> Tensor:
        return torch.randint(0, _WORDS, (samples, self.tokens)) if self.tokens else torch.zeros(samples, self.width)


# ---- parts that sleep


def wake_on_time() -> None:
    """Let this thread's sleeps end when they are due, as the emulated devices of onebox do."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


class _Slow(torch.autograd.Function):
    """Sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward_s: float, backward_s: float) -> Tensor:
        """Return a copy, so many seconds later."""
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient, so many seconds later."""
        time.sleep(ctx.backward_s)
        return gradient.clone(), None, None


class Sleeper(nn.Module):
    """A part that sleeps for each of forward, input gradient and weight gradient, in nodes of their own.

    Args:
        seconds: Of each of the three.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.seconds = seconds

    def forward(self, value: Tensor) -> Tensor:
        """Map [B, 8] to the same."""
        return _Slow.apply(value, self.seconds, self.seconds) + _Slow.apply(self.weight, 0.0, self.seconds)


def sleepers(parts: int, seconds: float, count: int) -> Case:
    """Return a model of parts that sleep.

    Args:
        parts: How many.
        seconds: Of forward, input gradient and weight gradient of each.
        count: Micro-batches, each of one sample.
    """
    return Case(
        make=lambda: [Sleeper(seconds) for _ in range(parts)],
        loss=nn.functional.cross_entropy,
        inputs=lambda samples: torch.zeros(samples, 8),
        classes=8,
        positions=1,
        micro_batch=1,
        count=count,
    )


# ---- where stages are

STAGES_PER_DEVICE = {"interleaved": 2, "zbv": 2}
"""Of schedules that have several."""


def place(schedule: str, stage: int, devices: int) -> int:
    """Return the device of a stage: round and round for ``interleaved``, there and back for the others with two."""
    lap, position = divmod(stage, devices)
    return position if lap == 0 or schedule == "interleaved" else devices - 1 - position
