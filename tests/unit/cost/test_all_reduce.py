"""Sums in one ring, and in each host first."""

from __future__ import annotations

import math
import random
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.cost import all_reduce_algorithms, choose_all_reduce
from onebox.cost.all_reduce import LinkMatrix

NEAR = (20e-6, 8e9)
FAR = (1e-3, 125e6)


def cluster(
    hosts: list[int], *, noise: float = 0.0, seed: int = 0, far: tuple[float, float] = FAR
) -> tuple[LinkMatrix, LinkMatrix]:
    """Return latencies and bandwidths between devices in hosts, each link up to so much worse than it should be."""
    draw = random.Random(seed)
    latency: dict[int, dict[int, float]] = {a: {} for a in range(len(hosts))}
    bandwidth: dict[int, dict[int, float]] = {a: {} for a in range(len(hosts))}
    for a, b in permutations(range(len(hosts)), 2):
        link = NEAR if hosts[a] == hosts[b] else far
        latency[a][b] = link[0] * (1 + noise * draw.random())
        bandwidth[a][b] = link[1] / (1 + noise * draw.random())
    return latency, bandwidth


def chain_s(links: tuple[LinkMatrix, LinkMatrix], devices: list[int], size: int, pieces: int) -> float:
    """Return when the last device of a chain has everything that the first sends in pieces, played link by link."""
    came = [0.0] * pieces
    for a, b in pairwise(devices):
        free = 0.0
        for piece, when in enumerate(came):
            free = max(free, when) + size / pieces / links[1][a][b]
            came[piece] = free + links[0][a][b]
    return came[-1]


def ring_s(links: tuple[LinkMatrix, LinkMatrix], devices: list[int], size: int) -> float:
    """Return when all devices of a ring are through with a sum, played step by step."""
    count = len(devices)
    own = [0.0] * count
    for _ in range(2 * (count - 1)):
        sent = [
            own[place]
            + size / count / links[1][device][devices[(place + 1) % count]]
            + links[0][device][devices[(place + 1) % count]]
            for place, device in enumerate(devices)
        ]
        own = [max(own[place], sent[place - 1]) for place in range(count)]
    return max(own)


@pytest.mark.parametrize(
    ("hosts", "parts"),
    [
        ([0] * 4 + [1] * 4, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ([0, 1, 0, 1], ((0, 2), (1, 3))),
        ([0, 1, 1, 2, 2, 2], ((0,), (1, 2), (3, 4, 5))),
    ],
)
@given(seed=st.integers(0, 1000))
def test_what_each_host_has_is_summed_first_where_the_way_between_them_is_slow(
    hosts: list[int], parts: tuple[tuple[int, ...], ...], seed: int
) -> None:
    ways = all_reduce_algorithms(*cluster(hosts, noise=0.2, seed=seed), range(len(hosts)))
    assert choose_all_reduce(ways, 10 << 20).parts == parts


@given(st.integers(1, 16), st.integers(0, 1000), st.integers(0, 1 << 30))
def test_equal_devices_sum_in_one_ring(count: int, seed: int, size: int) -> None:
    ways = all_reduce_algorithms(*cluster([0] * count, noise=0.5, seed=seed), range(count))
    assert choose_all_reduce(ways, size).parts == (tuple(range(count)),)


def test_one_device_in_each_host_is_one_ring() -> None:
    assert len(all_reduce_algorithms(*cluster([0, 1, 2, 3]), range(4))) == 1


def test_a_little_slower_between_hosts_is_no_reason() -> None:
    """There and back inside would cost more than the slower way saves."""
    near = (NEAR[0], NEAR[1] / 3)
    ways = all_reduce_algorithms(*cluster([0, 0, 0, 0, 1, 1, 1, 1], far=near), range(8))
    assert [way.parts for way in ways][1:] in ([], [((0, 1, 2, 3), (4, 5, 6, 7))])
    big = choose_all_reduce(ways, 100 << 20)
    flat, parted = 1.75 / near[1], 1.0 / near[1] + 2 / NEAR[1]
    assert (len(big.parts) > 1) == (parted < 0.95 * flat and len(ways) > 1)


@pytest.mark.parametrize(("count", "size"), [(2, 1 << 20), (4, 8 << 20), (8, 1000)])
def test_times_are_those_of_a_ring_played_step_by_step(count: int, size: int) -> None:
    links = cluster([0] * count)
    (ring,) = all_reduce_algorithms(*links, range(count))
    assert math.isclose(ring.time.at(size), ring_s(links, list(range(count)), size), rel_tol=1e-9)


def test_times_of_parts_are_those_of_chains_and_a_ring_played_piece_by_piece() -> None:
    links, size = cluster([0] * 4 + [1] * 4), 8 << 20
    parted = all_reduce_algorithms(*links, range(8))[1]
    played = 2 * chain_s(links, [3, 2, 1, 0], size, 1000) + ring_s(links, [0, 4], size)
    assert math.isclose(parted.time.at(size), played, rel_tol=0.01)


@given(st.integers(2, 8), st.randoms(use_true_random=False), st.integers(0, 1 << 28))
def test_the_way_is_never_slower_than_one_ring(count: int, draw: random.Random, size: int) -> None:
    latency: dict[int, dict[int, float]] = {a: {} for a in range(count)}
    bandwidth: dict[int, dict[int, float]] = {a: {} for a in range(count)}
    for a, b in permutations(range(count), 2):
        latency[a][b], bandwidth[a][b] = 10 ** draw.uniform(-6, -1), 10 ** draw.uniform(6, 11)
    ways = all_reduce_algorithms(latency, bandwidth, range(count))
    best = choose_all_reduce(ways, size)
    assert best.time.at(size) <= ways[0].time.at(size)
    assert sorted(device for part in best.parts for device in part) == list(range(count))
