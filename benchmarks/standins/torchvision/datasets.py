"""Data sets: the digits that come with onebox in the place of MNIST, and random images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from onebox.feed.datasets.in_memory import load_digits

Transform = Callable[[Any], Any] | None


class MNIST(Dataset[tuple[Any, Any]]):
    """Digits of 28 x 28 pixels.

    Args:
        root: Not used.
        train: Whether to return those for training.
        transform: Applied to images.
        target_transform: Applied to labels.
        download: Not used.
    """

    def __init__(
        self,
        root: str,
        train: bool = True,
        transform: Transform = None,
        target_transform: Transform = None,
        download: bool = False,
    ) -> None:
        digits = load_digits()
        part = digits.train if train else digits.test
        larger = part.images[:, 0].repeat_interleave(3, 1).repeat_interleave(3, 2)
        self.data, self.targets = functional.pad(larger, (2, 2, 2, 2)), part.labels
        self.transform, self.target_transform = transform, target_transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, label = self.data[index].numpy(), int(self.targets[index])
        image = self.transform(image) if self.transform else image
        return image, self.target_transform(label) if self.target_transform else label


class _Absent(Dataset[tuple[Any, Any]]):
    """A data set that is not in this stand-in."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("the stand-in has MNIST and FakeData")


CIFAR10 = CIFAR100 = KMNIST = FashionMNIST = ImageFolder = _Absent


class FakeData(Dataset[tuple[Any, int]]):
    """Random images, each the same whenever it is read.

    Args:
        size: Number of images.
        image_size: Channels, height and width.
        num_classes: Number of labels.
        transform: Applied to images, arrays of [height, width, channels].
    """

    def __init__(
        self,
        size: int = 1000,
        image_size: tuple[int, int, int] = (3, 224, 224),
        num_classes: int = 10,
        transform: Transform = None,
    ) -> None:
        self._size, self._shape, self._classes, self._transform = size, image_size, num_classes, transform

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        draw = np.random.default_rng(index)
        channels, height, width = self._shape
        image: Any = draw.integers(0, 256, (height, width, channels), dtype=np.uint8)
        return self._transform(image) if self._transform else image, int(draw.integers(self._classes))


def as_image(tensor: Tensor) -> np.ndarray:
    """Return a tensor of [channels, height, width] from 0 to 1 as an array of bytes, of [height, width, 3]."""
    array = (tensor.detach().cpu().float().clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()
    return np.repeat(array, 3, -1) if array.shape[-1] == 1 else array
