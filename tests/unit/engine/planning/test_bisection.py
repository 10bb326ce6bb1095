"""The largest size that fits is found with few questions, and nothing is said that was not asked."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.planning.bisection import LargestFit, find_largest


@given(st.integers(1, 1000), st.integers(1, 5000), st.integers(-500, 100_000), st.integers(1, 300))
def test_a_straight_line_needs_few_questions(slope: int, fixed: int, budget: int, start: int) -> None:
    found = find_largest(lambda size: fixed + slope * size - budget, start, 1 << 20)
    truth = max(0, (budget - fixed) // slope)
    assert found.exact
    assert found.fits == truth
    assert found.tried <= 8


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 5000)), min_size=1, max_size=4),
    st.integers(0, 50_000),
    st.integers(1, 300),
)
def test_what_is_said_was_asked(lines: list[tuple[int, int]], budget: int, start: int) -> None:
    asked: dict[int, float] = {}

    def excess(size: int) -> float:
        assert size not in asked, "no size is asked for twice"
        asked[size] = max(fixed + slope * size for slope, fixed in lines) - budget
        return asked[size]

    found = find_largest(excess, start, 1000)
    assert found.tried == len(asked) <= 14
    assert all(1 <= size <= 1000 for size in asked)
    assert found.fits == max((size for size, over in asked.items() if over <= 0), default=0)
    if found.fails is None:
        assert found.fits == 1000
    else:
        assert asked[found.fails] > 0
        truth = max((size for size in range(1, 1001) if max(f + s * size for s, f in lines) <= budget), default=0)
        assert found.fits <= truth < found.fails


@pytest.mark.parametrize(("slope", "expected"), [(0, 64), (-1, 64)])
def test_what_never_grows_fits_up_to_the_most(slope: int, expected: int) -> None:
    assert find_largest(lambda size: slope * size, 4, 64) == LargestFit(fits=expected, fails=None, tried=3)


def test_nothing_fits_and_small_sizes_cannot_be_tried() -> None:
    assert find_largest(lambda size: 1.0, 100, 1000).fits == 0
    found = find_largest(lambda size: math.inf if size < 8 else size - 20.0, 64, 1000)
    assert (found.fits, found.fails) == (20, 21)
