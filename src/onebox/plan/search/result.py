"""Results of a search: the simplest plan that is as good as the best, and the plans compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from onebox.plan.evaluate.evaluator import Evaluator, LayoutEvaluation
from onebox.plan.evaluate.infeasibility import Shortfall, shortfalls
from onebox.plan.evaluate.predict import prediction_of
from onebox.plan.model.layout import plan_of
from onebox.plan.model.plan import Plan
from onebox.plan.model.problem import Problem
from onebox.plan.simulate.step import Simulation

NAMED_BIAS = 0.005
"""Relative slowdown up to which a simpler plan is preferred: one with a named schedule, then with fewer stages, then
with fewer micro-batches."""

SPLIT_WORTH = 0.95
"""Part of the best step with whole layers that one with split layers may take to be chosen. Predictions are 4 % off on
average, and do not count that ranks whose host is busy wait for each other at every collective."""


def rated_s(plan: Plan) -> float:
    """Return the predicted seconds of a step by which a plan is compared; more for one that splits layers."""
    assert plan.predicted is not None
    return plan.predicted.step_s / (SPLIT_WORTH if plan.split else 1.0)


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


def simplest(evaluator: Evaluator, best: LayoutEvaluation) -> LayoutEvaluation:
    """Return the evaluation with the fewest stages and actions among those as good as the best, under named schedules.

    Exact schedules come before asynchronous ones, and whole layers before split ones that gain little.
    """
    if best.layout.split and (whole := _best_whole(evaluator)) is not None:
        best = whole if best.simulation.step_s > SPLIT_WORTH * whole.simulation.step_s else best
    if best.layout.schedule == "auto":
        return best
    limit = best.simulation.step_s * (1 + NAMED_BIAS)
    near = [
        evaluation
        for evaluation in evaluator.evaluations.values()
        if not evaluation.over_bytes and evaluation.simulation.step_s <= limit and evaluator.allows(evaluation.layout)
    ]
    named = [evaluation for evaluation in near if evaluation.layout.schedule != "auto"]
    return min((one for one in named if best.layout.split or not one.layout.split), key=_plainness)


def better_of(whole: SearchResult, split: SearchResult) -> SearchResult:
    """Return the better result of two searches, with the candidates of both, the better one under each label.

    Args:
        whole: The result of a search for plans of whole layers.
        split: The result of one for plans with split layers, too.
    """
    best, other = (split, whole) if rated_s(split.plan) < rated_s(whole.plan) else (whole, split)
    first, *candidates = best.candidates
    second, *others = other.candidates
    if second.plan.split != first.plan.split:
        others.append(replace(second, label=f"best with {'split' if second.plan.split else 'whole'} layers"))
    named: dict[str, PlanCandidate] = {}
    for one in sorted([*candidates, *others], key=_order):
        named.setdefault(one.label, one)
    return replace(
        best,
        candidates=(first, *named.values()),
        simulated=whole.simulated + split.simulated,
        complete=whole.complete and split.complete,
    )


def _order(candidate: PlanCandidate) -> tuple[bool, float]:
    return bool(candidate.shortfalls or candidate.refused), candidate.step_s


def _best_whole(evaluator: Evaluator) -> LayoutEvaluation | None:
    """Return the best evaluation without split layers that fits and is allowed."""
    found = (one for one in evaluator.evaluations.values() if not one.layout.split and not one.over_bytes)
    return min((one for one in found if evaluator.allows(one.layout)), key=lambda one: one.rank, default=None)


def _plainness(evaluation: LayoutEvaluation) -> tuple[bool, bool, int, int, float]:
    layout = evaluation.layout
    return layout.late, layout.split, layout.places, evaluation.case.actions, evaluation.simulation.step_s


def finished(problem: Problem, evaluation: LayoutEvaluation) -> Plan:
    """Return an evaluation's plan with its prediction, and with its table if its schedule has no name."""
    layout, plan = evaluation.layout, plan_of(problem, evaluation.layout)
    predicted = prediction_of(plan, problem, evaluation.case.work, evaluation.simulation)
    if layout.schedule == "auto":
        return msgspec.structs.replace(plan, predicted=predicted, schedule="table", table=evaluation.schedule.lines())
    return msgspec.structs.replace(plan, predicted=predicted, schedule=layout.schedule, in_flight=evaluation.in_flight)


def notable(
    evaluator: Evaluator, best: LayoutEvaluation, trivial: Mapping[str, LayoutEvaluation]
) -> tuple[PlanCandidate, ...]:
    """Return the best plan, the trivial ones, and the best under each schedule, allowed ones first."""
    named = {"the best found": best}
    for evaluation in sorted(evaluator.evaluations.values(), key=lambda evaluation: evaluation.rank):
        if not evaluation.layout.plain:
            if evaluation.over_bytes or not evaluator.allows(evaluation.layout):
                continue
            named.setdefault("best with policies", evaluation)
        elif len(evaluation.layout.parts) > 1 and evaluator.allows(evaluation.layout):
            name = "synthesised" if evaluation.layout.schedule == "auto" else evaluation.layout.schedule
            named.setdefault(f"best under {name}", evaluation)
    named |= trivial
    found = [
        PlanCandidate(
            label=label,
            plan=finished(evaluator.problem, evaluation),
            shortfalls=shortfalls(evaluator.problem, evaluation),
            refused="" if evaluator.allows(evaluation.layout) else evaluator.refusal(evaluation.layout),
        )
        for label, evaluation in named.items()
    ]
    first, *others = found
    return (first, *sorted(others, key=_order))
