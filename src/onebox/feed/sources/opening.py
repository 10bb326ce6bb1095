"""Sources from a short specification, as on the command line: a kind, and the place of its files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from onebox.errors import DataError, UsageError
from onebox.feed.decode import ImageDecoder
from onebox.feed.source import Source
from onebox.feed.sources.cifar10 import Cifar10
from onebox.feed.sources.formats.row_groups import ARROW_ENDINGS
from onebox.feed.sources.image_folder import ImageFolder
from onebox.feed.sources.mnist import Mnist
from onebox.feed.sources.numpy_files import NumpyFiles
from onebox.feed.sources.parquet import Parquet
from onebox.feed.sources.tars import Tars

Pair = tuple[Source, Source | None]

TRAIN = ("train", "training")
TEST = ("val", "valid", "validation", "test", "testing")
"""Names of test parts; the first one present counts, as a part named test may lack labels beside a val."""

MAX_CLASSES = 100_000  # limit of targets that are only numbers, which may not be classes
COMMA = re.compile(r",(?![^{]*\})")  # not within braces


def open_source(spec: str, *, decoder: ImageDecoder | None = None) -> Pair:
    """Open the samples to train on, and those to test on if there are any.

    Args:
        spec: One of

            - ``folder:PATH``: pictures in folders by class; in ``PATH/train`` and ``PATH/val`` (or ``test``, ...), or
              in ``PATH``;
            - ``tar:TRAIN`` or ``tar:TRAIN,TEST``: tar archives, by patterns such as ``train-{000..012}.tar``; or
              ``tar:PATH``, the folder with ``train*.tar`` and ``val*.tar``;
            - ``parquet:TRAIN``, ``parquet:TRAIN,TEST`` or ``parquet:PATH``: likewise, of Parquet or Arrow;
            - ``npy:X,Y`` or ``npy:X,Y,XTEST,YTEST``: inputs and targets in ``.npy`` files; or ``npy:PATH``, a folder
              with ``x_train.npy``, ``y_train.npy``, ``x_test.npy`` and ``y_test.npy``, or an archive ``.npz`` with
              arrays of these names;
            - ``mnist:FOLDER`` or ``cifar10:FOLDER``.
        decoder: Decoder of pictures, for ``folder``, ``tar`` and ``parquet``.

    Returns:
        Pair: The samples to train on, and those to test on or None; classes are numbered alike in both. Their
            ``classes`` are names, or numbers where targets are classes without names.

    Raises:
        UsageError: No such kind, or too many or too few files.
        DataError: Files are missing or damaged.
    """
    kind, _, place = spec.partition(":")
    if kind not in KINDS:
        raise UsageError(f"Data {spec!r} are not known; allowed are {', '.join(f'{name}:...' for name in KINDS)}.")
    if not place:
        raise UsageError(f"Data {spec!r} need the place of their files: {kind}:PATH.")
    return KINDS[kind](place, decoder)


Labelled = TypeVar("Labelled", Tars, Parquet, NumpyFiles)


def _with_classes(source: Labelled) -> Labelled:
    """Return the source, with numbers as names of its classes where they have none."""
    if source.classes is None:
        with contextlib.suppress(UsageError):  # targets that are not classes
            count = int(source.labels.max()) + 1
            source.classes = tuple(map(str, range(count))) if 0 < count <= MAX_CLASSES else None
    return source


def _folder(place: str, decoder: ImageDecoder | None) -> Pair:
    folder = _existing_folder(place, "folder")
    train_folder = next((folder / name for name in TRAIN if (folder / name).is_dir()), None)
    if train_folder is None:
        return ImageFolder(folder, decoder=decoder), None
    train = ImageFolder(train_folder, decoder=decoder)
    test_folder = next((folder / name for name in TEST if (folder / name).is_dir()), None)
    test = None if test_folder is None else ImageFolder(test_folder, decoder=decoder, classes=train.classes)
    return train, test


def _tar(place: str, decoder: ImageDecoder | None) -> Pair:
    train_files, test_files = _files(place, "tar", (".tar",))
    train = _with_classes(Tars(train_files, decoder=decoder))
    return train, Tars(test_files, decoder=decoder, classes=train.classes) if test_files else None


def _parquet(place: str, decoder: ImageDecoder | None) -> Pair:
    train_files, test_files = _files(place, "parquet", (".parquet", *ARROW_ENDINGS))
    train = _with_classes(Parquet(train_files, decoder=decoder))
    return train, Parquet(test_files, decoder=decoder, classes=train.classes) if test_files else None


def _npy(place: str, decoder: ImageDecoder | None) -> Pair:
    names = ("x_train", "y_train", "x_test", "y_test")
    files = place.split(",")
    if len(files) == 1:
        path = Path(place).expanduser()
        if path.is_dir():
            there = [str(path / f"{name}.npy") for name in names]
            files = there if any(Path(name).exists() for name in there[2:]) else there[:2]
        elif path.suffix == ".npz":
            files = [f"{path}:{name}" for name in names]
    if len(files) not in (2, 4):
        raise UsageError(
            f"npy:{place} names {len(files)} files; allowed are npy:X,Y or npy:X,Y,XTEST,YTEST, or a folder."
        )
    train = _with_classes(NumpyFiles(files[0], files[1]))
    return train, NumpyFiles(files[2], files[3], classes=train.classes) if len(files) == 4 else None


def _mnist(place: str, decoder: ImageDecoder | None) -> Pair:
    folder = _existing_folder(place, "mnist")
    return Mnist(folder, "train"), Mnist(folder, "test")


def _cifar10(place: str, decoder: ImageDecoder | None) -> Pair:
    folder = _existing_folder(place, "cifar10")
    return Cifar10(folder, "train"), Cifar10(folder, "test")


KINDS: dict[str, Callable[[str, ImageDecoder | None], Pair]] = {
    "folder": _folder,
    "tar": _tar,
    "parquet": _parquet,
    "npy": _npy,
    "mnist": _mnist,
    "cifar10": _cifar10,
}


def _existing_folder(place: str, kind: str) -> Path:
    folder = Path(place).expanduser()
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; {kind}:PATH names the one that holds the files.", path=folder)
    return folder


def _files(place: str, kind: str, endings: tuple[str, ...]) -> tuple[list[Path | str], list[Path | str]]:
    """Return the files to train on and to test on: two patterns, or those in a folder by their names."""
    folder = Path(place).expanduser()
    if not folder.is_dir():
        patterns = COMMA.split(place)
        if len(patterns) > 2 or not all(patterns):
            raise UsageError(
                f"{kind}:{place} names {len(patterns)} patterns; allowed are {kind}:TRAIN or {kind}:TRAIN,TEST."
            )
        return [patterns[0]], list(patterns[1:])
    there = sorted(path for ending in endings for path in folder.rglob(f"*{ending}"))
    words = {path: set(re.split(r"[^a-z]+", str(path.relative_to(folder)).lower())) for path in there}
    train = [path for path in there if words[path] & set(TRAIN)]
    test = next((found for name in TEST if (found := [path for path in there if name in words[path]])), [])
    if not there:
        raise DataError(f"{folder} has no files that end in {', '.join(endings)}.", path=folder)
    if not train and test:
        raise DataError(f"{folder} has {test[0].name}, and no train*{endings[0]} to train on.", path=folder)
    return list(train or there), list(test)
