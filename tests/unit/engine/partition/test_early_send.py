"""Where programs are cut for what is sent early."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from onebox.engine.partition import early_send
from onebox.engine.partition.early_send import WIRE_BPS, early_ends, expected_s, operator_times, pays, sent_by
from onebox.graph import NamedProgram, Port
from onebox.plan import Links, Plan, Prediction, Stage
from onebox.wire import TensorSpec
from onebox.wire.program import Many, Operator, Program, SlotArgument, with_deaths
from tests.unit.programs import Sample, samples


def row(count: int, *, wide: int = 1 << 20) -> Program:
    """Return a program of so many operators, each on what the one before has made; all is given out."""
    spec = TensorSpec("float32", (wide,))
    operators = tuple(
        Operator("aten.relu.default", (SlotArgument(number),), {}, (number + 1,), (spec,)) for number in range(count)
    )
    return with_deaths(Program((spec,), operators, tuple(range(1, count + 1)), count + 1))


def test_it_is_cut_behind_what_is_there_early() -> None:
    assert early_ends(row(10), {3: 0.01, 10: 0.01}, 0.1) == (2,)


def test_what_is_made_last_or_given_cuts_nothing() -> None:
    assert early_ends(row(10), {10: 0.01}, 0.1) == ()
    assert early_ends(row(10), {0: 0.01}, 0.1) == ()


@pytest.mark.parametrize(
    ("left_s", "transfer_s", "worth"), [(0.01, 4e-3, True), (1e-4, 4e-3, False), (0.01, 1e-6, False)]
)
def test_it_pays_if_what_is_sent_takes_long_and_much_is_left(left_s: float, transfer_s: float, worth: bool) -> None:
    assert pays(left_s, transfer_s) == worth


def test_what_a_program_takes_is_shared_out_by_what_operators_do() -> None:
    spec, view = TensorSpec("float32", (1 << 20,)), TensorSpec("float32", (1 << 10, 1 << 10))
    operators = (
        Operator("aten.relu.default", (SlotArgument(0),), {}, (1,), (spec,)),
        Operator("aten.view.default", (SlotArgument(1), Many((1 << 10, 1 << 10))), {}, (2,), (view,)),
        Operator("aten.mm.default", (SlotArgument(2), SlotArgument(2)), {}, (3,), (view,)),
    )
    times = operator_times(with_deaths(Program((spec,), operators, (3,), 4)), 2.0)
    assert sum(times) == pytest.approx(2.0)
    assert times[1] == 0
    assert times[2] > 10 * times[0]


def test_the_slowest_link_that_is_known_counts() -> None:
    phases = [(0, named(outputs=[5])), (1, named(inputs=[5])), (2, named(inputs=[5, 6]))]
    stages = tuple(
        Stage(segments=(str(n),), replicas=tuple((d,) for d in own), shares=(1.0,) * len(own))
        for n, own in enumerate([(0,), (1,), (0, 2)])
    )
    plan = Plan(stages=stages, micro_batch=1)
    links = Links(latency_s={}, bandwidth_bps={0: {1: 5e6, 2: 3e6}})
    five, six = Port("value", 5), Port("value", 6)
    assert sent_by(phases, plan, 0, links) == {five: 3e6, six: 3e6}
    assert sent_by(phases[:2], plan, 0, links) == {five: 5e6}
    assert sent_by(phases, plan, 0) == {five: WIRE_BPS, six: WIRE_BPS}


def named(inputs: Sequence[int] = (), outputs: Sequence[int] = ()) -> NamedProgram:
    """Return something of these values that is no real program."""
    ports = (tuple(Port("value", number) for number in numbers) for numbers in (inputs, outputs))
    taken, made = ports
    return NamedProgram(program=Program((), (), (), 0), inputs=taken, outputs=made)


@given(samples(), st.data())
def test_each_cut_is_behind_something_that_is_sent_and_ahead_of_the_end(sample: Sample, data: st.DataObject) -> None:
    program = sample.program
    sent = data.draw(st.dictionaries(st.sampled_from(program.outputs), st.floats(0, 1)))
    seconds = data.draw(st.floats(0, 10))
    made = {slot: number for number, one in enumerate(program.operators) for slot in one.outs}
    ends = early_ends(program, sent, seconds)
    assert list(ends) == sorted(set(ends))
    assert set(ends) <= {made[slot] for slot in sent if slot in made} - {len(program.operators) - 1}
    times = operator_times(program, seconds)
    for slot in set(sent) & set(made):
        left_s = math.fsum(times[made[slot] + 1 :])
        if pays(left_s, sent[slot]) and made[slot] < len(program.operators) - 1:
            assert made[slot] in ends


def test_without_a_prediction_nothing_is_cut() -> None:
    stages = tuple(Stage(segments=(name,), replicas=((n,),), shares=(1.0,)) for n, name in enumerate("ab"))
    plan = Plan(stages=stages, micro_batch=1)
    assert expected_s(plan, 0, "F") == 0.0
    times = ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    said = replace(plan, predicted=Prediction(batch=1, step_s=1.0, bubble=0.0, peak_bytes=(1, 1), stages_s=times))
    assert [expected_s(said, 1, kind) for kind in ("F", "I", "W", "B")] == [4.0, 5.0, 6.0, 11.0]
    away = replace(said, stages=(replace(stages[0], policy="recompute"), stages[1]))
    assert expected_s(away, 0, "F") == 0.0


def test_the_less_is_gained_the_more_calls_may_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_send, "CALL_S", math.inf)
    assert early_ends(row(10), {3: 1.0}, 10.0) == ()
