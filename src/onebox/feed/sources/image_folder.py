"""Pictures in folders, one for each class: ImageNet's layout."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from onebox.errors import DataError
from onebox.feed.checks import check_classes
from onebox.feed.decode import EXTENSIONS, ImageDecoder
from onebox.feed.sources.formats.files import read_file, unreadable

Sample = tuple[Tensor, Tensor]
LAYOUT = "allowed is folder/class/picture, the pictures of each class in a folder of its own"


class ImageFolder:
    """Pictures in folders, one for each class, as in ImageNet: ``folder/class/picture.jpg``.

    Classes are numbered by their folders' names in order, pictures are in the order of classes, then of names: the same
    on every file system. Pictures may be in subfolders of a class's folder. Hidden files, and those with other
    extensions, are ignored.

    Args:
        folder: Holds the classes' folders.
        decoder: Decoder of pictures; ``ImageDecoder(size=(224, 224))`` gives all one size.
        classes: Names of the classes in their order; by default the existing ones. A test set gets those of its
            training set: ``ImageFolder(val, classes=train.classes)``.
        extensions: Extensions of pictures' names, in lower case.

    Attributes:
        classes: Names of the classes.
        labels: ``int64 [N]``, the number of each sample's class.

    Raises:
        UsageError: A class name occurs twice.
        DataError: The folder cannot be read, has no classes, a class has no pictures, or is not among those given.

    Example::

        train = ImageFolder("imagenet/train", decoder=ImageDecoder(size=(224, 224)))
        image, label = train.decode(train.read(0), 0)  # uint8 [3, 224, 224], int64 []
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        decoder: ImageDecoder | None = None,
        classes: Sequence[str] | None = None,
        extensions: Sequence[str] = EXTENSIONS,
    ) -> None:
        self.folder = Path(folder).expanduser()
        self._decoder = decoder or ImageDecoder()
        self._extensions = tuple(extensions)
        there = sorted(name for name, is_dir in _entries(self.folder) if is_dir)
        if not there:
            raise DataError(f"{self.folder} has no folders in it; {LAYOUT}.", path=self.folder)
        self.classes = check_classes(classes if classes is not None else there)
        numbers = {name: number for number, name in enumerate(self.classes)}
        self._names: list[str] = []  # names of the files, below the folder
        labels: list[int] = []
        for name in there:
            if name not in numbers:
                came = f"{self.folder} has class {name!r}, which is not among those given"
                allowed = f"{', '.join(self.classes[:20])}{', ...' if len(self.classes) > 20 else ''}"
                raise DataError(f"{came}: {allowed}.", path=self.folder / name)
            pictures = self._pictures(name)
            self._names.extend(pictures)
            labels.extend([numbers[name]] * len(pictures))
        self.labels = torch.tensor(labels)

    def __len__(self) -> int:
        """Number of pictures."""
        return len(self._names)

    def read(self, index: int) -> bytes:
        """The content of a picture's file.

        Raises:
            DataError: It cannot be read, is not a file, or is empty.
        """
        return read_file(os.path.join(self.folder, self._names[index]), sample=index)

    def decode(self, raw: bytes, index: int) -> Sample:
        """A picture ``uint8 [C, H, W]`` and the number of its class ``int64 []``.

        Raises:
            DataError: It is damaged.
        """
        path = os.path.join(self.folder, self._names[index])
        return self._decoder.decode(raw, where=path, path=path, sample=index), self.labels[index]

    def name(self, index: int) -> str:
        """Return the file, such as ``train/cat/0017.jpg``."""
        return os.path.join(self.folder.name, self._names[index])

    def _pictures(self, class_name: str) -> list[str]:
        """Return the pictures of a class, sorted, below the folder."""
        others = 0
        found: list[str] = []
        for path in _files_below(self.folder, class_name):
            if path.lower().endswith(self._extensions):
                found.append(path)
            else:
                others += 1
        if not found:
            folder = self.folder / class_name
            came = f"Class folder {folder} has no pictures, and {others} other files"
            todo = f"put its pictures there ({', '.join(self._extensions)}), or take the folder away"
            raise DataError(f"{came}; {todo}.", path=folder)
        return sorted(found)


def _files_below(root: Path, name: str) -> Iterator[str]:
    """Yield files below a folder and its subfolders; links to folders are followed, once each."""
    waiting, seen = [name], set[tuple[int, int]]()
    while waiting:
        name = waiting.pop()
        folder = root / name
        try:
            status = os.stat(folder)
        except OSError as error:
            raise unreadable(folder, error) from error
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        for entry, is_dir in _entries(folder):
            if is_dir:
                waiting.append(os.path.join(name, entry))
            else:
                yield os.path.join(name, entry)


def _entries(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield names in a folder that are not hidden, and whether each is a folder (or a link to one)."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    yield entry.name, entry.is_dir()
    except OSError as error:
        raise unreadable(folder, error) from error
