"""Batches of uneven ranks have, together, the samples of equal ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from onebox.errors import UsageError
from onebox.integrations.torch import UnevenSampler
from onebox.vgpu import SHARES
from onebox.vgpu.distributed.uneven_ranks import loading, slow_rank


def equal(length: int, ranks: int, rank: int, **options: Any) -> DistributedSampler[int]:
    return DistributedSampler(range(length), num_replicas=ranks, rank=rank, **options)


@given(
    st.integers(1, 60),
    st.integers(1, 7),
    st.lists(st.floats(0.01, 10), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
)
def test_each_step_has_the_samples_of_equal_batches(
    length: int, batch: int, shares: list[float], shuffle: bool, even: bool, last: bool, epoch: int
) -> None:
    ranks = range(len(shares))
    samplers = [equal(length, len(shares), rank, shuffle=shuffle, drop_last=even, seed=5) for rank in ranks]
    uneven = [UnevenSampler(each, batch, shares=shares, drop_last=last) for each in samplers]
    for sampler in uneven:
        sampler.set_epoch(epoch)
    ours = [list(sampler) for sampler in uneven]
    theirs = [list(BatchSampler(sampler, batch, last)) for sampler in samplers]
    assert [len(batches) for batches in ours] == [len(sampler) for sampler in uneven]
    assert [len(batches) for batches in ours] == [len(batches) for batches in theirs]
    for step in range(len(ours[0])):
        together, expected = [sorted(index for each in side for index in each[step]) for side in (ours, theirs)]
        assert together == expected
        assert all(each[step] for each in ours), "a rank without a sample would leave the others waiting"


def test_a_fast_rank_has_more() -> None:
    sizes = [[len(each) for each in UnevenSampler(equal(70, 2, rank), 16, shares=[3, 1])] for rank in range(2)]
    assert sizes == [[24, 24, 5], [8, 8, 1]]


def test_loaders_of_a_script_that_runs_uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for training alone: means of an evaluation are weighted by the script."""
    monkeypatch.setattr(DataLoader, "__init__", loading(DataLoader.__init__))
    data = list(range(32))
    assert [len(batch) for batch in DataLoader(data, 4, sampler=equal(32, 2, 0))] == [4] * 4
    monkeypatch.setenv(SHARES, "1,0.25")
    sampler = equal(32, 2, 0)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    assert [len(batch) for batch in loader] == [7] * 4
    assert loader.sampler is sampler
    assert [len(batch) for batch in DataLoader(data, 4, sampler=equal(32, 2, 0, shuffle=False))] == [4] * 4
    assert [len(batch) for batch in DataLoader(data, 4)] == [4] * 8


def test_a_slow_rank_is_named_with_its_cost() -> None:
    assert slow_rank([1.0, 3.9]).startswith("rank 1 takes 3.9 times as long as rank 0: --uneven would save 59 %")
    assert slow_rank([2.0, 1.0, 2.0]).startswith("rank 0 takes 2 times as long as rank 1")
    assert slow_rank([1.0, 1.2, 1.1]) == slow_rank([1.0]) == ""


@pytest.mark.parametrize("shares", [[], [1.0], [1.0, 0.0], [1.0, float("inf")]])
def test_wrong_shares(shares: list[float]) -> None:
    with pytest.raises(UsageError, match="for 2 ranks: a positive number is needed for each"):
        UnevenSampler(equal(4, 2, 0), 1, shares=shares)
    with pytest.raises(UsageError, match="batch_size=0"):
        UnevenSampler(equal(4, 2, 0), 0, shares=[1, 1])


@pytest.mark.parametrize("text", ["1,x", "1,-1", "nan", "1,,1"])
def test_a_wrong_variable(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARES, text)
    with pytest.raises(UsageError, match=f"{SHARES}={text}: allowed are positive numbers"):
        UnevenSampler(equal(4, 2, 0), 1)


def test_a_shard_of_accelerate_needs_a_share_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")
    monkeypatch.setenv(SHARES, "1,2,3")
    shard = data_loader.BatchSamplerShard(BatchSampler(RandomSampler(range(8)), 2, drop_last=False), 2, 0)
    with pytest.raises(UsageError, match="for 2 ranks: a positive number is needed for each"):
        loading(DataLoader.__init__)(DataLoader.__new__(DataLoader), range(8), batch_sampler=shard)
