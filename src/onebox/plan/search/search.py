"""The planner: search for the plan with the quickest step within the memory of every device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from onebox.plan.evaluate.evaluator import Evaluator, LayoutEvaluation
from onebox.plan.evaluate.infeasibility import infeasible_error
from onebox.plan.evaluate.placement import placed
from onebox.plan.model.layout import StageLayout
from onebox.plan.model.problem import Problem
from onebox.plan.policies.apply import apply_policies, baseline_layouts, least_memory_layout
from onebox.plan.schedules.synthesis import auto_schedule
from onebox.plan.search.baselines import even_cuts, nested, one_stage, shared_by_speed
from onebox.plan.search.local_search import descend_cuts, local_search, perturb
from onebox.plan.search.result import NAMED_BIAS, SearchResult, finished, notable, simplest
from onebox.plan.search.seeds import PLAIN, every_layout, few, proposed
from onebox.plan_names import ASYNC

EFFORT = 340_000
"""Simulated actions per second of a search's budget; a core of a laptop simulates as many in 0.6 s."""

_STARTS = 3
"""Number of best different layouts from which local search begins."""

_AT_LEAST = 16
"""Number of proposals that are made, and simulated until two fit, even without effort left; one without time left."""

_ALIKE = 1.02
"""Factor of the bounds within which the trivial plan with the fewest micro-batches is shown."""

_DESCENTS = 6
"""Number of best different proposals that are improved by their bounds."""

_FRUITLESS = 50
"""Number of random restarts without a gain after which the search ends."""

_NEAR = 1.02
"""Factor over the best within which the bound of a restart is followed up with the simulator."""

_SYNTHESIS_S = 0.4
"""Nominal seconds for each synthesised schedule."""

_NESTED = 1 / 4
"""Part of effort and time for plans that leave devices idle."""

_FEWEST = 4
"""Number of devices below which only dynamic programming leaves some idle."""

_EXPLORED, _WITH_POLICIES = 0.75, 0.9
"""Parts of the time after which a search goes on with activation policies and with schedules."""

_LONG = 10_000
"""Number of actions above which schedules are synthesised for one layout only, and not chosen for trivial plans."""

_HOPELESS = 50
"""Number of infeasible layouts that are simulated where none fits, to report the closest one."""

_RECUT = 6
"""Number of best different layouts without limits of memory to which activation policies are applied."""

_SYNTHESISED = 3
"""Number of best different layouts for which a schedule is synthesised."""


