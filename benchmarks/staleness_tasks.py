"""Tasks of staleness.py: real data, models small enough for one core, and what a model gets right in the end.

All parameters are matrices, those of convolutions too, and there are no biases: so ``torch.optim.Muon``, which takes
matrices only, trains the same models as the other optimizers.
"""

from __future__ import annotations

import functools
import gzip
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
"""Real pictures; see the README there."""

CONTEXT = 64
"""Characters that the GPT sees."""

LAST_FILES = 12
"""Files of the standard library, the last by name, that the GPT is tested on and not trained on."""

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""Names of the folders in the archives of CIFAR-10."""

Batch = tuple[Tensor, Tensor]
Part = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a model is trained for.

    Args:
        name: Of the task.
        model: Makes the model, by the global random numbers.
        train: Inputs and targets to train on.
        test: Those to test on.
        batch: Samples of a batch.
        steps: Steps of a run.
        rates: The learning rate of each optimizer, good ones for the synchronous run.
        clip: The most that the norm of all gradients may be, as is usual for language models; 0 for any.
    """

    name: str
    model: Callable[[], nn.Module]
    train: Callable[[], Part]
    test: Callable[[], Part]
    batch: int
    steps: int
    rates: dict[str, float]
    clip: float = 0.0


# ---- MNIST


def _idx(name: str, skip: int) -> Tensor:
    with gzip.open(DATA / name) as file:
        return torch.from_numpy(np.frombuffer(file.read(), dtype=np.uint8, offset=skip).copy())


