"""The offset of a clock, from answers over ways of any length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onebox.pool.client.clock_offset import ClockOffset

DAY_NS = 86400 * 10**9


@given(
    st.integers(-30 * DAY_NS, 30 * DAY_NS),
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=100),
)
def test_the_offset_is_within_half_of_the_shortest_round_trip(offset_ns: int, ways: list[tuple[int, int]]) -> None:
    clock, now_ns = ClockOffset(), 5
    for there_ns, back_ns in ways:
        read_ns = now_ns + there_ns + offset_ns
        clock.answer(asked_ns=now_ns, read_ns=read_ns, now_ns=now_ns + there_ns + back_ns)
        now_ns += 10**9
    assert abs(clock.offset_ns - offset_ns) <= min(there + back for there, back in ways) / 2 + 1


def test_a_clock_that_drifts_is_followed() -> None:
    clock = ClockOffset()
    for number in range(1000):
        clock.answer(asked_ns=1000 * number, read_ns=1000 * number + number, now_ns=1000 * number + number % 7)
    assert 960 <= clock.offset_ns < 1000


def test_a_clock_is_asked_at_each_of_the_first_heartbeats_and_then_at_every_eighth() -> None:
    clock = ClockOffset()
    assert [beat for beat in range(1, 25) if clock.beat()] == [*range(1, 9), 16, 24]


def test_nothing_is_known_before_an_answer_and_by_one_that_cannot_be() -> None:
    clock = ClockOffset()
    assert clock.offset_ns == 0
    clock.answer(asked_ns=50, read_ns=DAY_NS, now_ns=40)
    clock.answer(asked_ns=-1, read_ns=DAY_NS, now_ns=40)
    assert clock.offset_ns == 0
