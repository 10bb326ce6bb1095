"""Results of a search: the simplest plan that is as good as the best, and the plans compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from onebox.plan.evaluate.evaluator import Evaluator, LayoutEvaluation
from onebox.plan.evaluate.infeasibility import Shortfall, shortfalls
from onebox.plan.evaluate.predict import prediction_of
from onebox.plan.model.layout import plan_of
from onebox.plan.model.plan import Plan
from onebox.plan.model.problem import Problem
from onebox.plan.simulate.step import Simulation
from onebox.plan_names import ASYNC

NAMED_BIAS = 0.005
"""Relative slowdown up to which a simpler plan is preferred: one with a named schedule, then with fewer stages, then
with fewer micro-batches."""


@dataclass(frozen=True, kw_only=True)
class PlanCandidate:
    """A plan that was considered.

    Args:
        label: A readable name.
        plan: The plan, with its prediction.
        shortfalls: Missing memory of devices; empty if the plan fits.
        refused: The reason why it is not allowed; empty if it is.
    """

    label: str
    plan: Plan
    shortfalls: tuple[Shortfall, ...] = ()
    refused: str = ""

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        assert self.plan.predicted is not None
        return self.plan.predicted.step_s


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Args:
        plan: The best plan, with its prediction.
        simulation: Its step.
        candidates: Notable plans, the trivial ones among them: the chosen one first, then by time; last those not
            allowed.
        simulated: Number of simulated layouts.
        complete: Whether the search ended before effort and time were used up.
    """

    plan: Plan
    simulation: Simulation
    candidates: tuple[PlanCandidate, ...]
    simulated: int
    complete: bool


def simplest(judge: Evaluator, best: LayoutEvaluation) -> LayoutEvaluation:
    """Return the evaluation with the fewest stages and actions among those as good as the best, under named schedules.

    Exact schedules come before asynchronous ones.
    """
    if best.layout.schedule == "auto":
        return best
    limit = best.simulation.step_s * (1 + NAMED_BIAS)
    near = [
        verdict
        for verdict in judge.verdicts.values()
        if not verdict.over_bytes and verdict.simulation.step_s <= limit and judge.allows(verdict.layout)
    ]
    named = [verdict for verdict in near if verdict.layout.schedule != "auto"]
    return min(named, key=_plainness)


def _plainness(verdict: LayoutEvaluation) -> tuple[bool, int, int, float]:
    layout = verdict.layout
    return layout.schedule == ASYNC, layout.places, verdict.case.actions, verdict.simulation.step_s


def finished(problem: Problem, verdict: LayoutEvaluation) -> Plan:
    """Return an evaluation's plan with its prediction, and with its table if its schedule has no name."""
    layout, plan = verdict.layout, plan_of(problem, verdict.layout)
    predicted = prediction_of(plan, problem.batch, verdict.case.work, verdict.simulation)
    if layout.schedule == "auto":
        return msgspec.structs.replace(plan, predicted=predicted, schedule="table", table=verdict.schedule.lines())
    return msgspec.structs.replace(plan, predicted=predicted, schedule=layout.schedule, in_flight=verdict.in_flight)


def notable(
    judge: Evaluator, best: LayoutEvaluation, trivial: Mapping[str, LayoutEvaluation]
) -> tuple[PlanCandidate, ...]:
    """Return the best plan, the trivial ones, and the best under each schedule, allowed ones first."""
    named = {"the best found": best}
    for verdict in sorted(judge.verdicts.values(), key=lambda verdict: verdict.rank):
        if not verdict.layout.plain:
            if verdict.over_bytes or not judge.allows(verdict.layout):
                continue
            named.setdefault("best with policies", verdict)
        elif len(verdict.layout.parts) > 1 and judge.allows(verdict.layout):
            name = "synthesised" if verdict.layout.schedule == "auto" else verdict.layout.schedule
            named.setdefault(f"best under {name}", verdict)
    named |= trivial
    found = [
        PlanCandidate(
            label=label,
            plan=finished(judge.problem, verdict),
            shortfalls=shortfalls(judge.problem, verdict),
            refused="" if judge.allows(verdict.layout) else judge.refusal(verdict.layout),
        )
        for label, verdict in named.items()
    ]
    first, *others = found
    return (first, *sorted(others, key=lambda one: (bool(one.shortfalls or one.refused), one.step_s)))
