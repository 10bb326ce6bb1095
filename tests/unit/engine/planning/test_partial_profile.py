"""Profiles that a time limit cuts short: what was measured stays as it is, and the rest follows from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.cost.model_profile import ModelBytes, ModelProfile, SegmentTimes
from onebox.engine.planning.partial_profile import (
    NOT_MEASURED,
    TimeLimit,
    all_actions,
    completed,
    is_whole,
    not_measured,
    profile_line,
)
from onebox.engine.planning.trace_times import LEAST_S
from onebox.engine.problem.estimate import EstimatedTimes

SIZES = (1, 16)
GUESSES = {
    1: ((1.0, 2.0, 3.0), (4.0, 0.0, 5.0), (2.0, 2.0, 2.0)),
    16: ((9.0, 7.0, 8.0), (30.0, 0.0, 50.0), (20.0, 20.0, 9.0)),
}
OPERATORS = (("mm", "mm", "mm"), ("conv", "", "conv_backward"), ("mm", "mm", "relu"))
FACTORS = {"mm": 3.0, "conv": 0.5, "conv_backward": 2.0, "relu": 7.0}
ACTIONS = [
    (size, segment, place) for size in SIZES for segment in range(3) for place in range(3) if OPERATORS[segment][place]
]
"""The actions in the order in which they are measured here."""


def guesses() -> dict[int, EstimatedTimes]:
    return {
        size: EstimatedTimes(
            times=SegmentTimes(size=size, seconds=GUESSES[size], update_s=1.0, call_s=0.5, measured=0.0),
            operators=OPERATORS,
        )
        for size in SIZES
    }


def truth(size: int, segment: int, place: int) -> float:
    operator = OPERATORS[segment][place]
    return GUESSES[size][segment][place] * FACTORS[operator] if operator else NOT_MEASURED


def cut(known: Sequence[tuple[int, int, int]]) -> list[SegmentTimes]:
    """Return the times of which only some actions were measured."""

    def of(size: int, segment: int) -> tuple[float, float, float]:
        first, second, third = (
            truth(size, segment, place) if (size, segment, place) in known else NOT_MEASURED for place in range(3)
        )
        return first, second, third

    return [
        SegmentTimes(size=size, seconds=(of(size, 0), of(size, 1), of(size, 2)), update_s=math.nan, call_s=math.nan)
        for size in SIZES
    ]


@pytest.mark.parametrize("measured", range(len(ACTIONS) + 1))
def test_a_profile_that_is_cut_short_anywhere_is_complete(measured: int) -> None:
    known = ACTIONS[:measured]
    found = {times.size: times for times in completed(cut(known), guesses())}
    assert all(map(is_whole, found.values()))
    operators = {OPERATORS[segment][place] for _, segment, place in known}
    ratios = [FACTORS[OPERATORS[segment][place]] for _, segment, place in known] or [1.0]
    for size in SIZES:
        for segment in range(3):
            for place in range(3):
                seconds, operator = found[size].seconds[segment][place], OPERATORS[segment][place]
                if not operator:
                    assert seconds == LEAST_S, "there is nothing to do"
                elif (size, segment, place) in known:
                    assert seconds == truth(size, segment, place), "exact"
                elif operator in operators:
                    assert seconds == pytest.approx(truth(size, segment, place)), "as others with its operator"
                else:
                    ratio = seconds / GUESSES[size][segment][place]
                    assert min(ratios) <= ratio <= max(ratios), "between those that are known"
        own_s = sum(truth(*action) for action in known if action[0] == size)
        assert found[size].measured == pytest.approx(own_s / sum(map(sum, found[size].seconds)))


def test_a_segment_is_most_like_itself_at_another_size() -> None:
    times = not_measured(16, 3)
    small = SegmentTimes(
        size=1, seconds=((2.0, 4.0, 6.0), (4.0, LEAST_S, 5.0), (80.0, 2.0, 2.0)), update_s=0.25, call_s=0.125
    )
    _, large = completed([small, times], guesses())
    assert large.seconds[0] == pytest.approx((18.0, 14.0, 16.0))
    assert large.seconds[2][0] == pytest.approx(800.0), "an odd layer, whose operator is that of others"
    assert (large.update_s, large.call_s, large.measured) == (0.25, 0.125, 0.0)


def test_an_update_that_was_not_measured_takes_the_ratio_of_all_actions() -> None:
    (found, _) = completed(cut([(1, 0, 0), (1, 1, 0), (1, 2, 0)]), guesses())
    assert (found.update_s, found.call_s) == (3.0, 0.5)


def test_times_without_gaps_are_left_alone() -> None:
    times = SegmentTimes(size=1, seconds=((1.0, 1.0, 1.0),) * 3, update_s=1.0, call_s=1.0)
    assert completed([times], guesses()) == (times,)
    assert all_actions(times) and not all_actions(not_measured(1, 3))


def test_a_profile_has_the_part_of_its_seconds_that_was_measured() -> None:
    def times(seconds: float, measured: float) -> SegmentTimes:
        return SegmentTimes(size=1, seconds=((seconds, 0.0, 0.0),), update_s=9.0, call_s=9.0, measured=measured)

    empty = ModelBytes(graph="", size=1, segments=(), values=(), ties=())
    found = ModelProfile(bytes=empty, times={"cpu": (times(1.0, 1.0), times(3.0, 0.5)), "gpu": (times(1.0, 0.0),)})
    assert found.measured == 0.5
    assert profile_line(found.measured, 5.6) == "profile: 50 % measured in 6 s; the rest is estimated"
    assert profile_line(0.999) == "profile: 99 % measured; the rest is estimated", "rounded down"
    assert ModelProfile(bytes=empty, times={}).measured == 1.0


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=8), st.floats(0.0, 20.0))
def test_equal_shares_of_a_limit_add_up_to_it(works: list[float], seconds: float) -> None:
    now_s = 100.0

    def clock() -> float:
        return now_s

    limit = TimeLimit(seconds, clock)
    for number, work_s in enumerate(works):
        share = limit.share(len(works) - number)
        assert share.left_s == pytest.approx(max(0.0, limit.left_s) / (len(works) - number))
        now_s += min(work_s, share.left_s)
        assert limit.left_s >= -1e-6
    assert limit.bounded and not TimeLimit().bounded
    assert not TimeLimit().share(3).bounded
