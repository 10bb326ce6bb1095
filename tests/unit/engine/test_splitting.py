"""Where programs are cut for what is sent early."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from onebox.engine import splitting
from onebox.engine.splitting import early_ends, expected_s, pays
from onebox.plan import Plan, Prediction, Stage
from onebox.wire import TensorSpec, specs_by_slot
from onebox.wire.program import Operator, Program, Slot, with_deaths
from tests.unit.programs import Sample, samples


def row(count: int, *, wide: int = 1 << 20) -> Program:
    """Return a program of so many operators, each on what the one before has made; all is given out."""
    spec = TensorSpec("float32", (wide,))
    operators = tuple(
        Operator("aten.relu.default", (Slot(number),), {}, (number + 1,), (spec,)) for number in range(count)
    )
    return with_deaths(Program((spec,), operators, tuple(range(1, count + 1)), count + 1))


def test_it_is_cut_behind_what_is_there_early() -> None:
    assert early_ends(row(10), [3, 10], 0.1) == (2,)


def test_what_is_made_last_or_given_cuts_nothing() -> None:
    assert early_ends(row(10), [10], 0.1) == ()
    assert early_ends(row(10), [0], 0.1) == ()


@pytest.mark.parametrize(
    ("left_s", "size_bytes", "worth"), [(0.01, 4 << 20, True), (1e-4, 4 << 20, False), (0.01, 1000, False)]
)
def test_it_pays_if_much_is_sent_and_much_is_left(left_s: float, size_bytes: int, worth: bool) -> None:
    assert pays(left_s, size_bytes) == worth


@given(samples(), st.data())
def test_each_cut_is_behind_something_that_is_sent_and_ahead_of_the_end(sample: Sample, data: st.DataObject) -> None:
    program = sample.program
    sent = data.draw(st.sets(st.sampled_from(program.outputs)))
    seconds = data.draw(st.floats(0, 10))
    made = {slot: number for number, one in enumerate(program.operators) for slot in one.outs}
    ends = early_ends(program, sent, seconds)
    assert list(ends) == sorted(set(ends))
    assert set(ends) <= {made[slot] for slot in sent if slot in made} - {len(program.operators) - 1}
    for slot in sent & set(made):
        left_s = seconds * (len(program.operators) - 1 - made[slot]) / len(program.operators)
        if pays(left_s, specs_by_slot(program)[slot].size_bytes) and made[slot] < len(program.operators) - 1:
            assert made[slot] in ends


def test_without_a_prediction_nothing_is_cut() -> None:
    stages = tuple(Stage(segments=(name,), replicas=((n,),), shares=(1.0,)) for n, name in enumerate("ab"))
    plan = Plan(stages=stages, micro_batch=1)
    assert expected_s(plan, 0, "F") == 0.0
    times = ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    said = replace(plan, predicted=Prediction(batch=1, step_s=1.0, bubble=0.0, peak_bytes=(1, 1), stages_s=times))
    assert [expected_s(said, 1, kind) for kind in ("F", "I", "W", "B")] == [4.0, 5.0, 6.0, 11.0]
    away = replace(said, stages=(replace(stages[0], fate="recompute"), stages[1]))
    assert expected_s(away, 0, "F") == 0.0


def test_the_less_is_gained_the_more_calls_may_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "CALL_S", math.inf)
    assert early_ends(row(10), [3], 10.0) == ()
