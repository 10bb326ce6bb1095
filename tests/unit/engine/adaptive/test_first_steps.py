"""The first steps of a run are compared with their prediction once, and nothing is looked at later."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from random import Random

import msgspec
import pytest

from onebox.engine.adaptive import first_steps as first_steps_module
from onebox.engine.adaptive.first_steps import FirstSteps
from onebox.engine.compile.routine import InstructionLabel
from onebox.engine.steps.observer import EndedStep
from onebox.engine.steps.results import StepTrace
from onebox.plan import Action, MicroBatch, Plan, predict
from onebox.plan.model.problem import Problem
from onebox.plan.replan.profile_correction import FEWEST_STEPS, TimeFactors
from tests.unit.engine.adaptive.test_controller import KINDS, PARTS, context, cut, problem

SKIPPED = 3
ENOUGH = SKIPPED + FEWEST_STEPS
"""Steps until the first comparison."""


class Run:
    """A run whose steps take what they are said to take, and what is kept of it."""

    def __init__(self, plan: Plan | None = None, problem_of: Problem | None = None) -> None:
        known = problem(1.0)
        plan = plan or cut(3)
        self.plan = msgspec.structs.replace(plan, predicted=predict(known, plan)[0])
        self.kept: list[TimeFactors] = []
        self.observer = FirstSteps(lambda: problem_of, context, self.kept.append)
        self.number, self._now = 0, 0

    def end(self, slow: Sequence[float] = (1.0, 1.0), parts: Sequence[MicroBatch] = PARTS, **other: object) -> None:
        """Let a step end in which devices take so many times as long as planned."""
        workers, ends = {}, [self._now]
        for device, stage in enumerate(self.plan.stages):
            labels, times, now = [], [], self._now
            for part in parts:
                for kind in KINDS:
                    if device == 0 and (part, kind) == (parts[-1], "B"):
                        now += int(9e7 * max(slow))  # it waits for the other, as a pipeline is filled and emptied
                    took = int(1e7 * len(stage.segments) * (1 + (kind == "B")) * slow[device])
                    labels.append(InstructionLabel("", "compute", Action(kind, device, part.index)))
                    times += [now, now + took]
                    now += took
            workers[device] = (labels, tuple(times), ())
            ends.append(now)
        self._now = max(ends)
        told = {
            "plan": self.plan,
            "trace": StepTrace(step=self.number, workers=workers, micro_batches=len(parts)),
            "number": self.number,
            **other,
        }
        self.number += 1
        self.observer.ended(EndedStep(current=True, micro_batches=parts, **told))  # type: ignore[arg-type]


def test_nine_steps_after_the_first_are_compared_and_the_correction_is_kept_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(problem_of=problem(1.0))
    with caplog.at_level(logging.INFO, "onebox"):
        for _ in range(ENOUGH - 1):
            run.end((1.0, 2.0))
        assert run.observer.correction is None
        for _ in range(20):
            run.end((1.0, 2.0))
    found = run.observer.correction
    assert found is not None
    assert (found.first, found.steps) == (SKIPPED, FEWEST_STEPS)
    assert found.devices == pytest.approx({0: 1.0, 1: 2.0})
    (kept,) = run.kept
    assert kept.devices == pytest.approx({1: 2.0})
    assert [record.getMessage() for record in caplog.records] == [found.line]
    assert "device 1 2.00 times" in found.line


def test_of_a_run_as_planned_nothing_is_kept_or_said(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(problem_of=problem(1.0))
    with caplog.at_level(logging.INFO, "onebox"):
        for _ in range(ENOUGH):
            run.end()
    assert run.observer.correction is not None
    assert run.kept == []
    assert caplog.records == []


def test_without_a_problem_devices_are_compared_and_nothing_is_kept() -> None:
    run = Run()
    for _ in range(ENOUGH):
        run.end((1.0, 2.0))
    assert run.observer.correction is not None
    assert run.observer.correction.devices == pytest.approx({0: 1.0, 1: 2.0})
    assert run.kept == []


def test_batches_of_other_sizes_steps_apart_and_steps_before_a_loss_do_not_count() -> None:
    run = Run()
    for _ in range(ENOUGH - 1):
        run.end()
    run.end(parts=PARTS[:2])
    run.number += 1  # a step is missing
    run.end()
    assert run.observer.correction is None
    run.observer.reset()
    for _ in range(ENOUGH - 1):
        run.end()
    assert run.observer.correction is None
    run.end()
    assert run.observer.correction is not None


def test_a_change_of_plan_begins_again() -> None:
    run, other = Run(), Run(cut(2))
    for _ in range(ENOUGH - 1):
        run.end()
    for _ in range(ENOUGH + 1):
        run.end(plan=other.plan)
    assert run.observer.correction is not None
    assert run.observer.correction.planned == other.plan.predicted


@pytest.mark.parametrize("why", ["no prediction", "no trace", "too long"])
def test_what_cannot_be_compared_is_left_alone(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    other: dict[str, object] = {}
    if why == "no prediction":
        other["plan"] = cut(3)
    elif why == "no trace":
        other["trace"] = None
    else:
        monkeypatch.setattr(first_steps_module, "_MOST_INSTRUCTIONS", 15)
    for _ in range(2 * ENOUGH):
        run.end(**other)
    assert run.observer.correction is None


def test_steps_that_spread_are_compared_for_longer_and_then_said_to_be_noisy(caplog: pytest.LogCaptureFixture) -> None:
    run, random = Run(problem_of=problem(1.0)), Random(0)
    with caplog.at_level(logging.INFO, "onebox"):
        for _ in range(ENOUGH + 40):
            factor = random.uniform(1.0, 3.0)
            run.end((factor, factor))
    assert run.observer.correction is not None
    assert run.observer.correction.noisy
    assert run.observer.correction.steps == 40
    assert run.kept == []
    assert len(caplog.records) == 1
