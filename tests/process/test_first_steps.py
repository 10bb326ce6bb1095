"""Emulated devices that are slower than planned: the first steps tell by how much, and a later plan uses it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import nn

import onebox
from onebox.engine.planning import resolve_plan
from onebox.engine.planning.make_plan import PlanningResult
from onebox.engine.problem.corrections import AppliedCorrection, keep_correction, kept_correction
from onebox.plan import ComputeTime, DeviceSpec, Links, Plan, Problem, Segment, SegmentValue, Stage, predict
from onebox.plan.replan.profile_correction import ProfileCorrection, TimeFactors
from onebox.pool import Pool, open_pool
from tests.kit.pools import Pools

SEGMENTS = tuple(f"model.{place}" for place in range(4))
BATCH, MICRO_BATCH = 32, 8
COST_S = 0.0004
"""Of a segment's forward, or each half of its backward, for a sample; 6 ms for two segments and a micro-batch."""

STEPS, MOST = 13, 45
"""Steps of a run that is not compared, and most steps until one is."""

SLOWER = 2.5


@pytest.fixture(scope="module")
def sims() -> Iterator[Pool]:
    """Two devices that sleep."""
    with open_pool("sim*2", threads=1) as opened:
        yield opened


def problem() -> Problem:
    """Return the four segments on two devices that are as fast as they say."""
    each, none = {"cpu": ComputeTime(sample_s=COST_S)}, {"cpu": ComputeTime()}
    row = {0: {1: 1e-5}, 1: {0: 1e-5}}
    return Problem(
        segments=tuple(
            Segment(name=name, forward_s=each, input_s=each if place else none, weight_s=each, update_s={"cpu": 0.0})
            for place, name in enumerate(SEGMENTS)
        ),
        devices=tuple(DeviceSpec(number=number, type="cpu") for number in range(2)),
        links=Links(latency_s=row, bandwidth_bps={0: {1: 1e9}, 1: {0: 1e9}}),
        batch=BATCH,
        micro_batches=(MICRO_BATCH,),
        values=tuple(SegmentValue(source=n, consumers=(n + 1,), forward_bytes=64, backward_bytes=64) for n in range(3)),
    )


def planned(given: Problem) -> PlanningResult:
    """Return what a planner would return for two stages of two segments each."""
    stages = tuple(Stage(segments=SEGMENTS[2 * d : 2 * d + 2], replicas=((d,),), shares=(1.0,)) for d in range(2))
    plan = Plan(stages=stages, micro_batch=MICRO_BATCH, schedule="1f1b")
    plan = msgspec.structs.replace(plan, predicted=predict(given, plan)[0])
    unknown = cast(Any, None)
    return PlanningResult(
        plan=plan,
        result=unknown,
        problem=given,
        profile=unknown,
        correction=AppliedCorrection(key="a profile", factors=TimeFactors()),
    )


def trainer(pool: Pool, plan: Any, **options: Any) -> onebox.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in SEGMENTS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    costs = {name: (COST_S, COST_S if place else 0.0, COST_S) for place, name in enumerate(SEGMENTS)}
    engine = onebox.Engine(costs=costs, check_every=0)
    return onebox.Trainer(model, nn.functional.mse_loss, optimizer, pool=pool, plan=plan, engine=engine, **options)


def run(opened: onebox.Trainer, steps: int = STEPS) -> None:
    for _ in range(steps):
        opened.step(torch.ones(BATCH, 8), torch.zeros(BATCH, 8))
    opened.wait()


def correction(opened: onebox.Trainer) -> ProfileCorrection:
    """Train until the first steps have been compared."""
    for _ in range(MOST):
        run(opened, 1)
        if opened.profile_correction is not None:
            return opened.profile_correction
    raise AssertionError("no steps were compared")


