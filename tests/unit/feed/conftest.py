"""What the feed's tests share: small files made on the spot, and the folder of real images."""

from __future__ import annotations

import io
import os
import struct
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real images; the test skips where it is absent."""
    folder = Path(os.environ.get("ONEBOX_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real images at {folder}; ONEBOX_TEST_DATA names another folder")
    return folder


@pytest.fixture
def idx_bytes() -> Callable[[np.ndarray], bytes]:
    """Makes the bytes of an IDX file from an array of uint8."""

    def make(values: np.ndarray) -> bytes:
        header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
        return header + values.astype(np.uint8).tobytes()

    return make


@pytest.fixture
def jpeg() -> Callable[..., bytes]:
    """Makes the JPEG bytes of a picture of one colour."""

    def make(colour: tuple[int, int, int] = (0, 0, 0), size: tuple[int, int] = (8, 8), mode: str = "RGB") -> bytes:
        stream = io.BytesIO()
        Image.new("RGB", size, colour).convert(mode).save(stream, "JPEG", quality=95)
        return stream.getvalue()

    return make


@pytest.fixture
def write_tar() -> Callable[[Path, Iterable[tuple[str, bytes]]], Path]:
    """Writes a tar archive of (member name, content) pairs."""

    def write(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
        with tarfile.open(path, "w") as archive:
            for name, content in members:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return path

    return write
