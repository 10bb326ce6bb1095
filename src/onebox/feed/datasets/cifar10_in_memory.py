"""CIFAR-10 in memory."""

from __future__ import annotations

from pathlib import Path

import torch

from onebox.errors import DataError
from onebox.feed.datasets.dataset import DataSet, Split
from onebox.feed.sources.cifar10 import Cifar10

MAX_TOTAL_BYTES = 2 << 30  # decoded, of one part: 13 x the whole training set


def load_cifar10(folder: Path) -> DataSet:
    """Load CIFAR-10 from archives of JPEG files or from its binary version.

    Args:
        folder: Holds the files: see :class:`onebox.feed.sources.Cifar10`. Samples keep the order of the files.

    Returns:
        DataSet: Images ``uint8 [N, 3, H, W]``, 32 x 32 for CIFAR-10.

    Raises:
        DataError: A file is missing or damaged, a sample has a wrong form, or the two parts do not match.
    """
    train = Cifar10(folder, "train")
    splits = _load(train, folder), _load(Cifar10(folder, "test"), folder)
    sizes = [list(split.images.shape[2:]) for split in splits]
    if sizes[0] != sizes[1]:
        problem = f"{folder}: training images have {sizes[0]} pixels, test images {sizes[1]}"
        raise DataError(f"{problem}; they do not belong together.", path=folder)
    return DataSet(name="cifar10", classes=len(train.classes), train=splits[0], test=splits[1])


def _load(source: Cifar10, folder: Path) -> Split:
    """Return all samples, in the order of the files."""
    images, labels, total_bytes = list[torch.Tensor](), list[torch.Tensor](), 0
    for index in range(len(source)):
        image_CHW, label = source.decode(source.read(index), index)
        if images and image_CHW.shape != images[0].shape:
            came, first = list(image_CHW.shape[1:]), list(images[0].shape[1:])
            problem = f"{source.name(index)} has {came} pixels; the first image has {first}"
            raise DataError(f"{problem}, and all need the same.", path=folder, sample=index)
        total_bytes += image_CHW.nbytes
        if total_bytes > MAX_TOTAL_BYTES:
            problem = f"{folder}: pictures take more than the allowed {MAX_TOTAL_BYTES} bytes in memory"
            raise DataError(f"{problem}; use a Feed of onebox.feed.sources.Cifar10, which reads them as needed.")
        images.append(image_CHW)
        labels.append(label)
    return Split(images=torch.stack(images), labels=torch.stack(labels))
