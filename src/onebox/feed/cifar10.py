"""CIFAR-10 as two tar archives of JPEG files, read in place: nothing is extracted to disk.

An archive comes from somewhere else, so nothing in it is trusted: a member's name is matched against one
pattern and only ever gives a class, its size and pixels are limited before it is decoded, and no decoder but
JPEG's is tried.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image

from onebox.errors import DataError
from onebox.feed.dataset import DataSet, Split

MEMBER_NAME = re.compile(r"(?:\./)?([A-Za-z0-9_-]{1,64})/[0-9]{1,9}\.jpe?g")
MAX_MEMBER_BYTES = 1 << 20  # a 32 x 32 JPEG has about 1,000 bytes
MAX_IMAGE_PIXELS = 256 * 256  # of one image: 64 x the pixels of CIFAR-10's
MAX_TOTAL_BYTES = 2 << 30  # decoded, of one archive: 13 x the whole training set

TarMember = tuple[str, str, bytes]  # member name, class name, JPEG bytes


def load_cifar10(folder: Path) -> DataSet:
    """Load CIFAR-10 from ``cifar10-train.tar`` and ``cifar10-test.tar``.

    Args:
        folder: Holds the two archives; their members are named ``class/number.jpg``. The classes of the
            training archive, sorted by name, are numbered from 0; samples keep the order of the archive.

    Returns:
        DataSet: Images ``uint8 [N, 3, H, W]``, 32 x 32 for CIFAR-10.

    Raises:
        DataError: An archive is missing or damaged, a member is not what it should be, or the two do not
            belong together.
    """
    train_path, test_path = folder / "cifar10-train.tar", folder / "cifar10-test.tar"
    train_images, train_classes = _read_archive(train_path)
    test_images, test_classes = _read_archive(test_path)
    names = sorted(set(train_classes))
    unknown = sorted(set(test_classes) - set(names))
    if unknown:
        raise DataError(f"{test_path} has class {unknown[0]!r}; {train_path.name} has only {names}.", path=test_path)
    if train_images.shape[1:] != test_images.shape[1:]:
        came, other = list(test_images.shape[2:]), list(train_images.shape[2:])
        raise DataError(
            f"{test_path} has images of {came} pixels; in {train_path.name} they have {other}.",
            path=test_path,
        )
    index = {name: number for number, name in enumerate(names)}
    train = Split(images=train_images, labels=torch.tensor([index[name] for name in train_classes]))
    test = Split(images=test_images, labels=torch.tensor([index[name] for name in test_classes]))
    return DataSet(name="cifar10", classes=len(names), train=train, test=test)


def _read_archive(path: Path) -> tuple[torch.Tensor, list[str]]:
    """Images ``uint8 [N, 3, H, W]`` and the class name of each."""
    images: list[np.ndarray] = []
    classes: list[str] = []
    total_bytes = 0
    for name, class_name, jpeg in _members(path):
        image_HWC = _decode(jpeg, path, name)
        if images and image_HWC.shape != images[0].shape:
            came, first = image_HWC.shape[:2], images[0].shape[:2]
            raise _bad_member(path, name, f"has {list(came)} pixels; the first image has {list(first)}")
        total_bytes += image_HWC.nbytes
        if total_bytes > MAX_TOTAL_BYTES:
            raise DataError(f"{path} decodes to more than the allowed {MAX_TOTAL_BYTES} bytes.", path=path)
        images.append(image_HWC)
        classes.append(class_name)
    if not images:
        raise DataError(f"{path} has no images; it has to have members named class/number.jpg.", path=path)
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), classes


def _members(path: Path) -> Iterator[TarMember]:
    """The JPEG files of an archive, in its order; folders are passed over, anything else is an error."""
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            end = 0
            for member in archive:
                end = _end_of(member)
                if not member.isdir():
                    yield _read_member(archive, member, path)
            _require_end_marker(file, end, path)
    except FileNotFoundError as error:
        todo = "put the CIFAR-10 archives there, or name the folder that holds them: cifar10:FOLDER"
        raise DataError(f"{path} is missing; {todo}.", path=path) from error
    except tarfile.TarError as error:
        raise DataError(f"{path} is damaged or no plain tar archive ({error}). Fetch it again.", path=path) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.", path=path) from error


def _end_of(member: tarfile.TarInfo) -> int:
    """Where the block after a member starts, in bytes from the start of the archive."""
    blocks = -(-member.size // tarfile.BLOCKSIZE) if member.isreg() else 0
    return member.offset_data + blocks * tarfile.BLOCKSIZE


def _require_end_marker(file: BinaryIO, end: int, path: Path) -> None:
    """Raise unless a zero block follows the last member.

    tarfile takes a damaged header, or the end of the file, for the end of the archive and says nothing: a
    data set would be short without anyone knowing.
    """
    file.seek(end)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise DataError(f"{path} is damaged or cut off at byte {end}: no end marker. Fetch it again.", path=path)


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> TarMember:
    name = MEMBER_NAME.fullmatch(member.name)
    if name is None or member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise _bad_member(path, member.name, "does not belong there; allowed are files named class/number.jpg")
    if not 0 < member.size <= MAX_MEMBER_BYTES:
        raise _bad_member(path, member.name, f"has {member.size} bytes; allowed are 1 to {MAX_MEMBER_BYTES}")
    stream = archive.extractfile(member)
    assert stream is not None, "a regular member has content"
    return member.name, name[1], stream.read()


def _decode(jpeg: bytes, path: Path, name: str) -> np.ndarray:
    """Decode one picture to ``uint8 [H, W, 3]``."""
    try:
        with Image.open(io.BytesIO(jpeg), formats=["JPEG"]) as image:
            if image.width * image.height > MAX_IMAGE_PIXELS:
                size = f"{image.width} x {image.height} pixels"
                raise _bad_member(path, name, f"has {size}; allowed are {MAX_IMAGE_PIXELS} in all")
            return np.array(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _bad_member(path, name, f"is no JPEG that can be decoded ({error})") from error


def _bad_member(path: Path, name: str, what: str) -> DataError:
    return DataError(f"{path}: member {name[:200]!r} {what}.", path=path, sample=name)
