"""Measuring a pool whose workers are threads: what is made of traces, what is left behind, when it is done at all."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.cost import DeviceProfile, PoolProfile, Speeds, cache, near_groups, store
from onebox.errors import OneboxError, UsageError
from onebox.pool import DeviceInfo, Fault, Link, Pool
from onebox.pool import pool as pool_module
from onebox.pool.network import link_benchmark, profile
from onebox.pool.network.link_benchmark import one_way_s, representatives, rounds, settled, tables
from onebox.pool.network.profile import block_seconds, blocks, profile_key, renew_links
from onebox.wire.protocol.instructions import Ask
from onebox.wire.protocol.responses import WorkerMemory
from onebox.worker.comm import manager
from tests.unit.house import OpenPool, threads_for_processes

SMALL_BYTES = 2 << 20
"""Memory for small kernels, which take little time."""

SLOW = Link(latency_s=0.02, bandwidth_bps=5e6)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def open_pool() -> Iterator[OpenPool]:
    with threads_for_processes() as opening:
        yield opening


@given(st.floats(1e-9, 1e4))
def test_a_kernel_runs_for_a_while_and_never_too_often(call_s: float) -> None:
    count, calls = blocks(call_s)
    assert 5 <= count <= 60
    assert 1 <= calls <= 100
    assert calls * call_s >= min(0.001, 100 * call_s) * 0.999
    assert count * calls * call_s <= max(0.1, 5 * call_s) * 1.001


def test_a_block_lasts_from_its_first_call_to_its_answer() -> None:
    times = [10, 12, 13, 15, 15, 110, 200, 201, 202, 203, 203, 500]  # two blocks of two calls
    assert block_seconds(times, 2, 2) == [50e-9, 150e-9]
    assert block_seconds(times, 2, 1) == [100e-9, 300e-9], "one call of several instructions"


def test_the_way_there_by_one_clock_and_by_the_whole_trip() -> None:
    sent = [1000, 1010, 1010, 9000, 1020, 9100, 9100, 9200]
    answered = [500, 4000, 4500, 4600, 4600, 4700, 4700, 4800]
    assert one_way_s(sent, answered, clock=True, back_s=None) == pytest.approx([3.5e-6])
    assert one_way_s(sent, answered, clock=False, back_s=None) == pytest.approx([4.05e-6])
    assert one_way_s(sent, answered, clock=False, back_s=1e-6) == pytest.approx([7.1e-6])
    held_up = one_way_s(sent, answered, clock=False, back_s=1.0)
    assert held_up == pytest.approx([4.05e-6]), "half of the round trip at least"
    later = [time + 10_000 for time in sent]
    both = one_way_s([*sent, *later], [*answered, *(time + 10_100 for time in answered)], clock=True, back_s=None)
    assert both == pytest.approx([3.5e-6, 3.6e-6])
    backwards = one_way_s(sent, [0] * 8, clock=True, back_s=None)
    assert backwards == [1e-9], "clocks that disagree make no time negative"


NEAR, FAR = (60e-6, 4e9), (1e-3, 20e6)
Pair = tuple[int, int]


class Measurer:
    """Measures the links of two hosts of two devices, some disturbed at first, and counts how often."""

    def __init__(self, disturbed: dict[Pair, list[tuple[float, float]]], count: int = 4) -> None:
        self._disturbed = disturbed
        self.asked = dict.fromkeys(permutations(range(count), 2), 0)

    def __call__(self, pairs: Collection[Pair]) -> dict[Pair, tuple[float, float]]:
        return {pair: self._one(pair) for pair in pairs}

    def _one(self, pair: Pair) -> tuple[float, float]:
        times, self.asked[pair] = self.asked[pair], self.asked[pair] + 1
        late = self._disturbed.get(pair, [])
        return late[times] if times < len(late) else NEAR if pair[0] // 2 == pair[1] // 2 else FAR

    def settled(self) -> Any:
        return settled({pair: pair for pair in self.asked}, self)


def groups_of(links: Any, count: int = 4) -> Any:
    return near_groups(*tables(links, range(count)))


def test_what_groups_rest_on_is_measured_again() -> None:
    """One link that was disturbed both ways looks like two hosts more; measured again, it is gone."""
    late = {pair: [(300e-6, 800e6)] for pair in ((0, 1), (1, 0))}
    once = Measurer(late)
    assert groups_of(once(once.asked))[0] == ((0,), (1,), (2, 3))
    measurer = Measurer(late)
    assert groups_of(measurer.settled()) == (((0, 1), (2, 3)),)
    assert measurer.asked[0, 1] == measurer.asked[1, 0] == 3, "after the groups had changed once more"
    assert sum(measurer.asked.values()) == 12 + 2 * 6, "each link once, and the tree twice more, both ways"


def test_groups_that_a_disturbed_link_hides_are_found() -> None:
    late = {pair: [(1.5e-3, 40e6)] for pair in ((0, 1), (1, 0))}
    once = Measurer(late, count=3)
    assert groups_of(once(once.asked), count=3) == (((0, 1, 2),),)
    measurer = Measurer(late, count=3)
    assert groups_of(measurer.settled(), count=3) == (((0, 1), (2,)),)
    assert measurer.asked[0, 1] == measurer.asked[1, 0] == 3, "likewise"


def test_groups_that_stay_are_measured_again_once_and_others_a_few_times() -> None:
    measurer = Measurer({})
    measurer.settled()
    assert sorted(measurer.asked.values()) == [1] * 6 + [2] * 6
    measurer = Measurer({pair: [(300e-6, 800e6)] * 100 for pair in ((0, 1), (1, 0))})
    assert groups_of(measurer.settled())[0] == ((0,), (1,), (2, 3)), "so it is"
    assert max(measurer.asked.values()) == 2


def test_a_way_that_is_slower_than_the_way_back_is_measured_again() -> None:
    measurer = Measurer({(0, 1): [FAR] * 2})
    assert measurer.settled()[0, 1] == NEAR
    assert (measurer.asked[0, 1], measurer.asked[1, 0]) == (4, 2)


def test_links_that_are_alike_are_measured_once() -> None:
    alike = representatives(some_devices("a:cpu", "a:cpu", "b:cpu", "b:cpu"), {}, [1] * 4)
    measurer = Measurer({})
    assert groups_of(settled(alike, measurer)) == (((0, 1), (2, 3)),)
    once = {(0, 1), (2, 3), (0, 2)}
    assert measurer.asked == {pair: 2 * bool({pair, pair[::-1]} & once) for pair in alike}, "and once more: the tree"


def some_devices(*names: str) -> list[DeviceInfo]:
    """Return devices by names such as ``a:cpu``."""
    return [
        DeviceInfo(number=number, host=host, address=f"{host}.lab", device=device, name="", threads=1, memory_bytes=1)
        for number, (host, _, device) in enumerate(name.partition(":") for name in names)
    ]


def test_links_of_cards_are_measured_one_by_one_also_if_an_agent_of_this_machine_has_some() -> None:
    cards = some_devices("localhost:cuda:0", "localhost:cuda:1", "agent:cuda:2", "agent:cuda:3")
    cards = [replace(card, address="127.0.0.1") for card in cards]
    assert len({tuple(sorted(pair)) for pair in representatives(cards, {}, [1] * 4).values()}) == 6


def test_the_links_to_measure() -> None:
    devices = some_devices("a:cpu", "a:cpu", "a:cpu", "b:cuda:0", "b:cuda:1", "b:cuda:2", "b:cpu")
    alike = representatives(devices, {(0, 2): SLOW, (2, 0): SLOW}, [2, 2, 2, 1, 1, 3, 3])
    assert set(alike) == set(permutations(range(7), 2))
    assert all(alike[b, a] == chosen[::-1] for (a, b), chosen in alike.items())
    assert {tuple(sorted(chosen)) for chosen in alike.values()} == {
        (0, 1),
        (0, 2),
        (0, 5),
        (0, 6),
        *((3, 4), (3, 5), (4, 5)),
        *((3, 6), (4, 6), (5, 6)),
    }
    assert alike[1, 2] == (0, 1)
    assert alike[4, 1] == (5, 0), "where most memory is free"


@given(st.lists(st.integers(0, 5), min_size=2, max_size=20))
def test_a_round_has_each_host_once(homes: list[int]) -> None:
    hosts = {device: str(home) for device, home in enumerate(homes)}
    pairs = list(combinations(hosts, 2))
    found = rounds(pairs, hosts)
    assert sorted(pair for one in found for pair in one) == pairs, "each pair once"
    for one in found:
        ends = [host for pair in one for host in {hosts[end] for end in pair}]
        assert len(set(ends)) == len(ends)


def test_there_are_as_many_rounds_as_hosts() -> None:
    for count in range(1, 12):
        hosts = {device: str(device // 2) for device in range(2 * count)}
        heads = range(0, 2 * count, 2)
        pairs = [*combinations(heads, 2), *((head, head + 1) for head in heads)]
        assert len(rounds(pairs, hosts)) == count | 1, "links within a host where it meets no other"


def used_bytes(pool: Pool) -> list[int]:
    found = []
    for worker in range(len(pool)):
        (memory,) = pool.post(worker, [Ask("memory")], answer=True).result(30).results
        assert isinstance(memory, WorkerMemory)
        found.append(memory.used_bytes)
    return found


def test_a_profile_of_threads(open_pool: OpenPool) -> None:
    pool = open_pool(3, memory=SMALL_BYTES)
    found = pool.profile()
    assert isinstance(found, PoolProfile)
    assert [device.memory_bytes for device in found.devices] == [SMALL_BYTES] * 3
    for device, info in zip(found.devices, pool.devices, strict=True):
        missing = {name for name in Speeds.__struct_fields__ if getattr(device.speeds, name) is None}
        assert missing == (set() if info.has_bf16 else {"bf16_flops"})
    assert {(s, t) for s, row in found.latency_s.items() for t in row} == {
        (s, t) for s in range(3) for t in range(3)
    } - {(n, n) for n in range(3)}
    assert found.emulated_links == ()
    assert used_bytes(pool) == [0, 0, 0]


def test_emulated_links_are_measured_as_what_they_are(open_pool: OpenPool) -> None:
    pool = open_pool(3, kind="sim", links={(0, 1): SLOW, (2, 1): SLOW}, memory=SMALL_BYTES)
    found = pool.profile()
    assert found.emulated_links == ((0, 1), (1, 0), (1, 2), (2, 1))
    for source, target in found.emulated_links:
        assert found.latency_s[source][target] == pytest.approx(SLOW.latency_s, rel=0.01)
        assert found.bandwidth_bps[source][target] == pytest.approx(SLOW.bandwidth_bps, rel=0.01)
    assert [sorted(level) for level in found.groups] == [[(0, 2), (1,)]]
    assert used_bytes(pool) == [0, 0, 0]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    """Return a list that grows with each measurement; what is measured is the same each time."""
    pools: list[Pool] = []
    original = profile.measure_pool

    def count(pool: Pool) -> PoolProfile:
        pools.append(pool)
        return original(pool)

    monkeypatch.setattr(pool_module, "measure_pool", count)
    return pools


def test_it_is_measured_once_or_when_asked_to(open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = counted(monkeypatch)
    pool = open_pool(1, memory=SMALL_BYTES)
    first = pool.profile()
    assert pool.profile() == first
    assert open_pool(1, memory=SMALL_BYTES).profile() == first
    assert len(measured) == 1
    assert pool.profile(cache=False) != first
    assert pool.profile() == first
    newer = pool.profile(fresh=True)
    assert pool.profile() == newer
    assert len(measured) == 3
    (path,) = cache.cache_folder().iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    assert pool.profile() != newer
    assert len(measured) == 4


def test_a_pool_that_is_another_has_another_profile(open_pool: OpenPool) -> None:
    keys = [
        profile_key(pool.devices, pool.links)
        for pool in (
            open_pool(1),
            open_pool(2),
            open_pool(1, memory=5 << 20),
            open_pool(2, kind="sim"),
            open_pool(2, kind="sim", links={(0, 1): SLOW}),
            open_pool(2, kind="sim", links={(0, 1): Link(latency_s=0.02)}),
        )
    ]
    assert len(set(keys)) == 6
    same = open_pool(2)
    assert profile_key(same.devices, same.links) == keys[1]


def test_a_device_without_memory_is_named(open_pool: OpenPool) -> None:
    with pytest.raises(UsageError, match=r"device 0 \(cpu on localhost\) has 1000 bytes .* needs 1 MiB"):
        open_pool(1, memory=1000).profile()


@pytest.mark.parametrize(
    ("worker", "fault"),
    [
        (0, Fault("error", "call", 9)),
        (1, Fault("memory", "call", 1)),
        (1, Fault("error", "formgroup", 1)),
        (0, Fault("error", "send", 3)),
        (1, Fault("error", "send", 3)),
    ],
    ids=str,
)
def test_a_failure_is_told_and_leaves_nothing_behind(open_pool: OpenPool, worker: int, fault: Fault) -> None:
    pool = open_pool(2, faults={worker: [fault]}, memory=SMALL_BYTES)
    with pytest.raises(OneboxError, match=f"worker {worker} .*injected fault"):
        pool.profile()
    assert not cache.cache_folder().exists()
    assert used_bytes(pool) == [0, 0]
    assert len(pool.profile().devices) == 2, "the fault comes once"


def test_links_over_tcp(open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As among hosts; here they share a clock all the same."""
    monkeypatch.setattr(manager, "supported", lambda: False)
    found = open_pool(2, memory=SMALL_BYTES).profile(cache=False)
    for source, target in ((0, 1), (1, 0)):
        assert 0 < found.latency_s[source][target] < 1
        assert found.bandwidth_bps[source][target] > 0


