"""Placements: shares make up the whole, and views of shares are shares of views."""

from __future__ import annotations

import doctest
import types

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.graph.shard import placements, search
from onebox.graph.shard.placements import (
    PARTIAL,
    REPLICATE,
    Shard,
    cuts_of,
    even_parts,
    local_spec,
    reshaped,
    shard_of,
)
from onebox.wire import spec_of
from tests.unit.graph.ranks import unshard

sizes = st.lists(st.integers(1, 3), min_size=2, max_size=4).map(tuple)


@st.composite
def placed(draw: st.DrawFn) -> tuple[torch.Tensor, Shard]:
    """A tensor and a split of it."""
    shares, blocks = draw(sizes), draw(st.integers(1, 3))
    before = draw(st.lists(st.integers(1, 4), max_size=2))
    behind = draw(st.lists(st.integers(1, 4), max_size=2))
    shape = (*before, blocks * sum(shares), *behind)
    return torch.arange(torch.Size(shape).numel()).reshape(shape), Shard(len(before), shares, blocks)


@given(placed())
def test_shares_make_up_the_whole(made: tuple[torch.Tensor, Shard]) -> None:
    tensor, shard = made
    parts = [shard_of(tensor, shard, rank) for rank in range(len(shard.sizes))]
    assert torch.equal(unshard(parts, shard), tensor)
    assert [spec_of(part) for part in parts] == [local_spec(spec_of(tensor), shard, r) for r in range(len(parts))]
    assert all(part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes for part in parts)


@given(placed(), st.data())
def test_a_view_of_a_share_is_a_share_of_the_view(made: tuple[torch.Tensor, Shard], data: st.DataObject) -> None:
    tensor, shard = made
    after = data.draw(st.sampled_from(_shapes(tensor.numel())))
    view = reshaped(tensor.shape, after, shard)
    assume(view is not None)
    assert view is not None
    for rank in range(len(shard.sizes)):
        share = shard_of(tensor, shard, rank).reshape(view.local(after, rank))
        assert torch.equal(share, shard_of(tensor.reshape(after), view, rank))
    assert reshaped(after, tensor.shape, view) == shard, "and back"


def _shapes(count: int) -> list[tuple[int, ...]]:
    """Return all shapes of up to three dimensions."""
    found = [(count,), (1, count)]
    for a in range(1, count + 1):
        for b in range(1, count // a + 1):
            if count % (a * b) == 0:
                found.append((a, b, count // (a * b)))
    return found


@given(placed(), st.data())
def test_a_view_without_a_split_has_none(made: tuple[torch.Tensor, Shard], data: st.DataObject) -> None:
    tensor, shard = made
    after = data.draw(st.sampled_from(_shapes(tensor.numel())))
    assume(tensor.numel() <= 200 and reshaped(tensor.shape, after, shard) is None)
    flat = tensor.reshape(after)
    shares = [set(shard_of(tensor, shard, rank).flatten().tolist()) for rank in range(len(shard.sizes))]
    for dim, size in enumerate(after):
        rows = flat.movedim(dim, 0).reshape(size, -1)
        whole = all(any(set(row.tolist()) <= share for share in shares) for row in rows)
        assert not whole or len(shares) == 1, "each index would belong to one rank"


@given(st.integers(1, 40), st.integers(2, 5), st.integers(1, 4))
def test_apportioning(size: int, ranks: int, unit: int) -> None:
    shares = even_parts(size, ranks, unit)
    if shares is None:
        assert size % unit or size // unit < ranks
    else:
        assert sum(shares) == size
        assert all(share > 0 and share % unit == 0 for share in shares)
        assert max(shares) - min(shares) <= unit
        assert list(shares) == sorted(shares, reverse=True)


def test_heads_merged_behind_a_batch_are_blocks() -> None:
    assert reshaped((2, 6, 5), (12, 5), Shard(1, (4, 2))) == Shard(0, (4, 2), blocks=2)
    assert reshaped((12, 5), (2, 6, 5), Shard(0, (4, 2), blocks=2)) == Shard(1, (4, 2))
    assert reshaped((7, 12), (7, 3, 4), Shard(1, (8, 4))) == Shard(1, (2, 1))
    assert reshaped((7, 12), (7, 3, 4), Shard(1, (6, 6))) is None
    assert reshaped((0, 12), (12, 0), Shard(1, (6, 6))) is None


def test_where_views_take_dimensions_apart() -> None:
    assert cuts_of((5, 36), (5, 3, 12)) == {36: {12}}
    assert cuts_of((2, 3, 4), (6, 4)) == {6: {3}}
    assert cuts_of((4, 0), (0,)) == {}


def test_whole_tensors_and_terms() -> None:
    tensor = torch.arange(6.0)
    assert shard_of(tensor, REPLICATE, 1) is tensor
    with pytest.raises(UsageError, match="no terms"):
        shard_of(tensor, PARTIAL, 0)
    with pytest.raises(UsageError, match="does not fit"):
        shard_of(tensor, Shard(0, (3, 4)), 0)
    with pytest.raises(UsageError, match="does not fit"):
        shard_of(tensor, Shard(1, (3, 3)), 0)


@pytest.mark.parametrize("module", [placements, search], ids=["placements", "shard"])
def test_examples_in_docstrings(module: types.ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
