"""Transforms of images, which are arrays of [height, width] or [height, width, channels], or of Pillow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchvision.transforms import functional
from torchvision.transforms.functional import InterpolationMode

__all__ = [
    "CenterCrop",
    "Compose",
    "InterpolationMode",
    "Lambda",
    "Normalize",
    "RandomHorizontalFlip",
    "Resize",
    "ToTensor",
    "functional",
]


class Compose:
    """Transforms, one after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class Lambda:
    """A function."""

    def __init__(self, lambd: Callable[[Any], Any]) -> None:
        self.lambd = lambd

    def __call__(self, image: Any) -> Any:
        return self.lambd(image)


class ToTensor:
    """To a tensor of [channels, height, width] from 0 to 1."""

    def __call__(self, image: np.ndarray) -> Tensor:
        array = image[..., None] if image.ndim == 2 else image
        return torch.from_numpy(array).permute(2, 0, 1).float() / 255


class Normalize:
    """Differences from a mean, in deviations."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = (torch.as_tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __call__(self, image: Tensor) -> Tensor:
        return (image - self.mean) / self.std


class Resize:
    """To a size; arrays by repeating or leaving out pixels."""

    def __init__(self, size: int | Sequence[int], interpolation: InterpolationMode | None = None) -> None:
        self.size = size

    def __call__(self, image: Any) -> Any:
        if not isinstance(image, np.ndarray):
            return functional.resize(image, self.size)
        assert isinstance(self.size, int)
        rows, columns = (np.arange(self.size) * side // self.size for side in image.shape[:2])
        return image[rows][:, columns]


class RandomHorizontalFlip:
    """Mirror an image of Pillow with a probability."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, image: Any) -> Any:
        return image.transpose(0) if torch.rand(()) < self.p else image  # 0: left to right


CenterCrop = Resize
