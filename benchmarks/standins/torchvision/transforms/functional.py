"""Functions of images of Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor


class InterpolationMode(Enum):
    """Ways to compute pixels between pixels, by torchvision's names."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def get_image_size(img: Any) -> list[int]:
    """Return width and height."""
    return list(img.size)


def get_dimensions(img: Any) -> list[int]:
    """Return channels, height and width."""
    return [len(img.getbands()), img.height, img.width]


def pil_to_tensor(pic: Any) -> Tensor:
    """Return the bytes of [channels, height, width]."""
    array = np.array(pic)
    return torch.from_numpy(array[..., None] if array.ndim == 2 else array).permute(2, 0, 1)


def to_tensor(pic: Any) -> Tensor:
    """Return [channels, height, width] from 0 to 1."""
    return pil_to_tensor(pic).float() / 255


def resize(img: Any, size: int | Sequence[int], interpolation: Any = InterpolationMode.BILINEAR) -> Any:
    """Return an image of a height and width; one number is that of the shorter side."""
    if isinstance(size, int) or len(size) == 1:
        short = size if isinstance(size, int) else size[0]
        scale = short / min(img.size)
        size = (round(img.height * scale), round(img.width * scale))
    return img.resize((size[1], size[0]))


def crop(img: Any, top: int, left: int, height: int, width: int) -> Any:
    """Return a part of an image."""
    return img.crop((left, top, left + width, top + height))


def resized_crop(
    img: Any, top: int, left: int, height: int, width: int, size: Sequence[int], interpolation: Any = None
) -> Any:
    """Return a part of an image in another size."""
    return resize(crop(img, top, left, height, width), size)
