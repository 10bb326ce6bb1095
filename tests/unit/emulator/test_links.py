"""When things arrive over emulated links: one behind the other on a link, in steps on a ring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.emulator.links import EmulatedLinks, EmulatedRing, LinkSpeed
from onebox.errors import WireError
from onebox.wire.protocol.groups import EmulatedLink

SLOW = LinkSpeed(latency_ns=1000.0, ns_per_byte=2.0)
PEER = 7
"""The rank at the other end, which does not matter."""


def link(number: int, latency_s: float = 1e-6, bandwidth_bps: float = 0.5e9) -> EmulatedLink:
    """Return a link; one of :data:`SLOW` if nothing else is said."""
    return EmulatedLink(PEER, number, latency_s, bandwidth_bps)


def laid(*links: EmulatedLink) -> EmulatedLinks:
    """Return emulated links."""
    emulated = EmulatedLinks()
    emulated.lay(links)
    return emulated


def test_what_is_sent_queues_behind_what_was_sent_before() -> None:
    emulated = laid(link(1), link(2))
    assert emulated.send(1, 50, 10_000) == 10_000 + 100 + 1000
    assert emulated.send(1, 50, 10_020) == 10_000 + 200 + 1000, "the link was taken until 10,100"
    assert emulated.send(2, 50, 10_020) == 10_020 + 100 + 1000, "another link"
    assert emulated.send(1, 50, 20_000) == 20_000 + 100 + 1000, "it was free again"


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=30))
def test_a_link_carries_no_more_than_its_bandwidth(sendings: list[tuple[int, int]]) -> None:
    emulated, now_ns, last_ns = laid(link(0)), 0, 0
    for pause_ns, size in sendings:
        now_ns += pause_ns
        came_ns = emulated.send(0, size, now_ns)
        assert came_ns >= now_ns + 1000 + 2 * size
        assert came_ns >= last_ns + 2 * size
        last_ns = came_ns
    assert last_ns <= now_ns + 1000 + 2 * sum(size for _, size in sendings)


def test_a_link_without_latency_and_cap_is_as_fast_as_it_can_be() -> None:
    assert laid(link(0, 0.0, float("inf"))).send(0, 1 << 40, 5) == 5


def test_what_is_under_way_arrives_when_it_would_have_and_what_comes_next_goes_by_the_new_speed() -> None:
    emulated = laid(link(1), link(2))
    assert emulated.slowest([1, 2]) == SLOW
    emulated.send(1, 50, 10_000)
    emulated.retime([link(1, 3e-6, 0.25e9), link(9)])
    assert emulated.slowest([1, 2]) == LinkSpeed(3000.0, 4.0)
    assert emulated.send(1, 50, 10_020) == 10_100 + 200 + 3000, "behind what left before"
    assert emulated.send(2, 50, 10_020) == 10_020 + 100 + 1000, "another link"
    with pytest.raises(KeyError):
        emulated.send(9, 1, 0)


@pytest.mark.parametrize("values", [(-1.0, 1.0), (float("inf"), 1.0), (0.0, 0.0), (float("nan"), 1.0), (0.0, -1.0)])
def test_a_link_that_cannot_be_changes_nothing(values: tuple[float, float]) -> None:
    emulated = laid(link(1), link(2))
    for change in (emulated.lay, emulated.retime):
        with pytest.raises(WireError, match="a latency is 0 s or more"):
            change([link(1, 1.0), link(2, *values)])
    assert emulated.slowest([1, 2]) == SLOW


@pytest.mark.parametrize(("passes", "steps"), [(2, 6), (1, 3)])
def test_a_ring_goes_at_the_pace_of_its_slowest_link(passes: int, steps: int) -> None:
    ring, speeds = EmulatedRing(), [LinkSpeed(), SLOW, LinkSpeed(latency_ns=1.0), LinkSpeed()]
    cost = steps * (400 / 4 * 2.0 + 1000)
    assert ring.run([5, 70, 6, 8], speeds, passes, 400) == 70 + cost
    assert ring.run([80, 80, 80, 80], speeds, passes, 400) == 70 + 2 * cost, "one collective behind the other"
    assert ring.run([10**6] * 4, speeds, passes, 0) == 10**6 + steps * 1000


def test_a_ring_of_one_has_nothing_to_send() -> None:
    assert EmulatedRing().run([7], [SLOW], 2, 100) == 7
