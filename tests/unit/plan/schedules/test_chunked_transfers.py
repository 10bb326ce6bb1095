"""In how many parts a value leaves: compared with all numbers of them, each followed event by event."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.plan.schedules.chunked_transfers import MOST, WORTH, best_parts, hidden_s

SECONDS = st.floats(1e-6, 10.0)


def arrival_s(tail_s: float, transfer_s: float, parts: int) -> float:
    """Follow parts that are computed one after the other, and travel one after the other."""
    now = link_free = 0.0
    for _ in range(parts):
        now += tail_s / parts
        link_free = max(link_free, now) + transfer_s / parts
    return link_free


@given(SECONDS, SECONDS, st.integers(1, 20))
def test_what_is_hidden_is_what_a_simulation_says(tail_s: float, transfer_s: float, parts: int) -> None:
    gained = arrival_s(tail_s, transfer_s, 1) - arrival_s(tail_s, transfer_s, parts)
    assert hidden_s(tail_s, transfer_s, parts) == pytest.approx(gained, abs=1e-9)


@given(SECONDS, SECONDS, st.floats(0, 1.0), st.floats(0, 1.0), st.integers(1, 12))
def test_no_other_number_of_parts_is_better(
    tail_s: float, transfer_s: float, each_s: float, once_s: float, most: int
) -> None:
    def gain(parts: int) -> float:
        saved_s = arrival_s(tail_s, transfer_s, 1) - arrival_s(tail_s, transfer_s, parts)
        return saved_s - (parts - 1) * each_s - once_s

    every = range(2, min(most, MOST) + 1)
    parts, gained_s = best_parts(tail_s, transfer_s, each_s=each_s, once_s=once_s, most=most)
    if parts > 1:
        assert gained_s == pytest.approx(gain(parts), abs=1e-9)
        assert all(gain(other) <= gained_s + 1e-9 for other in every)
        assert gained_s + (parts - 1) * each_s + once_s >= WORTH * ((parts - 1) * each_s + once_s)
    elif every:
        best = max(every, key=gain)
        cost_s = (best - 1) * each_s + once_s
        assert gain(best) + cost_s <= WORTH * cost_s + 1e-9 or gain(best) <= 1e-9


def test_a_value_that_takes_long_and_travels_long_leaves_in_parts() -> None:
    assert best_parts(0.01, 0.01, each_s=1e-4, once_s=0.0)[0] == MOST
    assert best_parts(0.01, 1e-4, each_s=1e-4, once_s=0.0) == (1, 0.0)
    assert best_parts(1e-4, 0.01, each_s=1e-4, once_s=0.0) == (1, 0.0)
    assert best_parts(0.01, 0.01, each_s=1e-4, once_s=0.01) == (1, 0.0)
