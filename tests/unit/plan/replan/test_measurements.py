"""Steps that are looked at together, as if they were one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.plan.replan.measurements import CarriedBytes, LinkTime, StepMeasurement, TaskTime, TimedTask, together

FIRST, SECOND = TimedTask(0, 0, "F"), TimedTask(1, 1, "B")
SECONDS = st.floats(0.0, 10.0)


def test_one_step_is_itself() -> None:
    seen = StepMeasurement(step=7, step_s=0.5, actions={FIRST: TaskTime(0.1, 2)})
    assert together([seen]) is seen


def test_means_are_those_of_all_actions_and_messages_and_extremes_those_of_any() -> None:
    one = StepMeasurement(
        step=7,
        step_s=1.0,
        actions={FIRST: TaskTime(0.1, 3, 0.05, 0.2), SECOND: TaskTime(0.3, 1, 0.3, 0.3)},
        links={(0, 1): LinkTime(100, 0.2, 2, 0.05, 0.15)},
        update_s={0: 0.1},
        carried={(0, 1): CarriedBytes(100, 0.5)},
    )
    other = StepMeasurement(
        step=8,
        step_s=3.0,
        actions={FIRST: TaskTime(0.5, 1, 0.5, 0.5)},
        links={(0, 1): LinkTime(50, 0.4, 1, 0.4, 0.4), (1, 0): LinkTime(8, 0.1, 1)},
        update_s={0: 0.3, 1: 0.7},
        carried={(0, 1): CarriedBytes(50, 0.25), (1, 0): CarriedBytes(1, 0.0)},
    )
    found = together([one, other])
    assert (found.step, found.step_s) == (7, 2.0)
    assert found.actions == {FIRST: TaskTime(pytest.approx(0.2), 4, 0.05, 0.5), SECOND: TaskTime(0.3, 1, 0.3, 0.3)}
    assert found.links == {
        (0, 1): LinkTime(150, pytest.approx(0.6), 3, 0.05, 0.4),
        (1, 0): LinkTime(8, 0.1, 1, 0.0, math.inf),
    }
    assert found.update_s == {0: pytest.approx(0.2), 1: 0.7}
    assert found.steps == 2
    assert found.carried == {(0, 1): CarriedBytes(150, 0.75), (1, 0): CarriedBytes(1, 0.0)}


@given(st.lists(st.tuples(SECONDS, st.integers(1, 9)), min_size=2, max_size=9))
def test_in_whatever_portions_the_sums_stay(took: list[tuple[float, int]]) -> None:
    steps = [
        StepMeasurement(step=n, step_s=seconds, actions={FIRST: TaskTime(seconds, actions, seconds, seconds)})
        for n, (seconds, actions) in enumerate(took)
    ]
    half = len(steps) // 2
    whole, parts = together(steps), together([together(steps[:half]), together(steps[half:])])
    assert parts.actions[FIRST] == pytest.approx(whole.actions[FIRST])
    assert whole.actions[FIRST].actions == sum(actions for _, actions in took)
