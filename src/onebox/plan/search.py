"""The planner: which cut, devices, replicas, micro-batches and schedule make a step quickest within every memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random

import msgspec

from onebox.plan.climb import climb, shaken
from onebox.plan.inputs import Problem
from onebox.plan.judge import Judge, Verdict
from onebox.plan.layout import Layout, plan_of
from onebox.plan.misfit import Shortfall, misfit, shortfalls
from onebox.plan.plan import Plan
from onebox.plan.predict import prediction_of
from onebox.plan.seeds import every_layout, few, proposed
from onebox.plan.simulate import Simulation
from onebox.plan.synthesis import auto_schedule
from onebox.plan.trivial import trivial_layouts

EFFORT = 1_500_000
"""Actions that a search may simulate: about 3 s on a core of a laptop."""

NAMED_BIAS = 0.005
"""A schedule that has a name is preferred to a synthesised one unless that is quicker by more than this part."""

_STARTS = 3
"""From so many of the best different layouts local search begins."""

_HOPELESS = 50
"""So many layouts that cannot fit are simulated where none fits, to say what came closest."""

_SYNTHESISED = 3
"""For so many of the best different layouts a schedule is synthesised."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
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
        candidates: Notable plans, the trivial ones among them, those that may be chosen first and the quickest first.
        simulated: How many layouts were simulated.
        complete: Whether the search ended by itself, not for lack of effort or time.
    """

    plan: Plan
    simulation: Simulation
    candidates: tuple[Candidate, ...]
    simulated: int
    complete: bool


def search(
    problem: Problem,
    *,
    budget_s: float = 5.0,
    seed: int = 0,
    effort: int = EFFORT,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Find the plan whose step is predicted to be the quickest of those that fit.

    Small problems are enumerated, with bounds that spare most simulations. For larger ones, dynamic programming over
    cuts and devices proposes layouts (:mod:`onebox.plan.partition`); the best by bound are simulated; local search with
    the simulator as its objective changes cuts, devices, replicas, micro-batches and schedules; what effort is left
    goes into random restarts nearby. At last, schedules are synthesised for the best layouts, if ``auto`` is allowed.

    Args:
        problem: Segments, values, devices, links, and what is allowed.
        budget_s: Seconds after which no more is tried. Results are reproducible where ``effort`` ends the search.
        seed: Seed of the random restarts.
        effort: Actions to simulate.
        clock: What tells the time.

    Returns:
        The best plan, and what it was compared with.

    Raises:
        PlanError: Nothing that was tried fits the memory; it says what misses by how much, and what would help.
    """
    end = clock() + budget_s
    judge = Judge(problem, effort=effort, expired=lambda: clock() >= end)
    trivial = {label: _best(judge, layouts) for label, layouts in trivial_layouts(judge.costs) if layouts}
    complete = _enumerate(judge) if few(problem) else _propose(judge, Random(seed))
    if judge.best is None or judge.best.over_bytes:
        raise misfit(judge)
    best = _synthesise(judge, judge.best) if "auto" in problem.schedules else judge.best
    return SearchResult(
        plan=_finished(problem, best),
        simulation=best.simulation,
        candidates=_notable(judge, best, trivial),
        simulated=judge.simulated,
        complete=complete,
    )


def _best(judge: Judge, layouts: Iterable[Layout]) -> Verdict:
    return min((judge.judge(layout) for layout in layouts), key=lambda verdict: verdict.rank)


def _enumerate(judge: Judge) -> bool:
    """Look at all layouts of single devices, the most promising first, then at what is near the best ones."""
    complete = _by_bound(judge, every_layout(judge.problem))
    _climb(judge)
    return complete and not judge.spent


