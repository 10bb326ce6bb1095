"""What ``hybrid.py`` trains: VGG-16 and ResNet-50 on pictures of 64 x 64, and two small ones for trying it out.

A model is a sequence of blocks, so that the rivals can checkpoint it block by block. Batches are pictures of CIFAR-10,
as floats, scaled from 32 x 32 to 64 x 64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from onebox.feed import load_dataset

CLASSES = 10
EDGE = 64
"""Rows and columns of a picture."""

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
"""Where the pictures are, unless another folder is named."""


def vgg16(width: int = 64) -> nn.Sequential:
    """Return VGG-16: configuration D of table 1 of Simonyan and Zisserman, 2014 (arXiv 1409.1556).

    The three linear layers at its end, made for 1,000 classes and 7 x 7 positions, are one of as many features as the
    last convolution has channels and one for the classes, with dropout: the head that is usual for CIFAR-10.

    Args:
        width: Channels of the first of the five groups; 64 in the paper.
    """
    blocks: list[nn.Module] = []
    before = 3
    for count, factor in ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8)):
        layers: list[nn.Module] = []
        for _ in range(count):
            layers += [nn.Conv2d(before, factor * width, 3, padding=1), nn.ReLU()]
            before = factor * width
        blocks.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
    positions = (EDGE // 32) ** 2
    head = [nn.Flatten(), nn.Linear(positions * before, before), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*blocks, nn.Sequential(*head, nn.Linear(before, CLASSES)))


class Bottleneck(nn.Module):
    """A block of ResNet-50: 1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut (figure 5 of the paper, right).

    The stride is in the 3 x 3 convolution, as is usual since: it costs less accuracy there.

    Args:
        before: Channels that come.
        width: Channels of the two inner convolutions; four times as many leave.
        stride: Of the block.
    """

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce = norm(nn.Conv2d(before, width, 1, bias=False))
        self.mix = norm(nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False))
        self.widen = norm(nn.Conv2d(width, 4 * width, 1, bias=False))
        same = stride == 1 and before == 4 * width
        short = nn.Conv2d(before, 4 * width, 1, stride=stride, bias=False)
        self.shortcut = nn.Identity() if same else norm(short)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map [B, before, H, W] to [B, 4 width, H / stride, W / stride]."""
        y_BCHW = functional.relu(self.mix(functional.relu(self.reduce(x_BCHW))))
        return functional.relu(self.widen(y_BCHW) + self.shortcut(x_BCHW))


def norm(layer: nn.Conv2d) -> nn.Sequential:
    """Return a convolution with batch normalisation behind it."""
    return nn.Sequential(layer, nn.BatchNorm2d(layer.out_channels))


def resnet50(width: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Sequential:
    """Return ResNet-50: table 1 of He and others, 2015 (arXiv 1512.03385), with the stem of the paper.

    Args:
        width: Channels of the first convolution and of the first group's inner ones; 64 in the paper.
        depths: Blocks of each group.
    """
    stem = [norm(nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)), nn.ReLU()]
    blocks: list[nn.Module] = [nn.Sequential(*stem, nn.MaxPool2d(3, stride=2, padding=1))]
    before = width
    for group, depth in enumerate(depths):
        for place in range(depth):
            blocks.append(Bottleneck(before, width << group, stride=2 if group and not place else 1))
            before = 4 * (width << group)
    blocks.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES)))
    return nn.Sequential(*blocks)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and how.

    Args:
        build: Makes the model from its width.
        width: Channels of its first group.
        batch: Samples of a step.
        micro_batch: Samples of a micro-batch, of which gradients are added up; all sides have the same.
        pictures: Whether the batch is of pictures; else it is of random pixels.
        search_s: The most seconds that the planner may search.
    """

    build: Callable[[int], nn.Sequential]
    width: int
    batch: int
    micro_batch: int
    pictures: bool = True
    search_s: float = 5.0

    def model(self) -> nn.Sequential:
        """Return the model, the same every time."""
        torch.manual_seed(0)
        return self.build(self.width)

    def data(self, folder: Path) -> tuple[Tensor, Tensor]:
        """Return a batch: pictures [B, 3, 64, 64] and their classes [B].

        Args:
            folder: Holds CIFAR-10.

        Raises:
            DataError: It is not there.
        """
        if not self.pictures:
            generator = torch.Generator().manual_seed(1)
            x_BCHW = torch.randn(self.batch, 3, EDGE, EDGE, generator=generator)
            return x_BCHW, torch.randint(CLASSES, (self.batch,), generator=generator)
        found = load_dataset(f"cifar10:{folder}")
        mean, std = (torch.tensor(values)[:, None, None] for values in (found.mean, found.std))
        x_BCHW = (found.train.images[: self.batch].float() / 255 - mean) / std
        x_BCHW = functional.interpolate(x_BCHW, size=(EDGE, EDGE), mode="bilinear", align_corners=False)
        return x_BCHW, found.train.labels[: self.batch].clone()


def small_resnet(width: int) -> nn.Sequential:
    """Return a ResNet of four bottlenecks."""
    return resnet50(width, (1, 1, 1, 1))


WORKLOADS = {
    "vgg16": Workload(build=vgg16, width=64, batch=128, micro_batch=64),
    "resnet50": Workload(build=resnet50, width=64, batch=128, micro_batch=64),
}
"""The models of the papers."""

QUICK = {
    "vgg16": Workload(build=vgg16, width=8, batch=16, micro_batch=8, pictures=False, search_s=0.5),
    "resnet50": Workload(build=small_resnet, width=8, batch=32, micro_batch=16, pictures=False, search_s=0.5),
}
"""Small ones, for trying the benchmark out."""


def workload(name: str, *, width: int | None, quick: bool) -> Workload:
    """Return a workload.

    Args:
        name: Of the model.
        width: Channels of its first group; its own when ``None``.
        quick: Whether it is to be a small one.
    """
    found = (QUICK if quick else WORKLOADS)[name]
    return found if width is None or quick else replace(found, width=width)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all sides."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
