"""Files of tokens: every sample is where it should be, for any length, stride and type."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import DataError, UsageError
from onebox.feed.source import Source
from onebox.feed.sources import Tokens


@pytest.fixture
def path(tmp_path):
    np.arange(100, dtype="<u2").tofile(tmp_path / "train.bin")
    return tmp_path / "train.bin"


@pytest.mark.feature("Data: Read files of tokens")
@given(
    counts=st.lists(st.integers(6, 60), min_size=1, max_size=3),
    length=st.integers(1, 5),
    stride=st.integers(1, 9),
    dtype=st.sampled_from(["uint8", "uint16", "uint32", "int16", "int32", "int64"]),
    header=st.integers(0, 5),
)
def test_samples_are_windows(tmp_path_factory, counts, length, stride, dtype, header):
    folder, expected = tmp_path_factory.mktemp("any"), []
    for number, count in enumerate(counts):
        tokens = np.arange(count) + 60 * number
        (folder / f"{number}.bin").write_bytes(b"h" * header + tokens.astype(dtype).tobytes())
        starts = range(0, count - length, stride)
        expected += [tokens[start : start + length + 1] for start in starts]

    source = Tokens(folder / "*.bin", length=length, stride=stride, dtype=dtype, offset_bytes=header)
    assert len(source) == len(expected)
    for index, window in enumerate(expected):
        inputs, targets = source.decode(source.read(index), index)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.tolist() == window[:-1].tolist()
        assert targets.tolist() == window[1:].tolist()


def test_each_token_is_used_once_by_default(path):
    source = Tokens(path, length=10)
    assert isinstance(source, Source)
    assert len(source) == 9  # the last ten tokens lack one to follow
    assert source.name(3) == "train.bin: token 30"
    with pytest.raises(IndexError):
        source.read(9)


def test_a_token_that_is_none(path):
    source = Tokens(path, length=10, vocabulary=45)
    source.decode(source.read(3), 3)
    with pytest.raises(
        DataError, match=r"train.bin: token 40: token 45 is 5 after that; allowed are 0 to 44"
    ) as raised:
        source.decode(source.read(4), 4)
    assert raised.value.sample == 4


def test_a_file_of_another_type(path):
    os.truncate(path, 101)
    with pytest.raises(DataError, match=r"has 101 bytes of tokens \(after 0\), no multiple of the 2 of uint16"):
        Tokens(path, length=10)


@pytest.mark.parametrize("size_bytes", [0, 20])
def test_too_few_tokens(path, size_bytes):
    os.truncate(path, size_bytes)
    with pytest.raises(DataError, match=f"has {size_bytes // 2} tokens, and a sample needs 11: take a smaller length"):
        Tokens(path, length=10)


def test_a_file_that_becomes_shorter(path):
    source = Tokens(path, length=10)
    os.truncate(path, 100)
    source.read(3)
    with pytest.raises(DataError, match="record 4 is cut off, the file has become shorter"):
        source.read(4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"length": 0}, "length is 0"),
        ({"length": 4, "stride": 0}, "stride is 0"),
        ({"length": 4, "dtype": "float32"}, "dtype is 'float32'; allowed are uint8"),
        ({"length": 4, "offset_bytes": -1}, "offset_bytes is -1"),
        ({"length": 4, "vocabulary": 0}, "vocabulary is 0"),
    ],
)
def test_settings_that_are_not_allowed(path, settings, said):
    with pytest.raises(UsageError, match=said):
        Tokens(path, **settings)
