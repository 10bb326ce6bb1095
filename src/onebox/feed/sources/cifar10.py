"""CIFAR-10: as tar archives of JPEG files, or in the binary version of its authors.

The format of the binary version, its file names and the names of the classes are those of A. Krizhevsky's page "The
CIFAR-10 dataset".
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from onebox.errors import DataError, UsageError
from onebox.feed.decode import ImageDecoder
from onebox.feed.sources.formats.files import unreadable
from onebox.feed.sources.formats.records import Records
from onebox.feed.sources.tars import Tars

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BINARY = {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)}
PICKLED = ("data_batch_1", "test_batch", "cifar-10-batches-py", "cifar-10-python.tar.gz")
PIXELS_BYTES = 3 * 32 * 32
RECORD_BYTES = 1 + PIXELS_BYTES
MAX_IMAGE_PIXELS = 256 * 256  # limit of a JPEG: 64 x the pixels of CIFAR-10's


class Cifar10:
    """The training or the test pictures of CIFAR-10: images ``uint8 [3, 32, 32]``, labels ``int64 []``.

    Args:
        folder: Holds ``cifar10-train.tar`` and ``cifar10-test.tar``, whose members are named ``class/number.jpg`` (the
            classes of the training archive, sorted by name, are numbered from 0); or the binary version,
            ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``, also in its ``cifar-10-batches-bin``.
            The Python version consists of pickles, which can run any code when loaded: it is rejected.
        part: ``train`` or ``test``.

    Attributes:
        classes: Names of the classes.

    Raises:
        UsageError: Another part.
        DataError: A file is missing or damaged, or is of the Python version.
    """

    def __init__(self, folder: str | os.PathLike[str], part: Literal["train", "test"] = "train") -> None:
        if part not in BINARY:
            raise UsageError(f"part is {part!r}; allowed are train and test.")
        place = Path(folder).expanduser()
        unpacked = place / "cifar-10-batches-bin"
        binary = unpacked if unpacked.is_dir() else place
        self._source: Tars | _Binary
        if (binary / BINARY[part][0]).exists():
            self._source = _Binary([binary / name for name in BINARY[part]])
        else:
            self._source = _archive(place, part)
        self.classes: tuple[str, ...] = self._source.classes or ()

    def __len__(self) -> int:
        """Number of pictures."""
        return len(self._source)

    @property
    def labels(self) -> Tensor:
        """The labels of all pictures, ``int64 [N]``."""
        return self._source.labels

    def read(self, index: int) -> Any:
        """A picture and its label as they are stored.

        Raises:
            DataError: They cannot be read.
        """
        return self._source.read(index)

    def decode(self, raw: Any, index: int) -> tuple[Tensor, Tensor]:
        """A picture ``uint8 [3, 32, 32]`` and its label ``int64 []``.

        Raises:
            DataError: One of them is damaged.
        """
        return self._source.decode(raw, index)

    def name(self, index: int) -> str:
        """The file, and the member or the number in it."""
        return self._source.name(index)


def _archive(folder: Path, part: str) -> Tars:
    path = folder / f"cifar10-{part}.tar"
    pickled = [name for name in PICKLED if (folder / name).exists()]
    if not path.exists() and pickled:
        problem = f"{folder / pickled[0]} is of the Python version, whose pickles can run any code when they are loaded"
        raise DataError(f"{problem}; fetch the binary version, cifar-10-binary.tar.gz, and unpack it.", path=folder)
    if not path.exists():
        todo = f"put it there, or {BINARY[part][0]} of the binary version, or name the folder that holds them"
        raise DataError(f"{path} is missing; {todo}: cifar10:FOLDER.", path=path)
    decoder = ImageDecoder(formats=("JPEG",), max_pixels=MAX_IMAGE_PIXELS)
    train = folder / "cifar10-train.tar"
    classes = Tars(train, fields=("jpg;jpeg", "folder")).classes if part == "test" and train.exists() else None
    return Tars(path, fields=("jpg;jpeg", "folder"), decoder=decoder, classes=classes)


class _Binary:
    """Records of a label and 32 x 32 pixels, all red ones first."""

    classes = CLASSES

    def __init__(self, paths: list[Path]) -> None:
        counts = []
        for path in paths:
            try:
                size_bytes = os.stat(path).st_size
            except OSError as error:
                raise unreadable(path, error) from error
            if size_bytes == 0 or size_bytes % RECORD_BYTES:
                problem = f"{path} has {size_bytes} bytes, and has to have a multiple of {RECORD_BYTES}"
                raise DataError(f"{problem}: it is cut off or another file. Fetch it again.", path=path)
            counts.append(size_bytes // RECORD_BYTES)
        self._records = Records(paths, counts, RECORD_BYTES)

    def __len__(self) -> int:
        return len(self._records)

    @functools.cached_property
    def labels(self) -> Tensor:
        return torch.tensor([self._records.read(index)[0] for index in range(len(self))])

    def read(self, index: int) -> bytes:
        return self._records.read(index)

    def decode(self, raw: bytes, index: int) -> tuple[Tensor, Tensor]:
        if raw[0] >= len(CLASSES):
            problem = f"{self.name(index)} has label {raw[0]}; allowed are 0 to {len(CLASSES) - 1}"
            raise DataError(f"{problem}. Fetch the file again.", path=self._records.place(index)[0], sample=index)
        pixels = torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=1).view(3, 32, 32)
        return pixels.clone(), torch.tensor(raw[0])

    def name(self, index: int) -> str:
        path, inside = self._records.place(index)
        return f"{path.name}: {inside}"
