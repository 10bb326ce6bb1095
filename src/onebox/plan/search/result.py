"""What a search found: the plainest of what is as good as the best, and what that is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from onebox.plan.evaluate.evaluator import Evaluator, LayoutEvaluation
from onebox.plan.evaluate.infeasibility import Shortfall, shortfalls
from onebox.plan.evaluate.predict import prediction_of
from onebox.plan.model.layout import plan_of
from onebox.plan.model.plan import ASYNC, Plan
from onebox.plan.model.problem import Problem
from onebox.plan.simulate.step import Simulation

NAMED_BIAS = 0.005
"""Simpler plans are preferred to others that are quicker by no more than this part: those whose schedule has a name to
synthesised ones, fewer stages to more, fewer micro-batches to more."""


@dataclass(frozen=True, kw_only=True)
class PlanCandidate:
    """A plan that was considered.

    Args:
        label: What it is, for a person.
        plan: The plan, with what is predicted of it.
        shortfalls: Which stage misses which device by how much; empty if it fits.
        refused: Why it may not be chosen; empty if it may.
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
    """What a search found.

    Args:
        plan: The best plan, with what is predicted of it.
        simulation: Its step.
        candidates: Notable plans, the trivial ones among them: the chosen one first, then by time; last what may not.
        simulated: How many layouts were simulated.
        complete: Whether the search ended by itself, not for lack of effort or time.
    """

    plan: Plan
    simulation: Simulation
    candidates: tuple[PlanCandidate, ...]
    simulated: int
    complete: bool


def simplest(judge: Evaluator, best: LayoutEvaluation) -> LayoutEvaluation:
    """Return, of what is as good as the best under the named schedules, what has fewest stages and actions.

    What is exact comes before what is not.
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
    """Return a verdict's plan with its prediction, and with its table if its schedule has no name."""
    layout, plan = verdict.layout, plan_of(problem, verdict.layout)
    predicted = prediction_of(plan, problem.batch, verdict.case.work, verdict.simulation)
    if layout.schedule == "auto":
        return msgspec.structs.replace(plan, predicted=predicted, schedule="table", table=verdict.schedule.lines())
    return msgspec.structs.replace(plan, predicted=predicted, schedule=layout.schedule, in_flight=verdict.in_flight)


def notable(
    judge: Evaluator, best: LayoutEvaluation, trivial: Mapping[str, LayoutEvaluation]
) -> tuple[PlanCandidate, ...]:
    """Return the best plan, the trivial ones, and the best under each schedule, those that may be chosen first."""
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
