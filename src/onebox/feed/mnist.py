"""MNIST, and the data sets made in its image (Fashion-MNIST, KMNIST): four IDX files in a folder."""

from __future__ import annotations

from pathlib import Path

import torch

from onebox.errors import DataError
from onebox.feed.dataset import DataSet, Split
from onebox.feed.idx import read_idx

CLASSES = 10
TRAIN = "train"
TEST = "t10k"


def load_mnist(folder: Path) -> DataSet:
    """Load MNIST from its IDX files, each gzipped (``.gz``) or not.

    Where the folder has no training files at all, the test set stands in for both: the first four fifths
    (8,000 of 10,000) are trained on, the last fifth (2,000) is tested on.

    Args:
        folder: Holds ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and
            ``t10k-labels-idx1-ubyte``; the first two may be absent, both.

    Returns:
        DataSet: Images ``uint8 [N, 1, H, W]``, 28 x 28 for MNIST.

    Raises:
        DataError: A file is missing or damaged, or two of them do not belong together.
    """
    held = _read_part(folder, TEST)
    if not any(_find(path) for path in (_images_path(folder, TRAIN), _labels_path(folder, TRAIN))):
        train, test = _cut(held, folder)
    else:
        train, test = _read_part(folder, TRAIN), held
    if train.images.shape[1:] != test.images.shape[1:]:
        sizes = f"{list(train.images.shape[2:])} and {list(test.images.shape[2:])}"
        raise DataError(
            f"{folder}: training and test images have {sizes} pixels; they do not belong together.",
            path=folder,
        )
    return DataSet(name="mnist", classes=CLASSES, train=train, test=test)


def _cut(whole: Split, folder: Path) -> tuple[Split, Split]:
    first = len(whole) * 4 // 5
    if first == 0:
        raise DataError(f"{folder}: {len(whole)} samples are too few to train and to test on.", path=folder)
    train = Split(images=whole.images[:first], labels=whole.labels[:first])
    return train, Split(images=whole.images[first:], labels=whole.labels[first:])


def _read_part(folder: Path, part: str) -> Split:
    images_path = _require(_images_path(folder, part))
    labels_path = _require(_labels_path(folder, part))
    images_NHW = read_idx(images_path, dims=3)
    labels_N = read_idx(labels_path, dims=1).to(torch.int64)
    if len(images_NHW) != len(labels_N):
        counts = f"{len(labels_N)} labels, and {images_path.name} beside it {len(images_NHW)} images"
        raise DataError(f"{labels_path} holds {counts}; it has to be one label an image.", path=labels_path)
    wrong = (labels_N >= CLASSES).nonzero()
    if len(wrong):
        sample = int(wrong[0])
        came = f"label {int(labels_N[sample])} at sample {sample}"
        raise DataError(f"{labels_path} has {came}; allowed are 0 to {CLASSES - 1}.", path=labels_path, sample=sample)
    return Split(images=images_NHW.unsqueeze(1), labels=labels_N)


def _images_path(folder: Path, part: str) -> Path:
    return folder / f"{part}-images-idx3-ubyte"


def _labels_path(folder: Path, part: str) -> Path:
    return folder / f"{part}-labels-idx1-ubyte"


def _find(path: Path) -> Path | None:
    """The file, or its gzipped twin, or None."""
    zipped = path.with_name(path.name + ".gz")
    return next((candidate for candidate in (path, zipped) if candidate.exists()), None)


def _require(path: Path) -> Path:
    found = _find(path)
    if found is None:
        todo = "put MNIST's IDX files there, or name the folder that holds them"
        raise DataError(f"{path} is missing, and so is {path.name}.gz; {todo}: mnist:FOLDER.", path=path)
    return found
