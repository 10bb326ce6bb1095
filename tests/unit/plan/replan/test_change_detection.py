"""Changes are told from noise: how soon, how exactly, how seldom without reason."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.plan.replan.change_detection import YOUNG, DriftDetector


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_noise_of_20_percent_is_no_change(seed: int) -> None:
    random, drift = Random(seed), DriftDetector()
    assert not any(drift.see(random.uniform(0.8, 1.2), step) for step in range(1000))
    assert drift.factor == 1.0
    assert drift.since is None


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), factor=st.sampled_from([1 / 3, 0.4, 2.5, 3.0, 10.0]))
def test_a_large_change_is_told_in_three_to_five_samples(seed: int, factor: float) -> None:
    random, drift = Random(seed), DriftDetector()
    for step in range(40):
        drift.see(random.uniform(0.8, 1.2), step)
    told = next(step for step in range(40, 60) if drift.see(factor * random.uniform(0.8, 1.2), step))
    assert 42 <= told <= 44
    assert 39 <= (drift.since or 0) <= 41
    assert drift.factor == pytest.approx(factor, rel=0.35)
    for step in range(told + 1, told + YOUNG):
        drift.see(factor * random.uniform(0.8, 1.2), step)
    assert drift.factor == pytest.approx(factor, rel=0.2)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), factor=st.sampled_from([1 / 4, 1 / 3, 3.0, 10.0]))
def test_a_large_change_of_all_actions_is_told_by_two_samples(seed: int, factor: float) -> None:
    random, drift = Random(seed), DriftDetector()
    for step in range(40):
        value = random.uniform(0.8, 1.2)
        assert not drift.see(value, step, (0.8 * value, 1.2 * value))
    later = [factor * random.uniform(0.8, 1.2) for _ in range(4)]
    told = [drift.see(value, 40 + n, (0.8 * value, 1.2 * value)) for n, value in enumerate(later)]
    assert told.index(True) == 1
    assert drift.since == 40
    assert drift.factor == pytest.approx(factor, rel=0.35)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_what_lasts_no_longer_than_a_step_is_no_change(data: st.DataObject) -> None:
    """It covers one step, or the end of one and the begin of the next; three steps as usual lie between two of them."""
    drift, step = DriftDetector(), 0

    def usual(steps: int) -> None:
        nonlocal step
        for _ in range(steps):
            value = data.draw(st.floats(0.8, 1.2))
            assert not drift.see(value, step, (0.8 * value, 1.2 * value))
            step += 1

    usual(10)
    for _ in range(data.draw(st.integers(1, 6))):
        slow, part = data.draw(st.floats(1.0, 1000.0)), data.draw(st.floats(0.0, 1.0))
        for share in (1.0,) if data.draw(st.booleans()) else (part, 1 - part):
            value = 1 + share * (slow - 1)
            assert not drift.see(value, step, (slow if share == 1 else 1.0, slow))
            step += 1
        usual(3)
    assert drift.factor == 1.0


def test_a_change_in_the_midst_of_a_step_is_told_by_the_next_whole_one_and_exactly() -> None:
    drift = DriftDetector()
    for step in range(20):
        drift.see(1.0, step, (0.95, 1.05))
    assert not drift.see(2.0, 20, (1.0, 3.0))
    assert drift.see(3.0, 21, (2.9, 3.1))
    assert drift.factor == pytest.approx(3.0)


@pytest.mark.parametrize("factor", [0.85, 1.15, 1.3])
def test_a_small_change_is_told_where_there_is_little_noise(factor: float) -> None:
    random, drift = Random(1), DriftDetector()
    for step in range(100):
        drift.see(random.uniform(0.98, 1.02), step)
    told = next(step for step in range(100, 200) if drift.see(factor * random.uniform(0.98, 1.02), step))
    assert told < 120
    assert drift.factor == pytest.approx(factor, rel=0.05)


def test_outliers_are_no_change_even_two_in_a_row() -> None:
    drift = DriftDetector()
    values = [1.0] * 20 + [50.0] + [1.0] * 20 + [50.0, 50.0] + [1.0] * 20
    assert not any(drift.see(value, step) for step, value in enumerate(values))
    assert [drift.see(50.0, step) for step in (70, 71, 72)] == [False, False, True]


def test_what_is_believed_may_be_told_from_outside() -> None:
    drift = DriftDetector()
    drift.believe(3.0, since=7)
    assert drift.since == 7
    assert not any(drift.see(3.0, step) for step in range(8, 30))
    assert any(drift.see(1.0, step) for step in range(30, 34))
    assert drift.factor == pytest.approx(1.0)


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_a_sample_that_is_far_away_is_in_doubt_until_the_next_one(factor: float) -> None:
    drift, whole = DriftDetector(), (0.99 * factor, 1.01 * factor)
    for step in range(20):
        drift.see(1.0, step, (0.95, 1.05))
        assert not drift.doubted
    assert not drift.see(factor, 20, whole)
    assert drift.doubted
    assert not drift.see(1.0, 21, (0.95, 1.05))
    assert not drift.doubted, "it was one slow step"
    assert not drift.see(factor, 22, whole)
    assert drift.see(factor, 23, whole)
    assert not drift.doubted, "it is believed"
    drift.see(1.0, 24, (0.95, 1.05))
    assert drift.doubted
    drift.believe(1.0)
    assert not drift.doubted


def test_what_noise_makes_is_not_in_doubt() -> None:
    random, drift = Random(7), DriftDetector()
    for step in range(500):
        drift.see(random.uniform(0.8, 1.2), step)
        assert not drift.doubted
