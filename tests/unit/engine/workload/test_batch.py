"""Batches: nested tensors, flattened and cut along the samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten

from onebox.engine.workload.batch import as_batch, as_pair
from onebox.errors import OneboxError, UsageError
from onebox.wire import from_frame, spec_of

X = torch.zeros(2, 3)

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
    assert batch.structure.nesting == structure
    for mine, theirs in zip(batch.slice(2, 3), leaves, strict=True):
        assert torch.equal(mine, theirs[2:5])


@pytest.mark.parametrize(("inputs", "targets"), NESTED)
def test_an_example_is_nested_and_typed_like_the_batch(inputs: Any, targets: Any) -> None:
    batch = as_batch(inputs, targets)
    leaves, structure = tree_flatten(batch.example(4))
    assert structure == batch.structure.nesting
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


def test_constants_are_part_of_the_structure() -> None:
    x, y = torch.arange(6), {"y": torch.ones(6), "weight": None}
    batch = as_batch((x, 0.5, None, True, (2, np.float32(3)), 1j), y)
    assert len(batch.leaves) == 2
    inputs, targets = batch.example(2)
    assert inputs[1:] == (0.5, None, True, (2, 3.0), 1j)
    assert [type(one) for one in (*inputs[1:4], *inputs[4])] == [float, type(None), bool, int, float]
    assert inputs[0].shape == targets["y"].shape == (2,)
    assert targets["weight"] is None
    nested, _ = batch.structure.nest(batch.slice(1, 3))
    assert torch.equal(nested[0], x[1:4])


def test_a_batch_may_have_no_targets() -> None:
    batch = as_batch(torch.zeros(3, 2))
    assert batch.example(2)[1] is None
    assert batch.signature(2) != as_batch(torch.zeros(3, 2), torch.zeros(3)).signature(2)


@pytest.mark.parametrize(
    ("one", "other", "same_kind"),
    [
        (0.5, 0.25, True),
        (1, 2, True),
        (0.0, -0.0, True),
        (1, 1.0, False),
        (1, True, False),
        (None, 0, False),
    ],
)
def test_another_constant_is_another_capture(one: Any, other: Any, same_kind: bool) -> None:
    x = torch.zeros(3)
    first, second = as_batch((x, one)), as_batch((x, other))
    assert first.signature(3) != second.signature(3)
    assert (first.structure.key == second.structure.key) is same_kind
    assert first.signature(3) == as_batch((x + 1, one)).signature(3)


def test_not_a_number_is_one_constant() -> None:
    x = torch.zeros(3)
    assert as_batch((x, float("nan"))).signature(3) == as_batch((x, float("nan"))).signature(3)


ARRAYS = {
    "float32": np.arange(6, dtype=np.float32).reshape(3, 2),
    "bool": np.array([True, False, True]),
    "int16": np.arange(3, dtype=np.int16),
    "big endian": np.arange(3, dtype=">f8"),
    "negative strides": np.arange(3)[::-1],
    "strides of no whole element": np.zeros(3, dtype=[("a", "i1"), ("b", "<f8")])["b"],
    "transposed": np.arange(6.0).reshape(2, 3).T,
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_become_tensors(name: str) -> None:
    (leaf,) = as_batch({"x": ARRAYS[name]}).leaves
    assert leaf.tolist() == ARRAYS[name].tolist()
    assert str(leaf.dtype) == f"torch.{ARRAYS[name].dtype.newbyteorder('=').name}"


def test_an_array_shares_its_memory_unless_it_cannot_be_written_to() -> None:
    array = np.zeros(3)
    (shared,) = as_batch(array).leaves
    array[0] = 1
    assert shared[0] == 1
    array.flags.writeable = False
    (copied,) = as_batch(array).leaves  # without PyTorch's warning, which the tests take for an error
    copied[0] = 2
    assert array[0] == 1


@pytest.mark.parametrize("item", [(X,), [X], X, (X, None)])
def test_an_item_of_a_loader_may_have_no_targets(item: Any) -> None:
    assert as_pair(item) == (X, None)


def test_an_item_of_a_loader_is_a_pair() -> None:
    assert as_pair([X, 1]) == (X, 1)
    with pytest.raises(UsageError, match=r"a batch is a tuple of 3; .* \(\(x, mask\), targets\)"):
        as_pair((X, X, X))


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (torch.zeros(3), torch.zeros(4), "same, non-zero number of samples"),
        (torch.zeros(0), torch.zeros(0), "non-zero"),
        (torch.tensor(1.0), torch.zeros(1), r"inputs has no dimension: give it as a number, inputs\.item\(\)"),
        ((torch.zeros(2), torch.tensor(1.0)), torch.zeros(2), r"inputs\[1\] has no dimension: .*inputs\[1\]\.expand"),
        ((torch.zeros(8, 2), torch.zeros(3, 3)), torch.zeros(8), r"inputs\[1\] is the same .*expand\(8, 3, 3\)"),
        ({"x": torch.zeros(8, 2), "m": torch.zeros(1, 3)}, torch.zeros(8), r"inputs\['m'\]\.expand\(8, 3\)"),
        (torch.zeros(5, 8, 2), torch.zeros(8), r"samples are in dimension 1 \(batch_first=False\)"),
        ((torch.zeros(5, 8, 2), torch.zeros(7, 8)), None, r"batch_first=False"),
        ((), (), "no tensor at all"),
        (None, None, "no tensor at all"),
        ([1.0, 2.0], torch.zeros(2), r"inputs is a list of 2 numbers; make it a tensor, torch\.tensor\(inputs\)"),
        (torch.zeros(2), {"y": [[1], [2]]}, r"targets\['y'\] is a list of 2 numbers"),
        ({"text": "abc"}, torch.zeros(3), r"inputs\['text'\] is a str"),
        ((torch.zeros(3), np.array(["a", "b", "c"])), None, r"inputs\[1\] is an array of <U1"),
        (np.ma.array([1.0, 2.0], mask=[False, True]), None, "inputs is a masked array"),
        ((torch.zeros(3), object()), None, r"inputs\[1\] is a object"),
        (torch.zeros(3, dtype=torch.uint16), torch.zeros(3), "inputs: .*uint16"),
    ],
)
def test_what_is_no_batch(inputs: Any, targets: Any, message: str) -> None:
    with pytest.raises(OneboxError, match=message) as caught:
        as_batch(inputs, targets)
    assert isinstance(caught.value, UsageError) or "uint16" in message


@pytest.mark.parametrize("sizes", [(3, 0, 4), (7,)], ids=str)
def test_elements_of_samples_are_those_of_the_slices(sizes: tuple[int, ...]) -> None:
    """Also where the samples are not side by side in memory, and where each has no elements."""
    targets = torch.arange(14.0).reshape(2, 7).t(), torch.zeros(7, 0)
    batch, start = as_batch(torch.arange(21).reshape(7, 3), targets), 0
    for size in sizes:
        for leaf, part in enumerate(batch.slice(start, size)):
            spec, frame = batch.elements(leaf, start, size)
            assert torch.equal(from_frame(spec, frame), part) and spec == spec_of(part)
        start += size


def test_elements_of_dense_samples_are_not_copied() -> None:
    inputs = torch.zeros(4, 2)
    _, frame = as_batch(inputs).elements(0, 2, 1)
    inputs[2] = 1.0
    assert bytes(frame) == bytes(inputs[2].numpy().tobytes())
