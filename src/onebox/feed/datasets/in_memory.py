"""Data sets in memory: the default one, handwritten digits that come with the package (``data/NOTICE`` has source and
licence); MNIST and the data sets in its format; CIFAR-10."""

from __future__ import annotations

import gzip
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from onebox.errors import DataError
from onebox.feed.datasets.dataset import DataSet, Split
from onebox.feed.sources.cifar10 import Cifar10
from onebox.feed.sources.mnist import CLASSES as MNIST_CLASSES
from onebox.feed.sources.mnist import Mnist

CLASSES = 10
LEVEL_SCALE = 255 / 16  # the scans have levels 0 to 16; this takes 16 to 255
TEST_EVERY = 5  # of each class, the fifth, tenth, ... sample is for testing
SPLIT_SEED = 0

MAX_TOTAL_BYTES = 2 << 30  # decoded, of one part of CIFAR-10: 13 x its whole training set


def load_digits() -> DataSet:
    """Load 1,797 real 8 x 8 scans of the ten digits: four fifths to train on, one fifth to test on.

    The split is the same on every machine, and each class is split by the same fraction.

    Returns:
        DataSet: Images ``uint8 [N, 1, 8, 8]``.

    Example:
        >>> data = load_digits()
        >>> len(data.train), len(data.test)
        (1442, 355)
    """
    samples_NV = _read_digits()
    pixels_NF, labels_N = samples_NV[:, :-1], samples_NV[:, -1]
    images_NCHW = np.rint(pixels_NF * LEVEL_SCALE).astype(np.uint8).reshape(-1, 1, 8, 8)
    train, test = _split_digits(labels_N)

    def split(chosen: np.ndarray) -> Split:
        labels = torch.from_numpy(labels_N[chosen].astype(np.int64))
        return Split(images=torch.from_numpy(images_NCHW[chosen]), labels=labels)

    return DataSet(name="digits", classes=CLASSES, train=split(train), test=split(test))


def _read_digits() -> np.ndarray:
    """Return the table of the samples: in each row 64 levels and the digit."""
    packed = resources.files("onebox.feed").joinpath("data", "digits.csv.gz")
    with packed.open("rb") as file, gzip.open(file, "rt", encoding="ascii") as lines:
        return np.loadtxt(lines, delimiter=",")


def _split_digits(labels_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return indices of the training and of the test samples, both in the order of one fixed permutation."""
    # RandomState's stream is frozen by NumPy's compatibility policy (NEP 19), unlike default_rng's.
    order = np.random.RandomState(SPLIT_SEED).permutation(len(labels_N))
    is_test = np.zeros(len(order), dtype=bool)
    for digit in range(CLASSES):
        places = np.flatnonzero(labels_N[order] == digit)
        is_test[places[TEST_EVERY - 1 :: TEST_EVERY]] = True
    return order[~is_test], order[is_test]


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
    return DataSet(name="mnist", classes=MNIST_CLASSES, train=next(splits), test=next(splits))


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
    splits = _all_samples(train, folder), _all_samples(Cifar10(folder, "test"), folder)
    sizes = [list(split.images.shape[2:]) for split in splits]
    if sizes[0] != sizes[1]:
        problem = f"{folder}: training images have {sizes[0]} pixels, test images {sizes[1]}"
        raise DataError(f"{problem}; they do not belong together.", path=folder)
    return DataSet(name="cifar10", classes=len(train.classes), train=splits[0], test=splits[1])


def _all_samples(source: Cifar10, folder: Path) -> Split:
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
