"""Cores are dealt out to one worker each, physical ones first, across all owners of workers of a user."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.pool.launch import cpu_affinity
from onebox.pool.launch.cpu_affinity import CoreAllocator, by_preference, numbers, online_cores, siblings_of

EVERY = set(range(8))
PAIRS = {core: (core % 4, core % 4 + 4) for core in EVERY}
"""Four cores of two hyperthreads each, numbered as Linux does."""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of four cores with two hyperthreads each, all of which this process may use."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(EVERY))
    monkeypatch.setattr(cpu_affinity, "online_cores", lambda: set(EVERY))
    monkeypatch.setattr(cpu_affinity, "siblings_of", lambda found: {core: PAIRS[core] for core in found})


@pytest.mark.parametrize(
    ("text", "found"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0,2-3", {0, 2, 3})]
)
def test_lists_of_the_kernel(text: str, found: set[int]) -> None:
    assert numbers(text) == found


def test_this_host() -> None:
    every = online_cores()
    assert os.sched_getaffinity(0) <= every
    assert all(core in found for core, found in siblings_of(every).items())


@given(st.sets(st.sampled_from(sorted(EVERY)), min_size=1))
def test_one_of_each_pair_comes_first(some: set[int]) -> None:
    order = by_preference(some, PAIRS)
    assert set(order) == some
    pairs = len({PAIRS[core] for core in some})
    assert len({PAIRS[core] for core in order[:pairs]}) == pairs


@pytest.mark.usefixtures("host")
def test_owners_share_a_host(tmp_path: Path) -> None:
    """Each worker has cores of its own; who comes when too few are left gets none and takes none."""
    one, other = CoreAllocator(tmp_path), CoreAllocator(tmp_path)
    assert one.allocate([2, 0, 1]) == ((0, 1), (), (2,))
    assert other.allocate([3, 2]) == ((3, 4, 5), (6, 7))
    assert one.allocate([1]) == ((),)
    other.give_back([4, 0])
    assert one.allocate([2]) == ((),)
    assert one.allocate([1]) == ((4,),)
    one.close()
    one.close()
    assert other.allocate([4]) == ((0, 1, 2, 4),)
    other.close()


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("threads", [[9], [5, 4]])
def test_more_threads_than_cores(threads: Sequence[int], tmp_path: Path) -> None:
    assert CoreAllocator(tmp_path).allocate(threads) == ((),) * len(threads)


@pytest.mark.usefixtures("host")
def test_a_user_who_has_limited_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    assert CoreAllocator(tmp_path).allocate([1]) == ((),)


@pytest.mark.usefixtures("host")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    """Nothing is locked behind a link that somebody has put where the folder would be."""
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert CoreAllocator(tmp_path / "link").allocate([1]) == ((),)
    assert not list((tmp_path / "target").iterdir())
