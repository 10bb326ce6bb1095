"""The plan on the page."""

from __future__ import annotations

import pytest

from onebox.plan import Plan
from onebox.report import compare
from onebox.report.page.plan_view import plan_view
from tests.unit.report.steps import as_measured, foreseen, plan


def test_predicted_and_measured_times_of_each_stage() -> None:
    which, simulation = foreseen(plan())
    events = as_measured(simulation, 0, factor=2.0)
    view = plan_view(which, compare(which, events, batch=8).stages, emulated=[1])
    assert view.text == which.describe() and view.schedule == "zb-h1"
    assert [(stage.stage, stage.devices) for stage in view.stages] == [(0, "0"), (1, "1*"), (2, "2")]
    assert view.stages[0].segments == "model.0 … model.1 (2)"
    for stage in view.stages:
        assert stage.times and stage.times[0].kind == "forward"
        for time in stage.times:
            assert time.predicted_s is not None and time.measured_s == pytest.approx(2 * time.predicted_s, rel=1e-3)


def test_a_plan_without_measurements_shows_what_is_predicted() -> None:
    view = plan_view(foreseen(plan())[0])
    assert [time.kind for time in view.stages[0].times] == ["forward", "input gradient", "weight gradient"]
    assert all(time.measured_s is None and time.predicted_s for time in view.stages[0].times)


def test_data_parallel_training_has_shares() -> None:
    view = plan_view(Plan.data_parallel([0, 1], [3.0, 1.0]))
    assert [(stage.segments, stage.share) for stage in view.stages] == [
        ("the whole model", 0.75),
        ("the whole model", 0.25),
    ]
    assert view.schedule == "one stage" and view.stages[0].times == ()
