"""Padding to buckets: what is added, to which tensors, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset

from onebox import Buckets, Feed
from onebox.errors import UsageError


@given(size=st.integers(1, 300), multiple=st.integers(1, 40))
def test_a_multiple_is_the_next_one(size: int, multiple: int) -> None:
    found = Buckets(multiple=multiple).bucket(size)
    assert found % multiple == 0
    assert size <= found < size + multiple


@given(sizes=st.sets(st.integers(1, 100), min_size=1), size=st.integers(1, 100))
def test_a_bucket_is_the_smallest_that_is_large_enough(sizes: set[int], size: int) -> None:
    pad = Buckets(sizes=sorted(sizes))
    enough = [each for each in sizes if each >= size]
    if enough:
        assert pad.bucket(size) == min(enough)
    else:
        with pytest.raises(UsageError, match=f"size of {size} in dimension 1 is larger than the largest"):
            pad.bucket(size)


def test_all_tensors_with_the_dimension_are_padded() -> None:
    x, mask, y = torch.ones(2, 3, 5), torch.ones(2, 3, dtype=torch.bool), torch.tensor([7, 8])
    (inputs, targets) = Buckets(sizes=(4, 8))(({"x": x, "mask": mask, "scale": 2.0}, y))
    assert torch.equal(inputs["x"], torch.cat([x, torch.zeros(2, 1, 5)], 1))
    assert torch.equal(inputs["mask"], torch.tensor([[True, True, True, False]] * 2))
    assert inputs["scale"] == 2.0
    assert targets is y


def test_named_tensors_have_values_and_buckets_of_their_own() -> None:
    pad = Buckets(sizes=(4, 8), tensors={"inputs[0]": 1, "targets": -100})
    (x, kept), y = pad(((torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 3)), torch.ones(1, 2, dtype=torch.int64)))
    assert x.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    assert kept.shape == (1, 3)
    assert y.tolist() == [[1, 1, -100, -100]]


def test_what_fits_stays_and_what_came_is_not_written_to() -> None:
    x, fits = torch.ones(2, 3), torch.ones(2, 4)
    pad = Buckets(multiple=4)
    pad((x, None))
    assert torch.equal(x, torch.ones(2, 3))
    assert pad((fits, None))[0] is fits


@pytest.mark.parametrize("kind", [np.float32, np.int64, np.bool_, np.complex64])
def test_arrays_are_padded_as_tensors_are(kind: Any) -> None:
    array = np.ones((2, 3, 2), dtype=kind)
    pad = Buckets(multiple=4, dim=1, value=1)
    found, _ = pad((array, None))
    assert found.dtype == array.dtype
    assert torch.equal(torch.from_numpy(found), pad((torch.from_numpy(array), None))[0])


def test_samples_become_as_long_as_the_longest_needs() -> None:
    samples = [(torch.arange(length), length) for length in (3, 5, 1)]
    found = Buckets(multiple=4, value=-1).samples(samples)
    assert [x.tolist() for x, _ in found] == [
        [0, 1, 2, -1, -1, -1, -1, -1],
        [0, 1, 2, 3, 4, -1, -1, -1],
        [0, -1, -1, -1, -1, -1, -1, -1],
    ]
    assert [length for _, length in found] == [3, 5, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"sizes=\(32, 64, 128\)"),
        ({"sizes": (4,), "multiple": 4}, "or a multiple"),
        ({"sizes": 4}, "several sizes"),
        ({"sizes": (8, 4)}, "ascending"),
        ({"sizes": (0, 4)}, "from 1"),
        ({"sizes": (4.5,)}, "whole numbers"),
        ({"multiple": 0}, "multiple=0"),
        ({"multiple": True}, "multiple=True"),
        ({"multiple": 4, "dim": 0}, "dimension|0 is the samples"),
        ({"multiple": 4, "tensors": "inputs"}, r"\('inputs',\)"),
    ],
)
def test_what_makes_no_buckets_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Buckets(**options)


@pytest.mark.parametrize(
    ("options", "batch", "message"),
    [
        ({}, (torch.ones(2), None), r"no tensor has dimension 1.*inputs \[2\]"),
        ({}, (torch.ones(2, 3), torch.ones(2, 5)), r"differ in dimension 1.*targets \[2, 5\].*tensors=\('inputs',\)"),
        ({"tensors": ("mask",)}, (torch.ones(2, 3), None), r"no such tensor; shapes: inputs \[2, 3\]"),
        ({"tensors": ("targets",)}, (torch.ones(2, 3), torch.ones(2)), "dimension 1 of targets, which has none"),
        ({"value": 0.5}, (torch.ones(2, 3, dtype=torch.int64), None), "0.5, and its type has whole numbers"),
    ],
)
def test_batches_that_cannot_be_padded_are_refused(options: dict[str, Any], batch: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Buckets(multiple=4, **options)(batch)


LENGTHS = (3, 6, 2, 5, 9)


class Sequences(Dataset[tuple[Tensor, int]]):
    """Samples of several lengths."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((LENGTHS[index],), 1.0 + LENGTHS[index]), LENGTHS[index]


def test_a_feed_pads_samples_of_several_lengths() -> None:
    feed = Feed(Sequences(), batch_size=2, shuffle=False, pad=Buckets(sizes=(4, 8, 16)))
    batches = list(feed.epoch(0))
    assert [tuple(x.shape) for x, _ in batches] == [(2, 8), (2, 8), (1, 16)]
    for x, lengths in batches:
        for row, length in zip(x, lengths.tolist(), strict=True):
            assert row.tolist() == [1.0 + length] * length + [0.0] * (len(row) - length)


def test_a_feed_pads_what_a_collate_of_the_users_has_made() -> None:
    def longest(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        sequences = [x for x, _ in samples]
        return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True), torch.tensor([n for _, n in samples])

    feed = Feed(Sequences(), batch_size=2, shuffle=False, collate=longest, pad=Buckets(multiple=4))
    assert [tuple(x.shape) for x, _ in feed.epoch(0)] == [(2, 8), (2, 8), (1, 12)]


def test_a_feed_pads_the_batches_of_a_loader() -> None:
    batches = [(torch.ones(2, length), torch.zeros(2)) for length in LENGTHS]
    assert [tuple(x.shape) for x, _ in Feed(iter(batches), pad=Buckets(multiple=4)).epoch(0)] == [
        (2, 4), (2, 8), (2, 4), (2, 8), (2, 12),
    ]  # fmt: skip


def test_what_is_too_long_for_a_feed_is_said() -> None:
    with pytest.raises(UsageError, match="size of 9 in dimension 1 is larger than the largest bucket, 8"):
        list(Feed(Sequences(), batch_size=2, shuffle=False, pad=Buckets(sizes=(8,))).epoch(0))
    with pytest.raises(UsageError, match="pad is a int"):
        Feed(Sequences(), batch_size=2, pad=8)  # type: ignore[arg-type]
