"""The IDX reader takes exactly one well-formed array, and says what is wrong with anything else."""

import gzip

import numpy as np
import pytest
import torch

from onebox.errors import DataError
from onebox.feed.sources.formats.idx import MAX_VALUES_BYTES, read_idx

VALUES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_reads_values_and_shape(tmp_path, idx_bytes, pack):
    path = tmp_path / "file"
    path.write_bytes(pack(idx_bytes(VALUES)))

    read = read_idx(path, dims=3)

    assert read.dtype == torch.uint8
    assert read.tolist() == VALUES.tolist()


def header(*shape: int, magic: bytes = b"\0\0\x08\x03") -> bytes:
    return magic + b"".join(size.to_bytes(4, "big") for size in shape)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "starts with nothing"),
        (b"\0\0", "starts with 0000;"),
        (header(1, 1, 1, magic=b"\0\0\x08\x01") + b"x", "3-dimensional IDX bytes start with 00000803"),
        (header(1, 1, 1, magic=b"\0\0\x0d\x03") + b"x", "starts with 00000d03"),
        (header(1, 1), "ends inside its header, after 12 bytes"),
        (header(2, 3, 4) + bytes(23), "24 bytes of values, and only 23 came"),
        (header(2, 3, 4) + bytes(25), "24 bytes of values, and more came"),
        (header(0, 3, 4), "allowed are 1 to"),
        (header(2**32 - 1, 2**32 - 1, 2**32 - 1), f"allowed are 1 to {MAX_VALUES_BYTES}"),
    ],
)
def test_names_what_is_wrong(tmp_path, pack, content, said):
    path = tmp_path / "file"
    path.write_bytes(pack(content))

    with pytest.raises(DataError, match=said) as raised:
        read_idx(path, dims=3)

    assert raised.value.path == path
    assert str(path) in str(raised.value)


def break_checksum(zipped: bytes) -> bytes:
    return zipped[:-8] + bytes([zipped[-8] ^ 1]) + zipped[-7:]


@pytest.mark.parametrize(
    "damage",
    [break_checksum, lambda zipped: zipped[:-9], lambda zipped: zipped[:12] + b"\xff" * 8 + zipped[20:]],
    ids=["checksum", "cut off", "overwritten"],
)
def test_broken_gzip(tmp_path, idx_bytes, damage):
    path = tmp_path / "file.gz"
    path.write_bytes(damage(gzip.compress(idx_bytes(VALUES))))

    with pytest.raises(DataError, match="gzip stream is broken"):
        read_idx(path, dims=3)


def test_missing_file(tmp_path):
    with pytest.raises(DataError, match="absent cannot be read"):
        read_idx(tmp_path / "absent", dims=1)