@pytest.mark.feature("Plans: Correct a profile by the first steps")
def test_a_device_that_is_slower_than_planned_is_found_in_the_first_steps(
    sims: Pool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(problem())
    sims.retime(1, speed=1 / SLOWER)
    try:
        with caplog.at_level(logging.INFO, "onebox"), trainer(sims, made) as opened:
            run(opened, 5)
            assert opened.profile_correction is None
            found = correction(opened)
            run(opened, 1)
            assert opened.profile_correction is found
        assert kept_correction("a profile") == TimeFactors(), "emulated devices take what is predicted for them"
        monkeypatch.setattr(resolve_plan, "_correctable", lambda pool, correction: correction)
        with trainer(sims, made) as opened:
            assert kept_correction("a profile") == TimeFactors()
            kept = correction(opened).factors
    finally:
        sims.retime(1, speed=1.0)
    assert kept_correction("a profile") == kept
    assert not found.noisy
    assert found.devices == pytest.approx({0: 1.0, 1: SLOWER}, rel=0.1)
    assert found.factors is not None
    assert found.factors.devices == pytest.approx({1: SLOWER}, rel=0.1)
    slow = replace(problem(), devices=(DeviceSpec(number=0, type="cpu"), DeviceSpec(number=1, type="cpu", speed=0.4)))
    for plan in (made.plan, Plan.data_parallel([0, 1], [0.7, 0.3], micro_batch=MICRO_BATCH)):
        expected = predict(slow, plan)[0].step_s
        assert predict(found.factors.applied(problem()), plan)[0].step_s == pytest.approx(expected, rel=0.15)
    assert found.predicted.step_s == found.measured_s == pytest.approx(predict(slow, made.plan)[0].step_s, rel=0.2)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("steps take")]
    assert said[0] == found.line
    assert len(said) == 2, "once for each run"


def test_a_plan_without_its_problem_is_compared_too_and_adaptive_and_unplanned_runs_are_not(sims: Pool) -> None:
    made = planned(problem())
    with trainer(sims, made.plan) as opened:
        found = correction(opened)
        assert found.devices == pytest.approx({0: 1.0, 1: 1.0}, rel=0.1)
        assert found.factors is None
    for plan, options in ((made, {"adaptive": True}), (msgspec.structs.replace(made.plan, predicted=None), {})):
        with trainer(sims, plan, **options) as opened:
            run(opened)
            assert opened.profile_correction is None


@pytest.mark.feature("Plans: Correct a profile by the first steps")
def test_a_later_plan_is_made_from_the_corrected_profile_until_it_is_measured_again(pools: Pools) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(16, 64), torch.zeros(16, 64)

    def made(**options: Any) -> PlanningResult:
        return onebox.make_plan(
            model, nn.functional.mse_loss, optimizer, *batch, pool=pools(2), micro_batches=[4], budget_s=0.2, **options
        )

    before = made()
    assert before.correction is not None
    assert resolve_plan._correctable(pools(2), before.correction) is before.correction
    assert resolve_plan._correctable(pools(1), before.correction) is None, "of other devices"
    keep_correction(before.correction, TimeFactors(devices={1: 4.0}))
    corrected = made().correction
    assert corrected == replace(before.correction, factors=TimeFactors(devices={1: 4.0}))
    keep_correction(corrected, TimeFactors(devices={1: 2.0}, segments={"cpu": {"model.0": (2.0, 1.0, 1.0)}}))
    after = made()
    assert after.problem.device[1].speed == before.problem.device[1].speed / 8
    assert after.problem.device[0].speed == before.problem.device[0].speed
    for place, factor in enumerate((2.0, 1.0, 1.0)):
        old, new = (each.problem.segments[place].forward_s["cpu"] for each in (before, after))
        assert new.at(4) == pytest.approx(factor * old.at(4))
    fresh = made(fresh=True)
    assert fresh.correction is not None
    assert fresh.correction.key != before.correction.key
    assert fresh.problem.device[1].speed == before.problem.device[1].speed
