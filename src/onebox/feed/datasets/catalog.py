"""Data sets by their names on the command line."""

from __future__ import annotations

from pathlib import Path

from onebox.errors import DataError, UsageError
from onebox.feed.datasets.dataset import Data, DataSet
from onebox.feed.datasets.in_memory import load_cifar10, load_digits, load_mnist
from onebox.feed.datasets.on_disk import OnDiskDataSet

FOLDER_LOADERS = {"mnist": load_mnist, "cifar10": load_cifar10}
FILE_KINDS = ("folder", "tar", "parquet")
ALLOWED = "digits, mnist:FOLDER, cifar10:FOLDER, folder:PATH, tar:PATTERN or parquet:PATTERN"


def open_dataset(spec: str, *, size: int | None = None) -> Data:
    """Open a data set: in memory where :func:`load_dataset` knows it, else with its pictures left in their files.

    Args:
        spec: A specification for :func:`load_dataset`, or one of pictures for :func:`onebox.feed.sources.open_source`:
            ``folder:PATH``, ``tar:PATTERN`` or ``parquet:PATTERN``.
        size: Height and width that pictures from files get; ``None`` for those of the first one.

    Raises:
        UsageError: No such data set, a wrong specification, or a size for images that are in memory.
        DataError: A file is missing or damaged.
    """
    if spec.partition(":")[0] in FILE_KINDS:
        return OnDiskDataSet(spec, size=size)
    if size is not None:
        raise UsageError(f"an image size of {size} is for {', '.join(FILE_KINDS)}; {spec} has images of its own size")
    return load_dataset(spec)


def load_dataset(spec: str) -> DataSet:
    """Load a data set into memory.

    Args:
        spec: ``digits`` (comes with onebox), ``mnist:FOLDER`` (IDX files, gzipped or not) or
            ``cifar10:FOLDER`` (tar archives of JPEG files, or its binary version). A leading ``~`` in the folder is
            the home folder.

    Returns:
        DataSet: All of its samples, as bytes.

    Raises:
        UsageError: No such data set, or a folder too many or too few.
        DataError: A file is missing or damaged.

    Example:
        >>> data = load_dataset("digits")
        >>> data.train.images.shape[1:]
        torch.Size([1, 8, 8])
    """
    name, colon, place = spec.partition(":")
    if name == "digits":
        if colon:
            raise UsageError(f"Data set {spec!r}: digits comes with onebox and takes no folder; say digits.")
        return load_digits()
    if name not in FOLDER_LOADERS:
        raise UsageError(f"Data set {spec!r} is not known; allowed are {ALLOWED}.")
    if not place:
        raise UsageError(f"Data set {spec!r} needs the folder that holds its files: {name}:FOLDER.")
    folder = Path(place).expanduser()
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; {name}:FOLDER names the one that holds the files.", path=folder)
    return FOLDER_LOADERS[name](folder)
