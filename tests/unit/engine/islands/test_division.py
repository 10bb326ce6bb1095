"""Division of devices into islands, and of a batch among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.islands.division import are_alike, divided, given_islands, island_seed, island_sizes, near_islands
from onebox.engine.workload.batch import as_batch
from onebox.errors import UsageError
from onebox.pool import DeviceInfo


@pytest.mark.parametrize(
    ("islands", "message"),
    [
        ([[0, 1], [1, 2]], "device 1 is named twice"),
        ([[0, 1]], "device 2 is in no island"),
        ([[0, 1], [2, 3]], "there is no device 3; the pool has 3"),
        ([[0, 1], [-1, 2]], "there is no device -1"),
        ([0, 1, 2], "allowed are 'auto'"),
        ([], "allowed are 'auto'"),
        ([[0, 1, 2], []], "allowed are 'auto'"),
        ("01", "allowed are 'auto'"),
        (3, "allowed are 'auto'"),
        ([["a"]], "allowed are 'auto'"),
    ],
)
def test_each_device_is_in_one_island(islands: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        given_islands(islands, 3)


def test_islands_keep_the_order_in_which_they_are_given() -> None:
    assert given_islands([[2, 0], (1,)], 3) == ((2, 0), (1,))


@pytest.mark.feature("Islands: Find islands by measured links")
def test_islands_are_the_coarsest_groups_of_near_devices() -> None:
    pairs, hosts = ((0, 1), (2, 3), (4, 5)), ((0, 1, 2, 3), (4, 5))
    assert near_islands([pairs, hosts], hosts) == hosts
    assert near_islands([pairs], hosts) == pairs
    with pytest.raises(UsageError, match="the 3 devices are all near each other"):
        near_islands([((0, 1, 2),)], ((0, 1), (2,)))


def test_hosts_with_one_device_each_are_islands() -> None:
    assert near_islands([((0, 1),)], ((0,), (1,))) == ((0,), (1,))
    with pytest.raises(UsageError, match="all near each other"):
        near_islands([((0, 1),)], ((0, 1),))


def test_islands_are_alike_by_their_kinds_of_devices_on_whatever_host() -> None:
    card = {"name": "a card", "threads": 1, "memory_bytes": 1 << 30}
    devices = [
        *(DeviceInfo(number=number, host=f"lab{number % 2}", device="cuda:0", **card) for number in range(4)),
        DeviceInfo(number=4, host="lab3", device="cpu", **card),
    ]
    assert are_alike(((0, 1), (3, 2)), devices)
    assert not are_alike(((0, 1), (2,)), devices)
    assert not are_alike(((0,), (4,)), devices)


@given(size=st.integers(1, 40), weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=5))
def test_a_batch_is_divided_without_loss(size: int, weights: list[float]) -> None:
    batch = as_batch(torch.arange(size * 2).view(size, 2), torch.arange(size), torch.arange(size))
    parts = divided(batch, weights)
    assert [part.size if part else 0 for part in parts] == list(island_sizes(size, weights))
    found = [part for part in parts if part is not None]
    for leaf, whole in enumerate(batch.leaves):
        assert torch.equal(torch.cat([part.leaves[leaf] for part in found]), whole)
    assert torch.equal(torch.cat([part.samples for part in found if part.samples is not None]), torch.arange(size))


@given(seed=st.integers(-(1 << 63), (1 << 63) - 1), island=st.integers(0, 1000))
def test_seeds_of_islands_differ_and_have_64_bits(seed: int, island: int) -> None:
    found = island_seed(seed, island)
    assert -(1 << 63) <= found < 1 << 63
    assert (found == seed) == (island == 0)
