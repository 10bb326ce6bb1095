"""How uploads travel: the decision alone, and what is made of it."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.pool.network.upload_compression import (
    LEAST_BYTES,
    MEASURED_EVERY,
    CodecMeasurement,
    UploadCompression,
    choose_codec,
)
from onebox.wire import Codec, unpack

SPEEDS = st.floats(1e6, 1e11)
FOUND = st.builds(
    lambda ratio, pack, out: CodecMeasurement(ratio=ratio, pack_bps=pack, unpack_bps=out),
    st.floats(0.001, 1.1),
    SPEEDS,
    SPEEDS,
)


def seconds(link_bps: float, found: CodecMeasurement) -> float:
    return max(1 / found.pack_bps, found.ratio / link_bps) + 1 / found.unpack_bps


@given(link_bps=SPEEDS, lz4=FOUND, zstd=FOUND)
def test_what_is_chosen_is_the_fastest_by_a_tenth(
    link_bps: float, lz4: CodecMeasurement, zstd: CodecMeasurement
) -> None:
    measured: dict[Codec, CodecMeasurement] = {"lz4": lz4, "zstd": zstd}
    chosen = choose_codec(link_bps, measured)
    best = min(seconds(link_bps, lz4), seconds(link_bps, zstd))
    if chosen is None:
        assert best >= 0.9 / link_bps
    else:
        assert seconds(link_bps, measured[chosen]) == best < 0.9 / link_bps


@given(found=FOUND, link_bps=SPEEDS)
def test_a_compressor_slower_than_the_link_is_not_used(found: CodecMeasurement, link_bps: float) -> None:
    if found.pack_bps < link_bps:
        assert choose_codec(link_bps, {"zstd": found}) is None


def test_a_link_that_costs_nothing_needs_none() -> None:
    found = CodecMeasurement(ratio=0.001, pack_bps=1e15, unpack_bps=1e15)
    assert choose_codec(math.inf, {"lz4": found}) is None
    assert choose_codec(1e6, {}) is None


def packing(bps: float, codecs: tuple[str, ...] = ("lz4", "zstd")) -> UploadCompression:
    devices: Any = [SimpleNamespace(codecs=codecs)]
    return UploadCompression(devices, {0: bps})


@pytest.mark.parametrize("codecs", [("lz4",), ("zstd",), ("lz4", "zstd")])
def test_parts_are_packed_for_slow_links(codecs: tuple[str, ...]) -> None:
    frame = bytes(range(100)) * 1000
    codec, packed = packing(1e5, codecs).packed(0, 0, memoryview(frame))
    assert codec in codecs
    assert len(packed) < len(frame) / 10
    assert unpack(codec, packed, len(frame)) == frame


def test_parts_go_as_they_are_where_packing_gains_nothing() -> None:
    repeated, noise = memoryview(bytes(100_000)), memoryview(os.urandom(100_000))
    assert packing(math.inf).packed(0, 0, repeated) == (None, repeated)
    assert packing(1e5, ()).packed(0, 0, repeated) == (None, repeated)
    assert packing(1e5).packed(0, 0, noise) == (None, noise)
    few = repeated[: LEAST_BYTES - 1]
    assert packing(1e5).packed(0, 0, few) == (None, few)
    known = packing(1e5)
    assert known.packed(0, 0, repeated)[0] is not None
    assert known.packed(0, 0, noise) == (None, noise)  # this one turned out to be larger packed


def test_data_that_comes_to_compress_otherwise_is_measured_again() -> None:
    repeated, noise = memoryview(bytes(100_000)), memoryview(os.urandom(100_000))
    for first, later in ((repeated, noise), (noise, repeated)):
        known = packing(1e5)
        known.packed(0, 0, first)
        for _ in range(MEASURED_EVERY - 1):
            known.packed(0, 0, later)
        assert (known.packed(0, 0, later)[0] is not None) == (later is repeated)


def test_the_kind_that_was_sent_longest_ago_is_forgotten_where_there_are_too_many() -> None:
    known, repeated, noise = packing(1e5), memoryview(bytes(LEAST_BYTES)), memoryview(os.urandom(LEAST_BYTES))
    known.packed(0, "first", noise)
    assert known.packed(0, "first", repeated)[0] is None
    for kind in range(2000):
        known.packed(0, kind, repeated)
    assert known.packed(0, "first", repeated)[0] is not None
