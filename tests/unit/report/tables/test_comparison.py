"""Predictions beside measurements."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine import TraceEvent
from onebox.plan import Action, Plan, Stage
from onebox.plan.evaluate.islands import IslandsPrediction
from onebox.report import PredictedMeasured, compare, compare_islands, typical_step
from onebox.report.run.json_files import to_json
from onebox.report.tables.comparison import step_interval_s
from tests.unit.report.steps import as_measured, foreseen, plan


def test_an_error_is_a_part_of_what_was_measured() -> None:
    assert PredictedMeasured(predicted=3.0, measured=2.0).error == 0.5
    assert PredictedMeasured(predicted=1.0, measured=2.0).error == -0.5
    for lacking in (
        PredictedMeasured(predicted=1.0),
        PredictedMeasured(measured=1.0),
        PredictedMeasured(),
        PredictedMeasured(predicted=1.0, measured=0.0),
    ):
        assert lacking.error is None


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@given(factor=st.floats(0.5, 3.0))
def test_a_run_that_does_what_was_simulated_shows_how_much_slower_it_was(schedule: str, factor: float) -> None:
    expected, simulation = foreseen(plan(schedule))
    peaks = [(1000, 1500, 4000), (900, 2000, 4000), (900, 2000, 4000)]
    events = [
        event for step in range(3) for event in as_measured(simulation, step, factor=factor, peak_bytes=peaks[step])
    ]
    events += as_measured(simulation, 3, peak_bytes=(5000, 5000, 5000))  # of another batch
    found = compare(expected, events, batch=8, steps=range(3))
    assert found.steps == 3
    assert found.step_s.measured == pytest.approx(simulation.step_s * factor, rel=1e-5)
    assert found.step_s.error == pytest.approx(1 / factor - 1, abs=1e-5)
    assert found.bubble.measured == pytest.approx(found.bubble.predicted, abs=1e-4)
    assert [(row.stage, row.devices, row.samples) for row in found.stages] == [(0, (0,), 2), (1, (1,), 2), (2, (2,), 2)]
    for row in found.stages:
        assert set(row.seconds) == ({"F", "I", "W"} if schedule == "zb-h1" else {"F", "B"})
        for kind, pair in row.seconds.items():
            assert pair.predicted == pytest.approx(8e-3 if kind == "B" else 4e-3)  # two segments, two samples
            assert pair.error == pytest.approx(1 / factor - 1, abs=1e-4)
    assert [(row.device, row.peak_bytes.measured) for row in found.devices] == [(0, 1000), (1, 2000), (2, 4000)]
    assert expected.predicted is not None
    assert [row.peak_bytes.predicted for row in found.devices] == list(expected.predicted.peak_bytes)


def test_a_stage_that_no_gradient_leaves_has_a_backward_even_where_it_is_split() -> None:
    expected, simulation = foreseen(plan("zb-h1"))
    events = [e for e in as_measured(simulation, 0) if e.action is None or (e.action.stage, e.action.kind) != (0, "I")]
    first, second, _ = compare(expected, events, batch=8).stages
    assert set(first.seconds) == {"F", "B"} and set(second.seconds) == {"F", "I", "W"}
    assert first.seconds["B"].predicted == pytest.approx(8e-3)
    assert first.seconds["B"].measured == pytest.approx(4e-3)


def test_only_steps_of_the_whole_batch_count() -> None:
    expected, simulation = foreseen(plan())
    events = as_measured(simulation, 0) + as_measured(simulation, 1, factor=9.0)
    found = compare(expected, events, batch=8, steps={0})
    assert found.steps == 1
    assert found.step_s.error == pytest.approx(0, abs=1e-5)


def test_one_slow_step_does_not_matter() -> None:
    expected, simulation = foreseen(plan())
    events = [event for step in range(5) for event in as_measured(simulation, step, factor=50.0 if step == 2 else 1.0)]
    found = compare(expected, events, batch=8)
    assert found.step_s.error == pytest.approx(0, abs=1e-5)
    assert found.stages[0].seconds["F"].error == pytest.approx(0, abs=1e-4)


def test_replicas_have_rows_of_their_own() -> None:
    expected, simulation = foreseen(plan("1f1b", replicas=2))
    events = [
        msgspec.convert({**_data(e), "end_ns": e.end_ns + (e.end_ns - e.start_ns) * (e.worker == 3)}, TraceEvent)
        for e in as_measured(simulation, 0)
    ]
    found = compare(expected, events, batch=8)
    assert [row.devices for row in found.stages] == [(0,), (3,), (1,), (2,)]
    assert found.stages[0].seconds["F"].error == pytest.approx(0, abs=1e-5)
    assert found.stages[1].seconds["F"].error == pytest.approx(-0.5, abs=1e-5)


def _data(event: TraceEvent) -> dict[str, object]:
    data: dict[str, object] = {name: getattr(event, name) for name in TraceEvent.__dataclass_fields__}
    return data


def test_an_action_in_several_parts_takes_as_long_as_all_of_them() -> None:
    one = Plan(stages=(Stage(replicas=((0,),), shares=(1.0,)),), micro_batch=8)

    def event(start_ns: int, end_ns: int) -> TraceEvent:
        action = Action("B", 0, 0)
        return TraceEvent(
            worker=0, track="compute", name="backward", step=0, start_ns=start_ns, end_ns=end_ns, action=action
        )

    found = compare(one, [event(0, 10), event(30, 50)], batch=8)
    assert found.stages[0].seconds["B"].measured == pytest.approx(30e-9)
    assert found.step_s.measured == pytest.approx(50e-9)
    assert found.bubble.measured == pytest.approx(0.4)


def test_the_slowest_of_the_devices_that_split_a_layer_counts() -> None:
    split = Plan(stages=(Stage(replicas=((0, 1),), shares=(1.0,)),), micro_batch=8)
    events = [
        TraceEvent(worker=w, track="compute", name="f", step=0, start_ns=0, end_ns=10 + 5 * w, action=Action("F", 0, 0))
        for w in (0, 1)
    ]
    found = compare(split, events, batch=8)
    assert found.stages[0].seconds["F"] == PredictedMeasured(measured=pytest.approx(15e-9))


def test_shares_of_different_sizes_are_each_compared_with_their_own() -> None:
    shares = Plan.data_parallel([0, 1], [3.0, 1.0])
    expected, simulation = foreseen(shares)
    found = compare(expected, as_measured(simulation, 0), batch=8)
    assert [row.samples for row in found.stages] == [6, 2]
    for row in found.stages:
        assert row.seconds["F"].error == pytest.approx(0, abs=1e-5)
    first, second = (row.seconds["F"].predicted for row in found.stages)
    assert first == pytest.approx(3 * second)


@pytest.mark.parametrize("batch", [4, 8])
def test_what_was_not_predicted_is_not_made_up(batch: int) -> None:
    expected, simulation = foreseen(plan())
    other = msgspec.structs.replace(expected, predicted=None) if batch == 8 else expected
    found = compare(other, as_measured(simulation, 0), batch=batch)
    assert found.step_s.predicted is None and found.step_s.measured is not None
    assert all(pair.predicted is None for row in found.stages for pair in row.seconds.values())
    assert [row.peak_bytes.predicted for row in found.devices] == [None] * 3


def test_nothing_measured() -> None:
    expected, _ = foreseen(plan())
    found = compare(expected, [], batch=8)
    assert (found.steps, found.step_s.measured, found.bubble.measured) == (0, None, None)
    assert typical_step([]) is None


def test_it_becomes_json() -> None:
    expected, simulation = foreseen(plan())
    found = compare(expected, as_measured(simulation, 0, peak_bytes=(2000, 0, 0)), batch=8, exact={0: 1990})
    data = json.loads(to_json(found.to_data()))
    assert data["step_s"]["error"] == pytest.approx(0, abs=1e-5)
    assert data["stages"][1]["seconds"]["W"]["predicted"] == pytest.approx(4e-3)
    assert data["devices"][0]["exact_bytes"] == 1990
    assert [row["peak_bytes"]["measured"] for row in data["devices"]] == [2000, None, None]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9))
def test_the_typical_step_has_the_median_time(lengths: list[int]) -> None:
    events = [
        TraceEvent(worker=0, track="compute", name="x", step=step, start_ns=0, end_ns=end)
        for step, end in enumerate(lengths)
    ]
    step = typical_step(events)
    assert step is not None
    assert lengths[step] == sorted(lengths)[(len(lengths) - 1) // 2]
    assert typical_step(events, {0}) == 0


def steps_of(worker: int, ends_ms: list[int], *, first: int = 0) -> list[TraceEvent]:
    """Return a computation of a millisecond at the end of each step."""
    return [
        TraceEvent(
            worker=worker,
            track="compute",
            name="forward",
            step=step,
            start_ns=(end - 1) * 10**6,
            end_ns=end * 10**6,
        )
        for step, end in enumerate(ends_ms, start=first)
    ]


def test_steps_of_islands_are_those_of_a_period_without_what_comes_between_epochs() -> None:
    # 10 ms a step, 30 ms every third one, which is after an outer step; once half a second passes between two steps
    ends = [10, 20, 50, 60, 70, 100, 110, 620, 650, 660, 670, 700]
    assert step_interval_s(steps_of(0, ends), 3, range(12)) == pytest.approx(50e-3 / 3)
    slower = steps_of(1, [2 * end + 10**6 for end in ends])  # of a host with another clock
    assert step_interval_s([*steps_of(0, ends), *slower], 3, range(12)) == pytest.approx(100e-3 / 3)
    assert step_interval_s(steps_of(0, ends), 3, {0, 1, 4, 5}) is None, "of one place in a period there is no interval"
    assert step_interval_s([], 3, range(12)) is None


def test_islands_beside_their_prediction() -> None:
    traffic = {(0, 1): 1000.0, (1, 0): 500.0}
    prediction = IslandsPrediction(batch=8, step_s=0.02, islands_s=(0.01, 0.01), sums_s=0.01, traffic=traffic)
    expected, simulation = foreseen(plan("gpipe"))
    own = compare(expected, as_measured(simulation, 0), batch=8)
    events = steps_of(0, [10, 20, 50, 60, 70, 100])
    found = compare_islands(prediction, [own, own], events, 0.02, every=3, steps=range(6))
    assert (found.batch, found.steps) == (8, 1)
    assert found.step_s.measured == pytest.approx(50e-3 / 3)
    assert (found.link_bps.predicted, found.link_bps.measured) == (1000 / 0.01, 1000 / 0.02)
    data = json.loads(to_json(found.to_data()))
    assert data["sums_s"] == {"predicted": 0.01, "measured": 0.02, "error": -0.5}
    assert [each["batch"] for each in data["islands"]] == [8, 8]
    unknown = compare_islands(prediction, [own, own], events, None, every=3, steps=range(6))
    assert (unknown.sums_s.measured, unknown.link_bps.measured) == (None, None)
