"""Images in files."""

from __future__ import annotations

from typing import Any

import matplotlib.image
import torch
from torch import Tensor

from torchvision.datasets import as_image


def save_image(tensor: Tensor, fp: str, nrow: int = 8, normalize: bool = False, **others: Any) -> None:
    """Write images of [count, channels, height, width] into one file, in rows."""
    images = tensor.detach().cpu()
    if normalize:
        images = (images - images.min()) / (images.max() - images.min()).clamp(min=1e-6)
    rows = [torch.cat(list(row), -1) for row in images.split(nrow) if len(row) == nrow]
    matplotlib.image.imsave(fp, as_image(torch.cat(rows or [torch.cat(list(images), -1)], -2)))