def test_links_without_a_common_clock(open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a round trip is the latency of both ways; each way has its bandwidth."""
    monkeypatch.setattr(link_benchmark, "have_one_clock", lambda one, other: False)
    links = {(0, 1): Link(latency_s=0.03, bandwidth_bps=5e6), (1, 0): Link(latency_s=0.01, bandwidth_bps=2e6)}
    found = open_pool(2, kind="sim", memory=SMALL_BYTES, links=links).profile(cache=False)
    for (source, target), link in links.items():
        assert 0.01 < found.latency_s[source][target] < 0.1
        assert link.bandwidth_bps / 2 < found.bandwidth_bps[source][target] < 1.3 * link.bandwidth_bps


@pytest.mark.parametrize(
    ("names", "one"),
    [(("a:cpu", "a:sim"), True), (("a:cpu", "b:cpu"), False), (("a:cpu", "a:cuda:0"), False)],
)
def test_whose_traces_go_together(names: tuple[str, str], one: bool) -> None:
    assert link_benchmark.have_one_clock(*some_devices(*names)) is one


def far(host: str, number: int) -> DeviceProfile:
    return DeviceProfile(
        number=number,
        device="cpu",
        name="a processor",
        host=host,
        threads=1,
        memory_bytes=1 << 30,
        speed=1.0,
        emulated=False,
        speeds=Speeds(call_s=1e-5),
    )


def between(bandwidth_bps: float, hosts: str = "aab") -> PoolProfile:
    """Return a profile of devices of some hosts, measured at 1000 s."""
    pairs = list(permutations(range(len(hosts)), 2))
    known = {(a, b): (1e-4, 4e9 if hosts[a] == hosts[b] else bandwidth_bps) for a, b in pairs}
    latency_s, bandwidths = tables(known, range(len(hosts)))
    return PoolProfile(
        devices=tuple(map(far, hosts, range(len(hosts)))),
        latency_s=latency_s,
        bandwidth_bps=bandwidths,
        emulated_links=(),
        groups=near_groups(latency_s, bandwidths),
        torch="2.13.0",
        measured_at="2026-11-21T04:00:00+00:00",
        links_at_s={source: dict.fromkeys(row, 1000.0) for source, row in latency_s.items()},
    )


@pytest.mark.parametrize("now_bps", [1.2e6, 1.1e8])
def test_links_between_hosts_are_probed_anew(
    now_bps: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[list[tuple[int, int]]] = []

    def probed(pool: Any, pairs: Any, known: Any, rooms: Any) -> dict[tuple[int, int], tuple[float, float]]:
        asked.append(list(pairs))
        return {way: (1e-4, now_bps) for a, b in asked[-1] for way in ((a, b), (b, a))}

    monkeypatch.setattr(profile, "probe_links", probed)
    monkeypatch.setattr(profile, "_rooms", lambda pool, numbers: [1 << 30] * len(numbers))
    monkeypatch.setattr(profile.time, "time", lambda: 1200.0)
    known = between(1.0e8)
    found = renew_links(cast(Pool, None), known, range(3), 1100.0)
    assert asked == [[(0, 2)]], "one pair for two hosts"
    assert found.links_at_s == {0: {1: 1000.0, 2: 1200.0}, 1: {0: 1000.0, 2: 1200.0}, 2: {0: 1200.0, 1: 1200.0}}
    if now_bps > 1e8:
        assert found.bandwidth_bps == known.bandwidth_bps, "as before but for noise: plans stay the same"
        assert not caplog.records
    else:
        assert found.bandwidth_bps == between(now_bps).bandwidth_bps
        assert "the link between a and b has changed: 9.6 Mbit/s" in caplog.text
        assert "800 Mbit/s and 0.1 ms when it was measured 3 min ago" in caplog.text
    assert renew_links(cast(Pool, None), between(1.0, "aaa"), range(3), 1100.0) == between(1.0, "aaa"), "one host"
    assert renew_links(cast(Pool, None), found, range(3), 1100.0) is found, "recent ones"


def test_only_links_among_the_devices_that_are_planned_for_are_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[tuple[int, int]]] = []

    def probed(pool: Any, pairs: Any, known: Any, rooms: Any) -> dict[tuple[int, int], tuple[float, float]]:
        asked.append(list(pairs))
        return {way: (1e-4, 1e6) for a, b in asked[-1] for way in ((a, b), (b, a))}

    monkeypatch.setattr(profile, "probe_links", probed)
    monkeypatch.setattr(profile, "_rooms", lambda pool, numbers: [1 << 30] * len(numbers))
    known = between(1.0e8, "aabbc")
    found = renew_links(cast(Pool, None), known, (1, 3, 2), math.inf)
    assert asked == [[(1, 2)]]
    assert found.bandwidth_bps[0][3] == 1e6, "both hosts' other devices"
    assert found.bandwidth_bps[0][4] == known.bandwidth_bps[0][4]
    assert found.links_at_s[0][4] == 1000.0 < found.links_at_s[0][3]
    assert renew_links(cast(Pool, None), known, (0, 1), math.inf) is known


def test_without_memory_for_a_probe_the_earlier_measurement_counts(
    open_pool: OpenPool, caplog: pytest.LogCaptureFixture
) -> None:
    known = between(1.0e8, "ab")
    assert renew_links(open_pool(2, memory=512 << 10), known, (0, 1), math.inf) is known
    assert "as they were measured before: device 0 (cpu on localhost) has 524288 bytes of memory left" in caplog.text


def test_a_pool_probes_its_links_once_within_minutes(open_pool: OpenPool) -> None:
    """As of two hosts, by what is stored about such a pool."""
    pool = open_pool(2)
    store(profile_key(pool.devices, pool.links), between(1.0e8, "ab"))
    assert pool.profile().links_at_s[0][1] == 1000.0
    assert pool.profile(probe=(0,)).links_at_s[0][1] == 1000.0
    first = pool.profile(probe=(0, 1)).links_at_s[0][1]
    assert first > 1000.0
    assert pool.profile(probe=(0, 1)).links_at_s[0][1] == first
    assert used_bytes(pool) == [0, 0]


def test_a_message_within_a_host_has_no_meter(open_pool: OpenPool) -> None:
    pool = open_pool(2)
    assert link_benchmark.send_metered(pool, 0, 1, 1e6, 1 << 20).size_bytes == 0
    assert used_bytes(pool) == [0, 0]


def test_a_probe_times_a_link(open_pool: OpenPool) -> None:
    pool = open_pool(2, kind="sim", links={(0, 1): SLOW})
    known = dict.fromkeys(((0, 1), (1, 0)), (SLOW.latency_s, SLOW.bandwidth_bps))
    found = link_benchmark.probe_links(pool, [(0, 1)], known, dict.fromkeys((0, 1), 1 << 30))
    assert 0.8 * SLOW.latency_s < found[0, 1][0] < 5 * SLOW.latency_s
    assert SLOW.bandwidth_bps / 5 < found[0, 1][1] < 1.5 * SLOW.bandwidth_bps
    assert used_bytes(pool) == [0, 0]
