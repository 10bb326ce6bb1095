"""A link from the times of its messages, and which messages are sent to learn of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.cost import CEILING_BPS, fit_link
from onebox.cost.links import (
    LARGEST_BYTES,
    SMALLEST_BYTES,
    has_changed,
    is_doubtful,
    long_enough_s,
    next_probe_size,
    next_size,
    repeats,
)

LATENCIES = st.floats(1e-6, 1.0)
BANDWIDTHS = st.floats(1e3, 1e12)
SIZES = st.lists(st.integers(1, 1 << 24), min_size=2, max_size=5, unique=True)


@given(LATENCIES, BANDWIDTHS, SIZES)
def test_times_on_a_line_give_the_line_back(latency: float, bandwidth: float, sizes: list[int]) -> None:
    found = fit_link({size: latency + size / bandwidth for size in sizes})
    for size in sizes:
        assert found[0] + size / found[1] == pytest.approx(latency + size / bandwidth, rel=1e-5)


def test_latency_and_bandwidth_come_out() -> None:
    seconds = {size: 1e-3 + size / 125e6 for size in (4, 16384, 750_000)}
    assert fit_link(seconds) == pytest.approx((1e-3, 125e6))


@given(st.dictionaries(st.integers(0, 1 << 24), st.floats(1e-6, 10.0), min_size=1, max_size=6))
def test_any_times_give_a_link(seconds: dict[int, float]) -> None:
    latency, bandwidth = fit_link(seconds)
    assert 0 <= latency < math.inf
    assert 0 < bandwidth <= CEILING_BPS


def test_what_does_not_grow_has_no_limit() -> None:
    assert fit_link({4: 2e-4, 8 << 20: 1e-4})[1] == CEILING_BPS
    assert fit_link({4: 1e-4}) == (pytest.approx(1e-4), CEILING_BPS)


def test_a_line_through_less_than_nothing_is_one_without_latency() -> None:
    assert fit_link({1000: 1e-6, 1_000_000: 1.0}) == (0, pytest.approx(1e6))


@given(LATENCIES, BANDWIDTHS, st.integers(1 << 10, 1 << 22))
def test_a_burst_that_passes_at_once_does_not_hide_the_rate(latency: float, bandwidth: float, burst: int) -> None:
    def took_s(size: int) -> float:
        return latency + max(0, size - burst) / bandwidth

    seconds = sizes_sent(took_s)
    found = fit_link(seconds)
    assert found[1] == CEILING_BPS or found[1] <= 2.1 * max(bandwidth, burst / 0.003)
    assert found[0] + max(seconds) / found[1] == pytest.approx(took_s(max(seconds)))
    enough_s = long_enough_s(latency, 0.003)
    assert max(seconds) < 32 * max(burst, 16 << 10, 2 * enough_s * bandwidth), "no slow link is filled for long"


@pytest.mark.parametrize("seconds", [{}, {4: 0.0}, {4: -1.0}, {4: math.inf}, {-1: 1.0}])
def test_what_is_no_measurement_is_refused(seconds: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="times of messages"):
        fit_link(seconds)


def sizes_sent(took_s: Callable[[int], float], most: int = LARGEST_BYTES) -> dict[int, float]:
    """Return what is measured of a link on which messages take so long, by their bytes."""
    seconds = {SMALLEST_BYTES: took_s(SMALLEST_BYTES)}
    while (size := next_size(seconds, most)) is not None:
        assert size not in seconds
        seconds[size] = took_s(size)
    return seconds


@given(LATENCIES, BANDWIDTHS)
def test_few_messages_and_none_that_takes_long(latency: float, bandwidth: float) -> None:
    seconds = sizes_sent(lambda size: latency + size / bandwidth)
    assert min(seconds) == SMALLEST_BYTES
    assert 2 <= len(seconds) <= 6
    assert all(size % SMALLEST_BYTES == 0 and size <= LARGEST_BYTES for size in seconds)
    wire_s = max(seconds) / bandwidth
    enough_s = long_enough_s(latency, 0.003)
    assert enough_s == max(0.003, min(6 * latency, 0.5))
    assert max(seconds) == LARGEST_BYTES or wire_s >= enough_s * (1 - 1e-3)
    assert wire_s <= max(4.04 * enough_s, (16 << 10) / bandwidth)


@given(LATENCIES, BANDWIDTHS, st.integers(SMALLEST_BYTES, 1 << 20))
def test_no_message_for_which_there_is_no_room(latency: float, bandwidth: float, most: int) -> None:
    assert max(sizes_sent(lambda size: latency + size / bandwidth, most)) <= most


def test_a_size_that_took_less_time_than_a_smaller_one_is_no_end() -> None:
    seconds = {4: 1e-3, 16384: 1e-4}
    while (size := next_size(seconds)) is not None:
        seconds[size] = 1e-3
    assert max(seconds) == LARGEST_BYTES


def test_repeats_are_bounded() -> None:
    assert [repeats(seconds) for seconds in (0.0, 1e-6, 1e-3, 1e-2, 10.0)] == [16, 16, 5, 2, 2]


def test_a_link_is_doubtful_when_the_way_back_is_much_faster() -> None:
    link = (1e-3, 1e9)
    assert not is_doubtful(link, link)
    assert not is_doubtful(link, (2e-3, 5e8))
    assert is_doubtful((2e-3, 1e9), link)
    assert is_doubtful((1e-3, 5e8), link)


@given(LATENCIES.filter(lambda latency: latency < 0.05), st.floats(125e3, 1e12), st.integers(0, 64 << 10))
def test_a_probe_is_short_and_sees_the_rate_behind_a_burst(latency: float, bandwidth: float, burst: int) -> None:
    left, seconds = float(burst), {SMALLEST_BYTES: latency}
    while (size := next_probe_size(seconds)) is not None:
        assert size not in seconds
        seconds[size] = latency + max(0.0, size - left) / bandwidth
        left = max(0.0, left - size)  # the bucket does not fill again between two messages
    assert sum(taken - latency for taken in seconds.values()) < 10 * long_enough_s(latency, 0.04)
    found = fit_link(seconds)
    assert found[0] + max(seconds) / found[1] == pytest.approx(seconds[max(seconds)])
    if max(seconds) < LARGEST_BYTES:
        assert found[1] < 1.01 * bandwidth


class Window:
    """A link on which a connection's window opens as TCP's does, from 10 packets: it doubles with each round trip."""

    def __init__(self, latency_s: float, bandwidth_bps: float) -> None:
        self.latency_s, self.bandwidth_bps, self.window_bytes = latency_s, bandwidth_bps, 14_600

    def took_s(self, size: int) -> float:
        waiting_s, left = 0.0, size
        while left > self.window_bytes:
            left -= self.window_bytes
            waiting_s += max(2 * self.latency_s, self.window_bytes / self.bandwidth_bps)
            self.window_bytes *= 2
        return self.latency_s + waiting_s + left / self.bandwidth_bps


@pytest.mark.parametrize("mbit_per_s", [10, 100, 300])
@pytest.mark.parametrize("latency", [0.005, 0.02, 0.05])
def test_the_rate_of_a_long_way_is_seen_though_windows_open_slowly(latency: float, mbit_per_s: int) -> None:
    bandwidth = 125e3 * mbit_per_s
    link = Window(latency, bandwidth)
    found = fit_link(sizes_sent(lambda size: min(link.took_s(size) for _ in range(2))))
    assert 0.5 * bandwidth < found[1] < 1.01 * bandwidth
    link, seconds = Window(latency, bandwidth), {SMALLEST_BYTES: latency}
    while (size := next_probe_size(seconds)) is not None:
        seconds[size] = link.took_s(size)
    assert 0.5 * bandwidth < fit_link(seconds)[1] < 1.01 * bandwidth


def test_a_probe_has_room() -> None:
    assert next_probe_size({SMALLEST_BYTES: 1e-4}, 1000) == 1000
    assert next_probe_size({SMALLEST_BYTES: 1e-4, 1000: 1e-4}, 1000) is None


def test_a_link_has_changed_when_messages_take_clearly_longer_or_shorter() -> None:
    fast, slow = (1e-4, 1e8), (1e-4, 1.25e6)
    assert has_changed(fast, slow) and has_changed(slow, fast)
    assert not has_changed(fast, (1.3e-4, 0.8e8)), "noise"
    assert has_changed(fast, (5e-3, 1e8)), "latency alone, as through a relay far away"
