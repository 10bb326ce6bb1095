"""The data set: samples to train and to test on, and the statistics to normalise them with.

Shape letters: N samples, C channels, H and W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from onebox.errors import UsageError
from onebox.feed.source import Source
from onebox.feed.sources.arrays import Arrays


class Data(Protocol):
    """A data set of images in classes, in memory or in files."""

    @property
    def name(self) -> str:
        """Name for display, such as ``digits``."""
        ...

    @property
    def classes(self) -> int:
        """Number of classes."""
        ...

    @property
    def train(self) -> Source:
        """Samples to train on: pairs of an image ``uint8 [C, H, W]`` and the number of a class."""
        ...

    @property
    def test(self) -> Source:
        """Samples to test on."""
        ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images."""
        ...

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of each channel, scaled to [0, 1]."""
        ...

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of each channel likewise; 1.0 for one that is constant."""
        ...

    def example(self, count: int) -> tuple[Tensor, Tensor]:
        """Images ``uint8 [B, C, H, W]`` and labels ``int64 [B]`` of the first samples to train on, at most so many."""
        ...


class Split(Arrays):
    """Images and their labels in memory, in a fixed order.

    Args:
        images: ``uint8 [N, C, H, W]``, 0 to 255.
        labels: ``int64 [N]``.

    Raises:
        UsageError: A wrong type or shape, no sample, or not one label for each image.

    Example:
        >>> import torch
        >>> split = Split(images=torch.zeros(5, 1, 8, 8, dtype=torch.uint8), labels=torch.arange(5))
        >>> len(split)
        5
    """

    def __init__(self, *, images: Tensor, labels: Tensor) -> None:
        if images.dtype != torch.uint8 or images.dim() != 4 or images.numel() == 0:
            raise UsageError(f"images are {_describe(images)}; they have to be uint8 [N, C, H, W], none of them 0.")
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise UsageError(f"labels are {_describe(labels)}; they have to be int64 [{len(images)}], one an image.")
        super().__init__(images, labels, where="in memory")
        self._labels = labels

    @property
    def images(self) -> Tensor:
        """``uint8 [N, C, H, W]``."""
        return self.inputs

    @property
    def labels(self) -> Tensor:
        """``int64 [N]``."""
        return self._labels


@dataclass(frozen=True, kw_only=True, eq=False)
class DataSet:
    """A classification data set in memory.

    Args:
        name: Name for display, such as ``digits``.
        classes: Number of classes; every label is in ``[0, classes)``.
        train: Samples to train on.
        test: Samples to test on, of the same image shape.

    Attributes:
        mean: Mean of each channel of the training images, scaled to [0, 1].
        std: Standard deviation (of the population) likewise; 1.0 for a channel that is constant, so that
            dividing by it is always safe.

    Raises:
        UsageError: A label outside of the classes, or splits of different image shapes.
    """

    name: str
    classes: int
    train: Split
    test: Split
    mean: tuple[float, ...] = field(init=False)
    std: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.train.images.shape[1:] != self.test.images.shape[1:]:
            shapes = f"{_describe(self.train.images)} and {_describe(self.test.images)}"
            raise UsageError(f"{self.name}: training and test images are {shapes}; C, H and W have to agree.")
        for split in (self.train, self.test):
            low, high = int(split.labels.min()), int(split.labels.max())
            if low < 0 or high >= self.classes:
                raise UsageError(f"{self.name}: labels go from {low} to {high}; allowed are 0 to {self.classes - 1}.")
        mean, std = channel_statistics(self.train.images)
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    def example(self, count: int) -> tuple[Tensor, Tensor]:
        """Images and labels of the first samples to train on, ``count`` at most."""
        return self.train.images[:count], self.train.labels[:count]


def channel_statistics(images_NCHW: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, scaled to [0, 1]; a constant channel's deviation is 1.

    From the histogram of the 256 levels: exact counts, the same on every machine, and no float copy of the
    images.
    """
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in images_NCHW.unbind(1):
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = (share * levels).sum()
        std = (share * (levels - mean).square()).sum().sqrt()
        means.append(mean.item())
        stds.append(std.item() if channel.min() != channel.max() else 1.0)
    return tuple(means), tuple(stds)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
