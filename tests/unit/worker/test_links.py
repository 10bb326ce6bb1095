"""When things arrive over emulated links: one behind the other on a link, in steps on a ring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.wire.grouping import EmulatedLink
from onebox.worker.links import Ring, Speed, Wires

SLOW = Speed(latency_ns=1000.0, ns_per_byte=2.0)


def test_what_is_sent_queues_behind_what_was_sent_before() -> None:
    wires = Wires()
    assert wires.send(1, SLOW, 50, 10_000) == 10_000 + 100 + 1000
    assert wires.send(1, SLOW, 50, 10_020) == 10_000 + 200 + 1000, "the link was taken until 10,100"
    assert wires.send(2, SLOW, 50, 10_020) == 10_020 + 100 + 1000, "another link"
    assert wires.send(1, SLOW, 50, 20_000) == 20_000 + 100 + 1000, "it was free again"


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=30))
def test_a_link_carries_no_more_than_its_bandwidth(sendings: list[tuple[int, int]]) -> None:
    wires, now_ns, last_ns = Wires(), 0, 0
    for pause_ns, size in sendings:
        now_ns += pause_ns
        came_ns = wires.send(0, SLOW, size, now_ns)
        assert came_ns >= now_ns + 1000 + 2 * size
        assert came_ns >= last_ns + 2 * size
        last_ns = came_ns
    assert last_ns <= now_ns + 1000 + 2 * sum(size for _, size in sendings)


def test_a_link_that_is_not_given_is_as_fast_as_it_can_be() -> None:
    assert Wires().send(0, Speed.of(EmulatedLink(1, 0, 0.0, float("inf"))), 1 << 40, 5) == 5
    assert not Ring([Speed(), Speed()]).emulated
    assert Ring([Speed(), SLOW]).emulated


@pytest.mark.parametrize(("passes", "steps"), [(2, 6), (1, 3)])
def test_a_ring_goes_at_the_pace_of_its_slowest_link(passes: int, steps: int) -> None:
    ring = Ring([Speed(), SLOW, Speed(latency_ns=1.0), Speed()])
    cost = steps * (400 / 4 * 2.0 + 1000)
    assert ring.run([5, 70, 6, 8], passes, 400) == 70 + cost
    assert ring.run([80, 80, 80, 80], passes, 400) == 70 + 2 * cost, "one collective behind the other"
    assert ring.run([10**6] * 4, passes, 0) == 10**6 + steps * 1000


def test_a_ring_of_one_has_nothing_to_send() -> None:
    assert Ring([SLOW]).run([7], 2, 100) == 7
