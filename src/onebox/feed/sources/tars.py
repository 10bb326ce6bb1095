"""Samples in tar archives, read in place: WebDataset's layout, and pictures in folders by class."""

from __future__ import annotations

import contextlib
import functools
import json
import posixpath
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebox.errors import DataError, UsageError
from onebox.feed.checks import check_classes
from onebox.feed.decode import EXTENSIONS, ImageDecoder
from onebox.feed.sources.formats.files import MAX_FILE_BYTES, OpenFiles, Paths, expand, unreadable
from onebox.feed.sources.formats.npy import parse_npy
from onebox.feed.sources.formats.tar_index import members

FOLDER = "folder"
"""The field of a sample whose value is the class that its folder names."""

IMAGE_ENDINGS = tuple(extension[1:] for extension in EXTENSIONS)
IMAGES = ";".join(IMAGE_ENDINGS)

MAX_JSON_BYTES = 1 << 24  # limit of a sample's JSON, whose values may take thirty times as much memory


class Tars:
    """Samples in tar archives, in any order, without unpacking: headers are read once, contents are not.

    In WebDataset's layout the files of a sample have the same name up to the first dot: ``0017.jpg`` and ``0017.cls``
    are the fields ``jpg`` and ``cls`` of the sample ``0017``. In the other layout, a sample is a picture in a folder
    that names its class, such as ``cat/0017.jpg``. Fields are decoded by their endings: pictures to ``uint8 [C, H,
    W]``, ``cls`` (a whole number) and ``folder`` to ``int64 []``, ``json`` to its value, ``txt`` to a string, ``npy``
    to a tensor; other fields stay bytes.

    Args:
        pattern: The archives: a path, one with ``{000..012}`` or ``*`` in it, or several. Compressed archives are
            rejected.
        fields: Fields of a sample, in order: extensions (without the dot), alternatives separated by ``;``, or
            ``folder``. A single one gives samples that are not tuples. By default the picture, and ``cls``, or else the
            folder.
        decoder: Decoder of pictures.
        classes: Names of the classes in their order, or None: for ``folder``, the existing ones, sorted; for ``cls``,
            unknown. A test set gets those of its training set.

    Attributes:
        classes: Names of the classes, or None.

    Raises:
        UsageError: Fields or classes are invalid, or the fields of a sample are ambiguous.
        DataError: An archive is missing, compressed, truncated or damaged.

    Example::

        train = Tars("imagenet-train-{000000..001281}.tar", fields=("jpg;jpeg", "cls"))
        test = Tars("cifar10-test.tar", classes=Tars("cifar10-train.tar").classes)
    """

    def __init__(
        self,
        pattern: Paths,
        *,
        fields: Sequence[str] | None = None,
        decoder: ImageDecoder | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self._files = OpenFiles(expand(pattern))
        self._decoder = decoder or ImageDecoder()
        self._keys: list[str] = []
        self._archives = array("L")  # archive of each sample
        self._starts = array("Q", [0])  # start of each sample in the following lists; and the end
        self._endings: list[str] = []
        self._offsets, self._sizes = array("Q"), array("Q")
        for number, path in enumerate(self._files.paths):
            self._add(number, path)
        if not self._keys:
            where = ", ".join(path.name for path in self._files.paths[:3])
            raise DataError(f"{where}: no files are in there.", path=self._files.paths[0])
        self._fields = [tuple(field.lower().split(";")) for field in self._choose(fields)]
        self.classes = check_classes(classes) if classes is not None else self._folders()
        self._numbers = {name: number for number, name in enumerate(self.classes or ())}

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._keys)

    @functools.cached_property
    def labels(self) -> Tensor:
        """The class of each sample, ``int64 [N]``: by its folder or its ``cls``, -1 where that is missing or damaged.

        Raises:
            UsageError: Samples have neither.
        """
        field = next((field for field in self._fields if field in ((FOLDER,), ("cls",))), None)
        if field is None:
            raise UsageError(f"{self._path(0).name}: samples have no classes; fields has neither cls nor folder.")
        labels = torch.full((len(self),), -1)
        for index in range(len(self)):
            with contextlib.suppress(DataError):
                labels[index] = self._decode_field(*self._read_field(index, field, self._there(index)), index)
        return labels

    def read(self, index: int) -> tuple[tuple[str, bytes], ...]:
        """The ending and the content of each field of a sample.

        Raises:
            DataError: The sample lacks a field, or the archive has become shorter.
        """
        there = self._there(index)
        return tuple(self._read_field(index, field, there) for field in self._fields)

    def decode(self, raw: tuple[tuple[str, bytes], ...], index: int) -> Any:
        """The fields of a sample, a tuple if they are several.

        Raises:
            DataError: One of them is damaged.
        """
        decoded = tuple(self._decode_field(ending, content, index) for ending, content in raw)
        return decoded if len(decoded) > 1 else decoded[0]

    def name(self, index: int) -> str:
        """The archive and the sample's name in it, such as ``train.tar: cat/0017.jpg``."""
        first, last = self._starts[index], self._starts[index + 1]
        ending = self._endings[first] if last == first + 1 and self._endings[first] else ""
        return f"{self._path(index).name}: {self._keys[index]}{'.' if ending else ''}{ending}"

    def _path(self, index: int) -> Path:
        return self._files.paths[self._archives[index]]

    def _add(self, number: int, path: Path) -> None:
        """Add the samples of an archive to the index."""
        samples: dict[str, dict[str, tuple[int, int]]] = {}
        for member in members(path):
            folder, file = posixpath.split(member.name.removeprefix("./"))
            if file.startswith((".", "__")):
                continue  # metadata of operating systems and WebDataset beside samples
            stem, _, ending = file.partition(".")
            fields = samples.setdefault(posixpath.join(folder, stem), {})
            if ending.lower() in fields:
                problem = f"{path}: {member.name[:200]!r} is there twice"
                raise DataError(f"{problem}; a sample has a field once.", path=path, sample=member.name)
            fields[ending.lower()] = (member.offset, member.size_bytes)
        for key, fields in samples.items():
            self._keys.append(key)
            self._archives.append(number)
            for ending, (offset, size_bytes) in fields.items():
                self._endings.append(sys.intern(ending))
                self._offsets.append(offset)
                self._sizes.append(size_bytes)
            self._starts.append(len(self._endings))

    def _choose(self, fields: Sequence[str] | None) -> Sequence[str]:
        """Return the requested fields, or those of the first sample."""
        if fields is not None:
            if isinstance(fields, str) or not fields or not all(isinstance(field, str) and field for field in fields):
                raise UsageError(
                    f"fields are {fields!r}; they have to be a sequence of endings, such as ('jpg', 'cls')."
                )
            return fields
        endings = self._endings[: self._starts[1]]
        if any(ending in IMAGE_ENDINGS for ending in endings):
            if "cls" in endings:
                return (IMAGES, "cls")
            if _folder_of(self._keys[0]):
                return (IMAGES, FOLDER)
        came = f"{self.name(0)} has the fields {', '.join(endings)}, which do not tell what input and target are"
        raise UsageError(f"{came}; say fields=..., such as fields=('{endings[0]}', '{endings[-1]}').")

    def _folders(self) -> tuple[str, ...] | None:
        """Return the names of the folders of samples, if classes are by folder."""
        if (FOLDER,) not in self._fields:
            return None
        return tuple(sorted({_folder_of(key) for key in self._keys} - {""})) or None

    def _there(self, index: int) -> dict[str, int]:
        """Return the fields of a sample, and their places in the index."""
        return {self._endings[place]: place for place in range(self._starts[index], self._starts[index + 1])}

    def _read_field(self, index: int, field: tuple[str, ...], there: dict[str, int]) -> tuple[str, bytes]:
        if field == (FOLDER,):
            return FOLDER, b""
        found = [ending for ending in field if ending in there]
        if not found:
            wanted = "/".join(field) if len(field) < 4 else f"{'/'.join(field[:3])}/..."
            problem = f"{self.name(index)} has no {wanted}, only {', '.join(there)}"
            raise self._bad(index, f"{problem}; add it, or take the sample out of the archive")
        place = there[found[0]]
        size_bytes, path = self._sizes[place], self._path(index)
        if size_bytes > MAX_FILE_BYTES:
            raise self._bad(index, f"{self.name(index)} has {size_bytes} bytes; allowed are {MAX_FILE_BYTES}")
        try:
            content = self._files.read(self._archives[index], size_bytes, self._offsets[place])
        except OSError as error:
            raise unreadable(path, error, index) from error
        if len(content) < size_bytes:
            raise self._bad(index, f"{self.name(index)} is cut off: the archive has become shorter. Fetch it again")
        return found[0], content

    def _decode_field(self, ending: str, content: bytes, index: int) -> Any:
        where = self.name(index)
        if ending == FOLDER:
            return torch.tensor(self._class_number(index))
        if ending in IMAGE_ENDINGS:
            return self._decoder.decode(content, where=where, path=self._path(index), sample=index)
        try:
            if ending == "cls":
                return torch.tensor(self._label(content))
            if ending == "json":
                if len(content) > MAX_JSON_BYTES:
                    raise ValueError(f"it has {len(content)} bytes; allowed are {MAX_JSON_BYTES}")
                return json.loads(content)
            if ending == "txt":
                return content.decode("utf-8")
            return parse_npy(content) if ending == "npy" else content
        except (ValueError, RecursionError) as error:
            raise self._bad(index, f"{where} has a damaged {ending}: {error}") from error

    def _class_number(self, index: int) -> int:
        name = _folder_of(self._keys[index])
        if name not in self._numbers:
            came = f"{self.name(index)} lies in folder {name!r}" if name else f"{self.name(index)} lies in no folder"
            raise self._bad(index, f"{came}; the classes are {', '.join(list(self._numbers)[:20])}")
        return self._numbers[name]

    def _label(self, content: bytes) -> int:
        text = content.strip()
        if not text.isdigit() or len(text) > 18:
            raise ValueError(f"it says {text[:40]!r}, and has to be a whole number")
        label = int(text)
        if self.classes is not None and label >= len(self.classes):
            raise ValueError(f"it says {label}, and there are {len(self.classes)} classes")
        return label

    def _bad(self, index: int, problem: str) -> DataError:
        return DataError(f"{problem}.", path=self._path(index), sample=index)


def _folder_of(key: str) -> str:
    """Return the name of a sample's folder, or an empty text."""
    name = posixpath.basename(posixpath.dirname(key))
    return "" if name in (".", "..") else name
