"""MNIST, and the data sets in its format, in memory."""

from __future__ import annotations

from pathlib import Path

from onebox.errors import DataError
from onebox.feed.datasets.dataset import DataSet, Split
from onebox.feed.sources.mnist import CLASSES, Mnist


def load_mnist(folder: Path) -> DataSet:
    """Load MNIST from its IDX files, each gzipped (``.gz``) or not.

    Args:
        folder: Holds the files, of which the training files may be absent: see :class:`onebox.feed.sources.Mnist`.

    Returns:
        DataSet: Images ``uint8 [N, 1, H, W]``, 28 x 28 for MNIST.

    Raises:
        DataError: A file is missing or damaged, or two of them do not match.
    """
    test, train = Mnist(folder, "test"), Mnist(folder, "train")
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        sizes = f"{list(train.inputs.shape[2:])} and {list(test.inputs.shape[2:])}"
        raise DataError(
            f"{folder}: training and test images have {sizes} pixels; they do not belong together.",
            path=folder,
        )
    splits = (Split(images=part.inputs, labels=part.labels) for part in (train, test))
    return DataSet(name="mnist", classes=CLASSES, train=next(splits), test=next(splits))