def search(
    problem: Problem,
    *,
    budget_s: float = 5.0,
    seed: int = 0,
    effort: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Find the plan whose step is predicted to be the quickest of those that fit.

    Small problems are enumerated, with bounds that avoid most simulations. For larger ones, dynamic programming over
    cuts and devices proposes layouts (:mod:`onebox.plan.evaluate.partition`); the best by bound are simulated; local
    search with the simulator as its objective changes cuts, devices, replicas, micro-batches and schedules; the
    remaining effort goes into random restarts nearby. Finally, schedules are synthesised for the best layouts, if
    ``auto`` is allowed.

    Args:
        problem: Segments, values, devices, links, and what is allowed.
        budget_s: Maximum seconds. They are converted to simulated actions, with a margin, so that equal searches give
            equal plans; on a busy machine the clock ends the search, and only the work that is needed for a plan that
            fits goes on.
        seed: Seed of the random restarts.
        effort: Actions to simulate; ``None`` derives it from ``budget_s``.
        clock: Returns the time in seconds.

    Returns:
        The best plan, and the plans compared with it.

    Raises:
        PlanError: No tried plan fits the memory; the message names the missing memory and remedies.
    """
    whole = Deadline(clock, clock() + budget_s)
    effort = round(EFFORT * budget_s) if effort is None else effort
    judge = Evaluator(problem, effort=effort, expired=whole)
    trivial = _look(judge, whole.part(_EXPLORED), seed)
    complete = not judge.spent
    judge.expired = whole.part(_WITH_POLICIES)
    trivial |= _with_policies(judge, Random(seed))
    judge.expired = whole
    best = judge.best
    if best is not None and "auto" in problem.schedules:
        best = _synthesise(judge, best)
    if best is None or best.over_bytes:
        raise infeasible_error(judge)
    best = simplest(judge, best)
    if best.layout.schedule == ASYNC and not judge.expired():  # the gain from staleness
        for name in PLAIN:
            judge.judge(best.layout._replace(schedule=name))
    return SearchResult(
        plan=finished(problem, best),
        simulation=best.simulation,
        candidates=notable(judge, best, trivial),
        simulated=judge.simulated,
        complete=complete,
    )


@dataclass(frozen=True)
class Deadline:
    """The deadline of a search or of a part of it; calling it returns whether it has passed.

    Args:
        clock: Returns the time in seconds.
        end_s: The time of the deadline.
    """

    clock: Callable[[], float]
    end_s: float

    def __call__(self) -> bool:
        return self.clock() >= self.end_s

    def part(self, share: float) -> Deadline:
        """Return a deadline after a part of the time that is left."""
        now = self.clock()
        return Deadline(self.clock, now + share * max(0.0, self.end_s - now))


def _look(judge: Evaluator, deadline: Deadline, seed: int) -> dict[str, LayoutEvaluation]:
    """Search for the best plan without activation policies and synthesised schedules; return the trivial plans.

    The search is repeated for the quicker half of the devices, and for half of these, and so on: the best result of
    each is a candidate, so that more devices do not give a worse plan, as far as either search goes.
    """
    problem, fewer = judge.problem, _fewer(judge)
    found = []
    if fewer:
        devices = tuple(device for device in problem.devices if device.number in set(fewer))
        less = Evaluator(
            replace(problem, devices=devices), effort=int(judge.left * _NESTED), expired=deadline, required=False
        )
        _look(less, deadline.part(_NESTED), seed)
        judge.left -= less.effort - less.left
        judge.simulated += less.simulated
        found = _ranked(less)[:_STARTS]
    judge.expired = deadline
    reserve = int(judge.left * _NESTED) if found else 0
    judge.left -= reserve
    plain = (*one_stage(judge.costs), *even_cuts(judge.costs))
    trivial = {label: _best(judge, layouts) for label, layouts in plain}
    if ASYNC in problem.schedules:
        for _, layouts in one_stage(judge.costs):
            _best(judge, [layout._replace(schedule=ASYNC) for layout in layouts])
    for numbers in nested(judge.costs, judge.near) if problem.replicable else ():
        _best(judge, shared_by_speed(judge.costs, numbers))
    if few(problem):
        _simulate(judge, _bounds(judge, every_layout(problem)), judge.left // 2)
    _explore(judge, Random(seed))
    judge.left += reserve
    before = judge.best
    candidates = [judge.judge(layout) for layout in found]
    if judge.best is not before and candidates:
        local_search(judge, min(candidates, key=lambda verdict: verdict.rank))
    return trivial


def _fewer(judge: Evaluator) -> tuple[int, ...]:
    """Return the quicker half of the devices, or a little more; empty if they are few."""
    if len(judge.problem.devices) < _FEWEST or few(judge.problem):
        return ()
    return nested(judge.costs, judge.near)[0]


def _best(judge: Evaluator, layouts: Sequence[StageLayout]) -> LayoutEvaluation:
    """Evaluate the variant with the least bound or, if that does not fit, the one of the smallest micro-batches."""
    # A very long schedule gains little over a long one, and would take the time of the search.
    layouts = [one for one in layouts if judge.case(one).actions <= _LONG] or layouts
    least = min(judge.bound(layout) for layout in layouts)
    near = [layout for layout in layouts if judge.bound(layout) <= least * _ALIKE]
    chosen = judge.judge(min(near, key=lambda layout: judge.case(layout).actions))
    if not chosen.over_bytes:
        return chosen
    smallest = min(layouts, key=lambda layout: max(part.size for part in judge.case(layout).micro_batches))
    return min(chosen, judge.judge(smallest), key=lambda verdict: verdict.rank)


def _explore(judge: Evaluator, random: Random) -> None:
    """Evaluate the proposals of dynamic programming, improve the best, and go on from random changes of the best."""
    bounds = _bounds(judge, proposed(judge))
    share = judge.left // 4
    starts = _first_of_each(sorted(bounds, key=bounds.__getitem__), _DESCENTS)
    improved = [descend_cuts(judge, layout, share // _DESCENTS) for layout in starts]
    bounds |= _bounds(judge, [*improved, *(placed(judge, layout) for layout in improved)])
    _simulate(judge, bounds, share)
    for layout in _first_of_each(_ranked(judge), _STARTS):
        local_search(judge, judge.judge(layout))
    fruitless = 0
    while not judge.spent and judge.best is not None and fruitless < _FRUITLESS:
        before = judge.best
        layout = descend_cuts(judge, perturb(judge, before.layout, random), share // _DESCENTS)
        if before.over_bytes or judge.bound(layout) < before.simulation.step_s * _NEAR:
            local_search(judge, judge.judge(layout))
        fruitless = fruitless + 1 if judge.best is before else 0


def _bounds(judge: Evaluator, layouts: Iterable[StageLayout]) -> dict[StageLayout, float]:
    """Return the bounds of layouts that are allowed."""
    bounds: dict[StageLayout, float] = {}
    for layout in layouts:
        if judge.spent and (len(bounds) >= _AT_LEAST or judge.enough):
            break
        if layout not in bounds and judge.allows(layout):
            bounds[layout] = judge.bound(layout)
    return bounds


def _simulate(judge: Evaluator, bounds: Mapping[StageLayout, float], effort: int) -> None:
    """Simulate layouts in the order of their bounds, until the rest cannot be better or the effort is used up."""
    limit, hopeless, fitting = judge.left - effort, 0, 0
    for turn, layout in enumerate(sorted(bounds, key=bounds.__getitem__)):
        best = judge.best
        if best is not None and not best.over_bytes and bounds[layout] >= best.simulation.step_s:
            return
        hopeless += bounds[layout] == float("inf")
        enough = fitting >= 2 or turn >= _AT_LEAST or judge.enough
        if enough and (judge.spent or judge.left < limit or hopeless > _HOPELESS):
            return
        fitting += not judge.judge(layout).over_bytes


def _ranked(judge: Evaluator) -> list[StageLayout]:
    """Return the layouts that were simulated and are allowed, the best first."""
    found = (verdict for verdict in judge.verdicts.values() if judge.allows(verdict.layout))
    return [verdict.layout for verdict in sorted(found, key=lambda verdict: verdict.rank)]


def _first_of_each(layouts: Iterable[StageLayout], count: int) -> list[StageLayout]:
    """Return the first layouts that differ in devices or in the size of micro-batches."""
    found: dict[tuple[object, ...], StageLayout] = {}
    for layout in layouts:
        found.setdefault((*(part.devices for part in layout.parts), layout.micro_batch), layout)
        if len(found) == count:
            break
    return list(found.values())


def _with_policies(judge: Evaluator, random: Random) -> dict[str, LayoutEvaluation]:
    """Apply activation policies to layouts that do not fit; return the baseline policies' evaluations.

    Layouts that would be quick with unlimited memory are found by a search for devices without limits. Those that
    already fit, and are as quick, are skipped.
    """
    problem = judge.problem
    if problem.policies == ("keep",) and problem.updates == ("device",):
        return {}
    if not any(verdict.over_bytes for verdict in judge.verdicts.values()) and judge.best is not None:
        return {}
    endless = replace(problem, devices=tuple(replace(device, capacity_bytes=None) for device in problem.devices))
    loose = Evaluator(endless, effort=judge.effort // 4, expired=judge.expired)
    alone = [layout for _, layouts in one_stage(loose.costs) for layout in layouts]
    if len(problem.devices) > 1:
        _explore(loose, random)
    bases = _first_of_each(_ranked(loose), _RECUT)
    for base in dict.fromkeys((*alone, *bases)):
        if judge.enough:
            return {}
        for update in problem.updates:
            apply_policies(judge, base._replace(schedule=base.schedule if base.schedule in PLAIN else "1f1b"), update)
    devices = {layout.parts[0].devices[0] for layout in alone if len(layout.parts[0].devices) == 1}
    if judge.best is None or judge.best.over_bytes:
        for device in devices:
            least_memory_layout(judge, device, min(problem.micro_batches))
    return _policies(judge, devices)


def _policies(judge: Evaluator, devices: Iterable[int]) -> dict[str, LayoutEvaluation]:
    """Evaluate the baseline policies on some devices, each with its best micro-batch."""
    found: dict[str, LayoutEvaluation] = {}
    for device in sorted(devices):
        for size in judge.problem.micro_batches:
            for name, layout in baseline_layouts(judge, device, size):
                if judge.enough:
                    return found
                label = f"device {device} alone, {name}"
                verdict = judge.judge(layout)
                if label not in found or verdict.rank < found[label].rank:
                    found[label] = verdict
    return found


def _synthesise(judge: Evaluator, best: LayoutEvaluation) -> LayoutEvaluation:
    """Synthesise schedules for the best layouts; return the best evaluation, the named one if it is as good."""
    found = best
    if best.layout.schedule == ASYNC and not best.over_bytes:
        return best  # no exact schedule is quicker on its devices
    layouts = _first_of_each(_ranked(judge), _SYNTHESISED)
    if judge.case(best.layout).actions > _LONG:
        layouts = layouts[:1]
    for layout in layouts:
        case = judge.case(layout)
        if layout.blocks == 1 or judge.expired():
            continue
        schedule = auto_schedule(case.routes, case.work, case.sizes, budget_s=_SYNTHESIS_S, expired=judge.expired)
        made = judge.judge(layout._replace(schedule="auto"), schedule)
        bias = 1.0 if found.over_bytes or found.layout.schedule == "auto" else 1 - NAMED_BIAS
        if (made.over_bytes, made.simulation.step_s) < (found.over_bytes, found.simulation.step_s * bias):
            found = made
    return found
