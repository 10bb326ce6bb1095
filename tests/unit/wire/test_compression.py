"""Packed frames: what goes in comes out, and nothing else does, whatever somebody sends."""

from __future__ import annotations

import contextlib
import os
import sys

import lz4.block
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import WireError
from onebox.wire import Codec, compression, pack, unpack
from tests.kit.fresh import fresh

EACH = pytest.mark.parametrize("codec", ["lz4", "zstd"])

REPEATED = st.builds(lambda part, times: part * times, st.binary(min_size=1, max_size=40), st.integers(1, 2000))
ANY = st.one_of(st.binary(min_size=1, max_size=5000), REPEATED)


@EACH
@given(frame=ANY)
def test_what_is_packed_is_unpacked(codec: Codec, frame: bytes) -> None:
    packed = pack(codec, memoryview(frame))
    assert unpack(codec, memoryview(packed), len(frame)) == frame


@EACH
@given(frame=ANY, wrong=st.integers(1, 100_000))
def test_another_size_than_the_tensors_is_refused(codec: Codec, frame: bytes, wrong: int) -> None:
    if wrong != len(frame):
        with pytest.raises(WireError):
            unpack(codec, pack(codec, frame), wrong)


@EACH
@given(frame=st.binary(max_size=300), size=st.integers(-1, 1 << 40))
def test_any_bytes_become_a_tensors_or_are_refused(codec: Codec, frame: bytes, size: int) -> None:
    with contextlib.suppress(WireError):
        assert len(unpack(codec, frame, size)) == size


@EACH
@given(frame=REPEATED, place=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_damaged_frame_has_the_right_size_or_is_refused(codec: Codec, frame: bytes, place: int, value: int) -> None:
    packed = bytearray(pack(codec, frame))
    packed[place % len(packed)] = value
    for damaged in (bytes(packed), bytes(packed[: place % len(packed)]), bytes(packed) + b"more"):
        with contextlib.suppress(WireError):
            assert len(unpack(codec, damaged, len(frame))) == len(frame)


def test_bombs_are_refused_before_they_are_unpacked() -> None:
    zeros = bytes(64 << 20)
    level = zstandard.ZstdCompressor(level=3)
    with pytest.raises(WireError, match="says it has"):
        unpack("zstd", level.compress(zeros), 100)
    unsaid = zstandard.ZstdCompressor(write_content_size=False).compress(zeros)
    with pytest.raises(WireError, match="says it has"):
        unpack("zstd", unsaid, 100)
    with pytest.raises(WireError, match="cannot unpack"):
        unpack("lz4", lz4.block.compress(zeros, store_size=False), 100)
    with pytest.raises(WireError, match="cannot become"):
        unpack("lz4", b"abc", 1 << 30)
    for size in (0, compression.MOST_BYTES + 1):
        with pytest.raises(WireError, match="allowed are 1 to"):
            unpack("zstd", level.compress(zeros), size)
    with pytest.raises(WireError, match="allowed are 1 to"):
        pack("lz4", b"")


def test_a_frame_that_wants_a_dictionary_is_refused() -> None:
    words = zstandard.train_dictionary(2000, [os.urandom(20) * 20 for _ in range(400)])
    frame = zstandard.ZstdCompressor(dict_data=words).compress(bytes(100))
    with pytest.raises(WireError):
        unpack("zstd", frame, 100)


@pytest.mark.parametrize(
    ("missing", "there", "says"),
    [
        ([], ("lz4", "zstd"), "'brotli' cannot be read here; this process has lz4, zstd"),
        (["lz4.block"], ("zstd",), "'lz4' cannot be read here; this process has zstd"),
        (["lz4.block", "zstandard"], (), r"'zstd' cannot .* no codec \(pip install 'onebox\[compression\]'\)"),
    ],
)
def test_without_the_libraries_nothing_is_packed(
    missing: list[str], there: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    made = fresh(compression)
    assert made.codecs() == there
    with pytest.raises(WireError, match=says):
        made.unpack(says.split("'")[1], b"abc", 3)