@functools.cache
def _mnist() -> Part:
    images = _idx("t10k-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28).float().div_(255).sub_(0.13).div_(0.31)
    return images, _idx("t10k-labels-idx1-ubyte.gz", 8).long()


class Convolution(nn.Module):
    """A convolution whose kernels are the rows of a matrix, with no bias."""

    def __init__(self, wide: int, wider: int, size: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(wider, wide * size * size))
        self.size, self.stride = size, stride
        nn.init.normal_(self.weight, std=(2 / (wide * size * size)) ** 0.5)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, C, H, W] to [B, C', H', W']."""
        kernels = self.weight.view(self.weight.shape[0], -1, self.size, self.size)
        return nn.functional.conv2d(images, kernels, stride=self.stride, padding=self.size // 2)


class Cnn(nn.Module):
    """Two convolutions and two linear layers, narrower than PyTorch's MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            Convolution(1, 8), nn.ReLU(), nn.MaxPool2d(2), Convolution(8, 16), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 64, bias=False), nn.ReLU(), nn.Linear(64, 10, bias=False)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 1, 28, 28] to logits [B, 10]."""
        logits: Tensor = self.head(self.features(images))
        return logits


# ---- CIFAR-10


@functools.cache
def _cifar(name: str) -> Part:
    images, labels = [], []
    with tarfile.open(DATA / name) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            labels.append(CLASSES.index(member.name.split("/")[-2]))
            images.append(np.asarray(Image.open(io.BytesIO(file.read())).convert("RGB")))
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float().div_(255)
    return pixels.sub_(0.47).div_(0.25), torch.tensor(labels)


class _Block(nn.Module):
    def __init__(self, wide: int, wider: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            Convolution(wide, wider, 3, stride),
            nn.GroupNorm(2, wider, affine=False),
            nn.ReLU(),
            Convolution(wider, wider),
            nn.GroupNorm(2, wider, affine=False),
        )
        self.way = nn.Sequential() if stride == 1 else Convolution(wide, wider, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.way(x))


class ResNet18(nn.Module):
    """ResNet-18 for 32 x 32 pictures, a sixteenth as wide, normalised by groups of channels instead of by the batch."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        layers: list[nn.Module] = [Convolution(3, width), nn.GroupNorm(2, width, affine=False), nn.ReLU()]
        for level in range(4):
            wide, wider = width * 2 ** max(0, level - 1), width * 2**level
            layers += [_Block(wide, wider, 1 if level == 0 else 2), _Block(wider, wider, 1)]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10, bias=False))

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 3, 32, 32] to logits [B, 10]."""
        logits: Tensor = self.body(images)
        return logits


# ---- characters


@functools.cache
def _text() -> tuple[Tensor, Tensor]:
    """Return the bytes of Python's standard library to train on, and those to test on."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    whole = [
        torch.from_numpy(np.frombuffer(file.read_bytes(), dtype=np.uint8).copy()).clamp_(max=127) for file in files
    ]
    return torch.cat(whole[:-LAST_FILES]).long(), torch.cat(whole[-LAST_FILES:]).long()


def _windows(text: Tensor) -> Part:
    count = (len(text) - 1) // CONTEXT
    return text[: count * CONTEXT].view(count, CONTEXT), text[1 : count * CONTEXT + 1].view(count, CONTEXT)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.into = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = self.into(x_BTD).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(B, T, D))
        return mixed


def _norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, elementwise_affine=False)


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(_norm(width), _Attention(width, heads))
        self.mlp = nn.Sequential(
            _norm(width),
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(x_BTD)
        return x_BTD + self.mlp(x_BTD)


class Gpt(nn.Module):
    """A GPT over single characters."""

    def __init__(self, width: int = 48, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(128, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(layers)), _norm(width))
        self.head = nn.Linear(width, 128, bias=False)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        """Map characters [B, T] to logits [B, 128, T] of the next ones."""
        x_BTD = self.characters(characters) + self.places(torch.arange(characters.shape[1]))
        logits: Tensor = self.head(self.layers(x_BTD)).transpose(1, 2)
        return logits


TASKS = {
    "mnist": Task(
        name="mnist",
        model=Cnn,
        train=lambda: tuple(part[:8000] for part in _mnist()),
        test=lambda: tuple(part[8000:] for part in _mnist()),
        batch=64,
        steps=375,
        rates={"SGD": 0.02, "AdamW": 2e-3, "Muon": 0.02},
    ),
    "cifar": Task(
        name="cifar",
        model=ResNet18,
        train=lambda: _cifar("cifar10-train.tar"),
        test=lambda: _cifar("cifar10-test.tar"),
        batch=32,
        steps=500,
        rates={"SGD": 0.03, "AdamW": 2e-3, "Muon": 0.01},
    ),
    "gpt": Task(
        name="gpt",
        model=Gpt,
        train=lambda: _windows(_text()[0]),
        test=lambda: tuple(part[:1000] for part in _windows(_text()[1])),
        batch=16,
        steps=1600,
        rates={"SGD": 0.1, "AdamW": 3e-3, "Muon": 0.01},
        clip=1.0,
    ),
}
"""The tasks; see :class:`Task`."""


def batches(task: Task, seed: int) -> Iterator[Batch]:
    """Return the batches of a run, in an order that its seed decides."""
    inputs, targets = task.train()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(inputs), generator=generator)
    for step in range(task.steps):
        start = step * task.batch % (len(inputs) // task.batch * task.batch)
        if start == 0 and step:
            order = torch.randperm(len(inputs), generator=generator)
        chosen = order[start : start + task.batch]
        yield inputs[chosen], targets[chosen]


@torch.no_grad()
def score(model: nn.Module, task: Task) -> tuple[float, float]:
    """Return the mean loss of a model on what it was not trained on, and the share that it gets right in percent."""
    inputs, targets = task.test()
    model.eval()
    loss, right, count = 0.0, 0, 0
    for some, wanted in zip(inputs.split(250), targets.split(250), strict=True):
        logits = model(some)
        loss += float(nn.functional.cross_entropy(logits, wanted, reduction="sum"))
        right += int((logits.argmax(1) == wanted).sum())
        count += wanted.numel()
    model.train()
    return loss / count, 100 * right / count
