"""The default data set: handwritten digits, which come with the package; ``data/NOTICE`` has source and licence."""

from __future__ import annotations

import gzip
from importlib import resources

import numpy as np
import torch

from onebox.feed.datasets.dataset import DataSet, Split

CLASSES = 10
LEVEL_SCALE = 255 / 16  # the scans have levels 0 to 16; this takes 16 to 255
TEST_EVERY = 5  # of each class, the fifth, tenth, ... sample is for testing
SPLIT_SEED = 0


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
    samples_NV = _read()
    pixels_NF, labels_N = samples_NV[:, :-1], samples_NV[:, -1]
    images_NCHW = np.rint(pixels_NF * LEVEL_SCALE).astype(np.uint8).reshape(-1, 1, 8, 8)
    train, test = _choose(labels_N)

    def split(chosen: np.ndarray) -> Split:
        labels = torch.from_numpy(labels_N[chosen].astype(np.int64))
        return Split(images=torch.from_numpy(images_NCHW[chosen]), labels=labels)

    return DataSet(name="digits", classes=CLASSES, train=split(train), test=split(test))


def _read() -> np.ndarray:
    """Return the table of the samples: in each row 64 levels and the digit."""
    packed = resources.files("onebox.feed").joinpath("data", "digits.csv.gz")
    with packed.open("rb") as file, gzip.open(file, "rt", encoding="ascii") as lines:
        return np.loadtxt(lines, delimiter=",")


def _choose(labels_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return indices of the training and of the test samples, both in the order of one fixed permutation."""
    # RandomState's stream is frozen by NumPy's compatibility policy (NEP 19), unlike default_rng's.
    order = np.random.RandomState(SPLIT_SEED).permutation(len(labels_N))
    is_test = np.zeros(len(order), dtype=bool)
    for digit in range(CLASSES):
        places = np.flatnonzero(labels_N[order] == digit)
        is_test[places[TEST_EVERY - 1 :: TEST_EVERY]] = True
    return order[~is_test], order[is_test]
