"""Batches: nested tensors, flattened and cut along the samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten

from onebox.engine.batch import as_batch
from onebox.errors import OneboxError, UsageError

NESTED: list[tuple[Any, Any]] = [
    (torch.arange(6), torch.arange(6)),
    ((torch.zeros(6, 2), {"a": torch.ones(6), "b": (torch.zeros(6, 1, 3),)}), torch.zeros(6, dtype=torch.uint8)),
    ({"input_ids": torch.zeros(6, 4, dtype=torch.int64)}, [torch.zeros(6), torch.ones(6, 2)]),
    (torch.zeros(6, 0), ()),
]


@pytest.mark.parametrize(("inputs", "targets"), NESTED)
def test_slices_are_those_of_the_leaves(inputs: Any, targets: Any) -> None:
    batch = as_batch(inputs, targets)
    leaves, structure = tree_flatten((inputs, targets))
    assert batch.size == 6
    assert batch.structure == structure
    for mine, theirs in zip(batch.slice(2, 3), leaves, strict=True):
        assert torch.equal(mine, theirs[2:5])


@pytest.mark.parametrize(("inputs", "targets"), NESTED)
def test_an_example_is_nested_and_typed_like_the_batch(inputs: Any, targets: Any) -> None:
    batch = as_batch(inputs, targets)
    leaves, structure = tree_flatten(batch.example(4))
    assert structure == batch.structure
    for made, original in zip(leaves, batch.leaves, strict=True):
        assert made.shape == (4, *original.shape[1:])
        assert made.dtype == original.dtype


@given(st.integers(1, 9), st.integers(1, 9))
def test_a_signature_tells_captures_apart(size: int, other: int) -> None:
    one = as_batch(torch.zeros(size, 3), torch.zeros(size))
    assert one.signature(4) == as_batch(torch.ones(other, 3), torch.ones(other)).signature(4), "not the values"
    for different in (
        as_batch(torch.zeros(size, 4), torch.zeros(size)),
        as_batch(torch.zeros(size, 3).double(), torch.zeros(size)),
        as_batch((torch.zeros(size, 3),), torch.zeros(size)),
        as_batch({"x": torch.zeros(size, 3)}, torch.zeros(size)),
    ):
        assert different.signature(4) != one.signature(4)
    assert one.signature(4) != one.signature(5)
    assert hash(one.signature(4)) == hash(one.signature(4))


def test_a_batch_needs_no_gradient() -> None:
    batch = as_batch(torch.zeros(2, requires_grad=True), torch.zeros(2))
    assert not any(leaf.requires_grad for leaf in batch.leaves)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (torch.zeros(3), torch.zeros(4), "same, non-zero number of samples"),
        (torch.zeros(0), torch.zeros(0), "non-zero"),
        (torch.tensor(1.0), torch.zeros(1), "first dimension"),
        ((), (), "no tensor at all"),
        (torch.zeros(2), 3, "found a int"),
        ([1.0, 2.0], torch.zeros(2), "found a float"),
        ({"text": "abc"}, torch.zeros(3), "found a str"),
        (None, torch.zeros(3), "found a"),
        (torch.zeros(3, dtype=torch.uint16), torch.zeros(3), "uint16"),
    ],
)
def test_what_is_no_batch(inputs: Any, targets: Any, message: str) -> None:
    with pytest.raises(OneboxError, match=message) as caught:
        as_batch(inputs, targets)
    assert isinstance(caught.value, UsageError) or "uint16" in message