def _propose(judge: Judge, random: Random) -> bool:
    """Look at what dynamic programming proposes, improve the best, and go on from random changes of the best."""
    _by_bound(judge, proposed(judge.costs, _sizes(judge)), judge.left // 4)
    _climb(judge)
    while not judge.spent and judge.best is not None:
        before = judge.simulated
        layout = shaken(judge, judge.best.layout, random)
        climb(judge, judge.judge(layout))
        if judge.simulated == before:
            judge.left -= 1000  # nothing new nearby: also that comes to an end
    return False


def _sizes(judge: Judge) -> list[int]:
    """Return the micro-batches worth a dynamic program: of those allowed, up to four, well apart."""
    sizes = sorted(set(judge.problem.micro_batches), reverse=True)
    stages = min(len(judge.problem.devices), len(judge.problem.segments))
    # With too few micro-batches a pipeline is mostly bubble; with very many, mostly overhead.
    useful = [size for size in sizes if stages <= 2 * judge.problem.batch // size] or sizes[-1:]
    step = max(1, -(-len(useful) // 4))
    return useful[::step]


def _by_bound(judge: Judge, layouts: Iterable[Layout], effort: int | None = None) -> bool:
    """Simulate layouts in the order of their bounds, until none can be better; say whether that was reached."""
    limit = judge.left - effort if effort is not None else 0
    bounds: dict[Layout, float] = {}
    for layout in layouts:
        if judge.spent:
            break
        if layout not in bounds and judge.allows(layout):
            bounds[layout] = judge.bound(layout)
    hopeless = 0
    for layout in sorted(bounds, key=bounds.__getitem__):
        best = judge.best
        if best is not None and not best.over_bytes and bounds[layout] >= best.simulation.step_s:
            return True
        hopeless += bounds[layout] == float("inf")
        if judge.spent or judge.left < limit or hopeless > _HOPELESS:
            return False
        judge.judge(layout)
    return True


def _climb(judge: Judge) -> None:
    """Improve the best layouts found so far."""
    for verdict in _different(judge, _STARTS):
        climb(judge, verdict)


def _different(judge: Judge, count: int) -> list[Verdict]:
    """Return the best verdicts, one for each sequence of devices and size of micro-batches."""
    found: dict[tuple[object, ...], Verdict] = {}
    for verdict in sorted(judge.verdicts.values(), key=lambda verdict: verdict.rank):
        if judge.allows(verdict.layout):
            places = tuple(part.devices for part in verdict.layout.parts)
            found.setdefault((places, verdict.layout.micro_batch), verdict)
            if len(found) == count:
                break
    return list(found.values())


def _synthesise(judge: Judge, best: Verdict) -> Verdict:
    """Synthesise schedules for the best layouts; return the best verdict, the named one if it is as good."""
    found = best
    for verdict in _different(judge, _SYNTHESISED):
        case = verdict.case
        if len(case.routes) == 1 or verdict.case.actions * 20 > max(judge.left, 60_000):
            continue
        schedule = auto_schedule(case.routes, case.work, case.sizes)
        made = judge.judge(verdict.layout._replace(schedule="auto"), schedule)
        limit = best.simulation.step_s * (1 - NAMED_BIAS)
        if not made.over_bytes and made.simulation.step_s < min(limit, found.simulation.step_s):
            found = made
    return found


def _finished(problem: Problem, verdict: Verdict) -> Plan:
    """Return a verdict's plan with its prediction, and with its table if its schedule has no name."""
    layout, plan = verdict.layout, plan_of(problem, verdict.layout)
    predicted = prediction_of(plan, problem.batch, verdict.case.work, verdict.simulation)
    if layout.schedule == "auto":
        return msgspec.structs.replace(plan, predicted=predicted, schedule="table", table=verdict.schedule.lines())
    return msgspec.structs.replace(plan, predicted=predicted, schedule=layout.schedule)


def _notable(judge: Judge, best: Verdict, trivial: Mapping[str, Verdict]) -> tuple[Candidate, ...]:
    """Return the best plan, the trivial ones, and the best under each schedule, those that may be chosen first."""
    named = {"the best found": best}
    for verdict in sorted(judge.verdicts.values(), key=lambda verdict: verdict.rank):
        if len(verdict.layout.parts) > 1 and judge.allows(verdict.layout):
            name = "synthesised" if verdict.layout.schedule == "auto" else verdict.layout.schedule
            named.setdefault(f"best under {name}", verdict)
    named |= trivial
    found = [
        Candidate(
            label=label,
            plan=_finished(judge.problem, verdict),
            shortfalls=shortfalls(judge.problem, verdict),
            refused="" if judge.allows(verdict.layout) else judge.refusal(verdict.layout),
        )
        for label, verdict in named.items()
    ]
    return tuple(sorted(found, key=lambda one: (bool(one.shortfalls or one.refused), one.step_s)))
