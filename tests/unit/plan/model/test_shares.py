"""Sharing out: whole units, in proportion, always the same way."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.plan import apportion, shares_from_speeds

weights = st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(lambda found: sum(found) > 1e-6)


@given(st.integers(0, 10_000), weights)
def test_shares_add_up_and_are_in_proportion(total: int, found: list[float]) -> None:
    units = apportion(total, found)
    assert sum(units) == total
    for unit, weight in zip(units, found, strict=True):
        assert abs(unit - total * weight / sum(found)) < 1 + 1e-6
        assert unit >= 0
        assert weight > 0 or unit == 0


@given(st.integers(0, 1000), weights, st.sampled_from([0.5, 3.0, 1e9, 1e300, 1e-300]))
def test_only_proportions_count(total: int, found: list[float], scale: float) -> None:
    scaled = [weight * scale for weight in found]
    if all(math.isfinite(weight) for weight in scaled) and [w > 0 for w in scaled] == [w > 0 for w in found]:
        assert sum(apportion(total, scaled)) == total


@given(st.integers(0, 1000), weights)
def test_equal_inputs_give_equal_results(total: int, found: list[float]) -> None:
    assert apportion(total, found) == apportion(total, list(found))


@given(st.integers(0, 1000), st.integers(1, 9), st.floats(1e-3, 1e3))
def test_equal_weights_differ_by_one_and_the_first_get_more(total: int, count: int, weight: float) -> None:
    units = apportion(total, [weight] * count)
    assert units == sorted(units, reverse=True)
    assert units[0] - units[-1] <= 1


@given(st.integers(0, 500), weights)
def test_one_unit_more_goes_to_somebody(total: int, found: list[float]) -> None:
    """By largest remainders somebody may even lose one; but the sum is kept, and nobody jumps by more than one."""
    before, after = apportion(total, found), apportion(total + 1, found)
    assert all(abs(a - b) <= 1 for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "wrong", [[], [0.0], [0, 0], [-1.0], [1.0, -0.1], [float("nan")], [float("inf")], [1.0, float("nan")]]
)
def test_weights_that_are_none(wrong: list[float]) -> None:
    with pytest.raises(UsageError, match="allowed are finite numbers"):
        apportion(3, wrong)


@pytest.mark.parametrize("large", [[1e308, 1e308], [1.7e308] * 4, [5e-324, 5e-324], [1e308, 5e-324]])
def test_weights_at_the_ends_of_floating_point(large: list[float]) -> None:
    assert sum(apportion(10, large)) == 10


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=8))
def test_shares_from_speeds_add_up_to_one(speeds: list[float]) -> None:
    shares = shares_from_speeds(speeds)
    assert sum(shares) == pytest.approx(1)
    assert all(share > 0 for share in shares)


def test_speeds_that_are_alike_are_equal_and_others_are_kept() -> None:
    assert shares_from_speeds([100.0, 110.0, 114.0]) == [1 / 3] * 3
    assert shares_from_speeds([100.0, 200.0]) == [1 / 3, 2 / 3]
    assert shares_from_speeds([7.0]) == [1.0]
