"""MNIST, and the data sets in its format (Fashion-MNIST, KMNIST): IDX files in a folder, read into memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from onebox.errors import DataError, UsageError
from onebox.feed.sources.arrays import Arrays
from onebox.feed.sources.formats.idx import read_idx

CLASSES = 10
FILES = {"train": "train", "test": "t10k"}


class Mnist(Arrays):
    """The training or the test samples of MNIST: images ``uint8 [1, 28, 28]``, labels ``int64 []``.

    Without training files in the folder, the test set is used for both: the first four fifths (8,000 of 10,000) are
    trained on, the last fifth (2,000) is tested on.

    Args:
        folder: Holds ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and
            ``t10k-labels-idx1-ubyte``, each gzipped (``.gz``) or not; the first two may be absent, both.
        part: ``train`` or ``test``.

    Attributes:
        labels: ``int64 [N]``.

    Raises:
        UsageError: Another part.
        DataError: A file is missing or damaged, or two of them do not match.
    """

    def __init__(self, folder: str | os.PathLike[str], part: Literal["train", "test"] = "train") -> None:
        if part not in FILES:
            raise UsageError(f"part is {part!r}; allowed are train and test.")
        place = Path(folder).expanduser()
        stands_in = not any(_find(path) for path in (_images_path(place, "train"), _labels_path(place, "train")))
        of = "test" if stands_in else part
        images, labels = _read_part(place, of)
        first = 0
        if stands_in:
            cut = len(labels) * 4 // 5
            if cut == 0:
                raise DataError(f"{place}: {len(labels)} samples are too few to train and to test on.", path=place)
            chosen = slice(0, cut) if part == "train" else slice(cut, None)
            images, labels, first = images[chosen], labels[chosen], chosen.start
        names = [str(number) for number in range(CLASSES)]
        super().__init__(images, labels, classes=names, where=_images_path(place, of).name)
        self.labels = labels
        self._first = first  # sample of the file

    def name(self, index: int) -> str:
        """The file, and the number of the sample in it."""
        return f"{self.where}: {self._first + index}"


def _read_part(folder: Path, part: str) -> tuple[Tensor, Tensor]:
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
    return images_NHW.unsqueeze(1), labels_N


def _images_path(folder: Path, part: str) -> Path:
    return folder / f"{FILES[part]}-images-idx3-ubyte"


def _labels_path(folder: Path, part: str) -> Path:
    return folder / f"{FILES[part]}-labels-idx1-ubyte"


def _find(path: Path) -> Path | None:
    """Return the file, or its gzipped form, or None."""
    zipped = path.with_name(path.name + ".gz")
    return next((candidate for candidate in (path, zipped) if candidate.exists()), None)


def _require(path: Path) -> Path:
    found = _find(path)
    if found is None:
        todo = "put MNIST's IDX files there, or name the folder that holds them"
        raise DataError(f"{path} is missing, and so is {path.name}.gz; {todo}: mnist:FOLDER.", path=path)
    return found
