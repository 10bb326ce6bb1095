"""Comparison of a planned run's first steps with their prediction, which corrects the profile for the next plan."""

from __future__ import annotations

import logging
from collections.abc import Callable

from onebox.engine.adaptive.measurements import StepContext, time_step
from onebox.engine.steps.observer import EndedStep, StepObserver
from onebox.engine.steps.results import StepTrace
from onebox.errors import UsageError
from onebox.plan import Plan
from onebox.plan.model.problem import Problem
from onebox.plan.replan.profile_correction import (
    FEWEST_STEPS,
    ProfileCorrection,
    TimedStep,
    TimeFactors,
    correct_profile,
    is_sure,
)

SKIPPED = 3
"""Initial steps to ignore, while workers are still slow."""

MOST_STEPS = 40
"""Compared steps after which the run is too noisy if its median is not known well enough."""

_MOST_INSTRUCTIONS = 20_000
"""Most instructions of a step whose times are compared: about 40 ms a step of this process's time."""

_LOG = logging.getLogger("onebox")


class FirstSteps(StepObserver):
    """Observer of a run that compares its first steps with the prediction of its plan, once.

    Args:
        problem: Returns the problem that the plan was made for, if it is known.
        context: Returns the times of a step with their context.
        keep: Stores a correction for later plans.
    """

    def __init__(
        self,
        problem: Callable[[], Problem | None],
        context: Callable[[EndedStep, StepTrace], StepContext],
        keep: Callable[[TimeFactors], None],
    ) -> None:
        self.correction: ProfileCorrection | None = None
        self._problem = problem
        self._context = context
        self._keep = keep
        self._last: EndedStep | None = None
        self._passed = 0
        self._steps: list[TimedStep] = []
        self._over = False

    def ended(self, step: EndedStep) -> None:
        """Compare a step that follows another one under the same plan."""
        if self._over:
            return
        last, self._last = self._last, step
        if step.trace is None or last is None or last.trace is None or last.number + 1 != step.number:
            return
        planned = step.plan.predicted
        if last.plan != step.plan:
            self._restart()
        elif planned is None or step.plan.split or not planned.step_s:
            self._end()
        elif sum(part.size for part in step.micro_batches) == planned.batch:
            self._passed += 1
            if self._passed >= SKIPPED:
                self._take(step, step.trace, last.trace)

    def reset(self) -> None:
        """Begin again: workers were lost."""
        self._restart()

    def _take(self, step: EndedStep, trace: StepTrace, before: StepTrace) -> None:
        if sum(len(labels) for labels, _, _ in trace.workers.values()) > _MOST_INSTRUCTIONS:
            self._end()
            return
        self._steps.append(time_step(self._context(step, trace), before))
        enough = is_sure([each.step_s for each in self._steps]) if len(self._steps) >= FEWEST_STEPS else False
        if enough or len(self._steps) == MOST_STEPS:
            self._compare(step.plan)
            self._end()

    def _compare(self, plan: Plan) -> None:
        try:
            found = correct_profile(plan, self._steps, self._problem())
        except UsageError:  # the problem of another plan, which a recovery has replaced
            found = correct_profile(plan, self._steps)
        self.correction = found
        if found.factors is not None:
            self._keep(found.factors)
        if found.line:
            _LOG.info("%s", found.line)

    def _restart(self) -> None:
        self._passed, self._steps, self._last = 0, [], None

    def _end(self) -> None:
        self._over, self._steps, self._last = True, [], None
