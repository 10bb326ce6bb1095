"""Hosts and switches, seen in the speeds of links."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.cost import CEILING_BPS, DeviceGroups, near_groups, shortest_tree
from tests.unit.clusters import CLUSTERS

INSIDE = (60e-6, 4e9)
ETHERNET = (300e-6, 1.1e9)
SLOW = (2e-3, 125e6)
Tables = tuple[dict[int, dict[int, float]], dict[int, dict[int, float]]]


def tables(links: dict[tuple[int, int], tuple[float, float]], count: int) -> Tables:
    latency: dict[int, dict[int, float]] = {number: {} for number in range(count)}
    bandwidth: dict[int, dict[int, float]] = {number: {} for number in range(count)}
    for (source, target), link in links.items():
        latency[source][target], bandwidth[source][target] = link
    return latency, bandwidth


def noisy(hosts: list[int], switches: list[int] | None = None, *, seed: int = 0, noise: float = 0.2) -> Tables:
    """Return the links between devices in hosts that hang on switches; each is up to so much slower than it should be.

    Args:
        hosts: The host of each device.
        switches: The switch of each device.
        seed: Of the noise.
        noise: The most that is added, as a share.
    """
    draw = random.Random(seed)
    links = {}
    for a, b in permutations(range(len(hosts)), 2):
        link = INSIDE if hosts[a] == hosts[b] else ETHERNET
        if switches is not None and switches[a] != switches[b]:
            link = SLOW
        links[a, b] = (link[0] * (1 + noise * draw.random()), link[1] / (1 + noise * draw.random()))
    return tables(links, len(hosts))


def partition(names: list[int]) -> DeviceGroups:
    return tuple(tuple(n for n, name in enumerate(names) if name == one) for one in dict.fromkeys(names))


def ordered(groups: DeviceGroups) -> list[tuple[int, ...]]:
    return sorted(groups)


@given(st.lists(st.integers(0, 3), min_size=3, max_size=12), st.integers(0, 1000))
def test_hosts_come_out(hosts: list[int], seed: int) -> None:
    levels = near_groups(*noisy(hosts, seed=seed))
    assert len(levels) == 1
    shared = 1 < len(set(hosts)) < len(hosts)  # else all are equally near
    assert ordered(levels[0]) == (ordered(partition(hosts)) if shared else [tuple(range(len(hosts)))])


@pytest.mark.parametrize("name", CLUSTERS)
@given(seed=st.integers(0, 1000))
def test_groups_of_emulated_clusters_are_their_hosts_also_under_noise(name: str, seed: int) -> None:
    """In the ring only one link is bad: each device is as near to one neighbour as to the other."""
    cluster = CLUSTERS[name]
    levels = near_groups(*cluster.matrix(noise=0.2, seed=seed))
    assert ordered(levels[0]) == cluster.groups


def test_what_hangs_on_a_slow_uplink_is_apart_from_the_other_hosts() -> None:
    hosts, switches = near_groups(*CLUSTERS["4 hosts x 4, one slow uplink"].matrix(noise=0.2, seed=1))
    assert len(hosts) == 4
    assert sorted(map(len, switches)) == [4, 12]


@pytest.mark.parametrize("seed", range(5))
def test_hosts_and_switches_come_out(seed: int) -> None:
    hosts = [number // 4 for number in range(16)]
    switches = [number // 8 for number in range(16)]
    mixed = list(range(16))
    random.Random(seed).shuffle(mixed)
    hosts, switches = [hosts[n] for n in mixed], [switches[n] for n in mixed]
    levels = near_groups(*noisy(hosts, switches, seed=seed))
    assert [ordered(level) for level in levels] == [ordered(partition(hosts)), ordered(partition(switches))]


@given(st.integers(2, 10), st.integers(0, 1000))
def test_equal_links_are_one_group(count: int, seed: int) -> None:
    assert near_groups(*noisy([0] * count, seed=seed, noise=0.5)) == ((tuple(range(count)),),)


def test_one_link_that_was_disturbed_changes_nothing() -> None:
    hosts = [0, 0, 0, 0, 1, 1, 1, 1]
    latency, bandwidth = noisy(hosts)
    latency[0][1], bandwidth[0][1] = 2e-3, 1e8
    levels = near_groups(latency, bandwidth)
    assert ordered(levels[-1]) == ordered(partition(hosts))


def test_groups_rest_on_the_shortest_links_that_join_all_devices() -> None:
    links = dict.fromkeys(permutations(range(6), 2), (2e-3, 125e6))
    links |= {pair: INSIDE for pair in links if pair[0] // 2 == pair[1] // 2}
    links |= dict.fromkeys([(1, 2), (2, 1), (3, 4), (4, 3)], (1.9e-3, 125e6))
    assert shortest_tree(*tables(links, 6)) == [(0, 1), (2, 3), (4, 5), (1, 2), (3, 4)]
    inside = {pair: link for pair, link in links.items() if link == INSIDE}
    assert shortest_tree(*tables(inside, 6)) == [(0, 1), (2, 3), (4, 5)], "nothing can be sent between these"
    assert shortest_tree(*tables({}, 1)) == []


@given(st.lists(st.integers(0, 3), min_size=3, max_size=12), st.integers(0, 1000))
def test_groups_of_these_links_alone_are_joined_by_the_fewest(hosts: list[int], seed: int) -> None:
    known = noisy(hosts, seed=seed)
    tree, groups = shortest_tree(*known), near_groups(*known)[0]
    home = {device: group for group in groups for device in group}
    assert len(tree) == len(hosts) - 1
    assert sum(home[a] != home[b] for a, b in tree) == len(groups) - 1
    reached = {0}
    for _ in hosts:
        reached |= {device for pair in tree if reached & set(pair) for device in pair}
    assert reached == set(range(len(hosts)))


def test_latency_alone_and_bandwidth_alone_tell() -> None:
    for near, far in (((60e-6, 1e9), (8e-3, 1e9)), ((60e-6, 4e9), (60e-6, 2e8)), ((60e-6, CEILING_BPS), (3e-3, 1e15))):
        links = {pair: near if pair[0] // 2 == pair[1] // 2 else far for pair in permutations(range(4), 2)}
        assert near_groups(*tables(links, 4)) == (((0, 1), (2, 3)),)


def test_a_group_that_is_not_well_apart_is_none() -> None:
    """One slow link among three devices: the third is as near to each of the two."""
    links = dict.fromkeys(permutations(range(3), 2), INSIDE) | {(0, 1): SLOW, (1, 0): SLOW}
    assert near_groups(*tables(links, 3)) == (((0, 1, 2),),)


def test_where_nothing_can_be_sent_is_far() -> None:
    inside = {pair: INSIDE for pair in permutations(range(5), 2) if (pair[0] < 3) == (pair[1] < 3)}
    assert near_groups(*tables(inside, 5)) == (((0, 1, 2), (3, 4)),)
    assert near_groups(*tables({}, 2)) == (((0,), (1,)),)
    assert near_groups(*tables({}, 1)) == (((0,),),)


@given(st.integers(2, 9), st.randoms(use_true_random=False))
def test_any_links_give_nested_partitions(count: int, draw: random.Random) -> None:
    links = {
        pair: (10 ** draw.uniform(-6, 0), 10 ** draw.uniform(3, 12))
        for pair in permutations(range(count), 2)
        if draw.random() < 0.9
    }
    levels = near_groups(*tables(links, count))
    assert 1 <= len(levels) <= 2
    for level in levels:
        assert sorted(number for group in level for number in group) == list(range(count))
    for group in levels[0]:
        assert any(set(group) <= set(larger) for larger in levels[-1])
