"""The planner: search for the plan with the quickest step within the memory of every device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from onebox.plan.evaluate.evaluator import Evaluator, LayoutEvaluation
from onebox.plan.evaluate.infeasibility import infeasible_error
from onebox.plan.model.layout import StageLayout
from onebox.plan.model.problem import Problem
from onebox.plan.policies.apply import apply_policies, baseline_layouts, least_memory_layout
from onebox.plan.schedules.synthesis import auto_schedule
from onebox.plan.search.baselines import even_cuts, nested, one_stage, shared_by_speed
from onebox.plan.search.local_search import descend_cuts, local_search, perturb
from onebox.plan.search.placement import placed
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
    cuts and devices proposes layouts (:mod:`onebox.plan.search.partition`); the best by bound are simulated; local
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
    evaluator = Evaluator(problem, effort=effort, expired=whole)
    trivial = _look(evaluator, whole.part(_EXPLORED), seed)
    complete = not evaluator.spent
    evaluator.expired = whole.part(_WITH_POLICIES)
    trivial |= _with_policies(evaluator, Random(seed))
    evaluator.expired = whole
    best = evaluator.best
    if best is not None and "auto" in problem.schedules:
        best = _synthesise(evaluator, best)
    if best is None or best.over_bytes:
        raise infeasible_error(evaluator)
    best = simplest(evaluator, best)
    if best.layout.late and not evaluator.expired():  # the gain from staleness
        for name in PLAIN:
            evaluator.evaluate(best.layout._replace(schedule=name))
    return SearchResult(
        plan=finished(problem, best),
        simulation=best.simulation,
        candidates=notable(evaluator, best, trivial),
        simulated=evaluator.simulated,
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


def _look(evaluator: Evaluator, deadline: Deadline, seed: int) -> dict[str, LayoutEvaluation]:
    """Search for the best plan without activation policies and synthesised schedules; return the trivial plans.

    The search is repeated for the quicker half of the devices, and for half of these, and so on: the best result of
    each is a candidate, so that more devices do not give a worse plan, as far as either search goes.
    """
    problem, fewer = evaluator.problem, _fewer(evaluator)
    found = []
    if fewer:
        devices = tuple(device for device in problem.devices if device.number in set(fewer))
        less = Evaluator(
            replace(problem, devices=devices), effort=int(evaluator.left * _NESTED), expired=deadline, required=False
        )
        _look(less, deadline.part(_NESTED), seed)
        evaluator.left -= less.effort - less.left
        evaluator.simulated += less.simulated
        found = _ranked(less)[:_STARTS]
    evaluator.expired = deadline
    reserve = int(evaluator.left * _NESTED) if found else 0
    evaluator.left -= reserve
    plain = (*one_stage(evaluator.costs), *even_cuts(evaluator.costs))
    trivial = {label: _best(evaluator, layouts) for label, layouts in plain}
    if ASYNC in problem.schedules:
        for _, layouts in one_stage(evaluator.costs):
            _best(evaluator, [layout._replace(schedule=ASYNC) for layout in layouts])
    for numbers in nested(evaluator.costs, evaluator.near) if problem.replicable else ():
        _best(evaluator, shared_by_speed(evaluator.costs, numbers))
    if few(problem):
        _simulate(evaluator, _bounds(evaluator, every_layout(problem)), evaluator.left // 2)
    _explore(evaluator, Random(seed))
    evaluator.left += reserve
    before = evaluator.best
    candidates = [evaluator.evaluate(layout) for layout in found]
    if evaluator.best is not before and candidates:
        local_search(evaluator, min(candidates, key=lambda evaluation: evaluation.rank))
    return trivial


def _fewer(evaluator: Evaluator) -> tuple[int, ...]:
    """Return the quicker half of the devices, or a little more; empty if they are few."""
    if len(evaluator.problem.devices) < _FEWEST or few(evaluator.problem):
        return ()
    return nested(evaluator.costs, evaluator.near)[0]


def _best(evaluator: Evaluator, layouts: Sequence[StageLayout]) -> LayoutEvaluation:
    """Evaluate the variant with the least bound or, if that does not fit, the one of the smallest micro-batches."""
    # A very long schedule gains little over a long one, and would take the time of the search.
    layouts = [one for one in layouts if evaluator.case(one).actions <= _LONG] or layouts
    least = min(evaluator.bound(layout) for layout in layouts)
    near = [layout for layout in layouts if evaluator.bound(layout) <= least * _ALIKE]
    chosen = evaluator.evaluate(min(near, key=lambda layout: evaluator.case(layout).actions))
    if not chosen.over_bytes:
        return chosen
    smallest = min(layouts, key=lambda layout: max(part.size for part in evaluator.case(layout).micro_batches))
    return min(chosen, evaluator.evaluate(smallest), key=lambda evaluation: evaluation.rank)


def _explore(evaluator: Evaluator, random: Random) -> None:
    """Evaluate the proposals of dynamic programming, improve the best, and go on from random changes of the best."""
    bounds = _bounds(evaluator, proposed(evaluator))
    share = evaluator.left // 4
    starts = _first_of_each(sorted(bounds, key=bounds.__getitem__), _DESCENTS)
    improved = [descend_cuts(evaluator, layout, share // _DESCENTS) for layout in starts]
    bounds |= _bounds(evaluator, [*improved, *(placed(evaluator, layout) for layout in improved)])
    _simulate(evaluator, bounds, share)
    for layout in _first_of_each(_ranked(evaluator), _STARTS):
        local_search(evaluator, evaluator.evaluate(layout))
    fruitless = 0
    while not evaluator.spent and evaluator.best is not None and fruitless < _FRUITLESS:
        before = evaluator.best
        layout = descend_cuts(evaluator, perturb(evaluator, before.layout, random), share // _DESCENTS)
        if before.over_bytes or evaluator.bound(layout) < before.simulation.step_s * _NEAR:
            local_search(evaluator, evaluator.evaluate(layout))
        fruitless = fruitless + 1 if evaluator.best is before else 0


def _bounds(evaluator: Evaluator, layouts: Iterable[StageLayout]) -> dict[StageLayout, float]:
    """Return the bounds of layouts that are allowed."""
    bounds: dict[StageLayout, float] = {}
    for layout in layouts:
        if evaluator.spent and (len(bounds) >= _AT_LEAST or evaluator.enough):
            break
        if layout not in bounds and evaluator.allows(layout):
            bounds[layout] = evaluator.bound(layout)
    return bounds


def _simulate(evaluator: Evaluator, bounds: Mapping[StageLayout, float], effort: int) -> None:
    """Simulate layouts in the order of their bounds, until the rest cannot be better or the effort is used up."""
    limit, hopeless, fitting = evaluator.left - effort, 0, 0
    for turn, layout in enumerate(sorted(bounds, key=bounds.__getitem__)):
        best = evaluator.best
        if best is not None and not best.over_bytes and bounds[layout] >= best.simulation.step_s:
            return
        hopeless += bounds[layout] == float("inf")
        enough = fitting >= 2 or turn >= _AT_LEAST or evaluator.enough
        if enough and (evaluator.spent or evaluator.left < limit or hopeless > _HOPELESS):
            return
        fitting += not evaluator.evaluate(layout).over_bytes


def _ranked(evaluator: Evaluator) -> list[StageLayout]:
    """Return the layouts that were simulated and are allowed, the best first."""
    found = (evaluation for evaluation in evaluator.evaluations.values() if evaluator.allows(evaluation.layout))
    return [evaluation.layout for evaluation in sorted(found, key=lambda evaluation: evaluation.rank)]


def _first_of_each(layouts: Iterable[StageLayout], count: int) -> list[StageLayout]:
    """Return the first layouts that differ in devices or in the size of micro-batches."""
    found: dict[tuple[object, ...], StageLayout] = {}
    for layout in layouts:
        found.setdefault((*(part.devices for part in layout.parts), layout.micro_batch), layout)
        if len(found) == count:
            break
    return list(found.values())


def _with_policies(evaluator: Evaluator, random: Random) -> dict[str, LayoutEvaluation]:
    """Apply activation policies to layouts that do not fit; return the baseline policies' evaluations.

    Layouts that would be quick with unlimited memory are found by a search for devices without limits. Those that
    already fit, and are as quick, are skipped.
    """
    problem = evaluator.problem
    if problem.policies == ("keep",) and problem.updates == ("device",):
        return {}
    if not any(evaluation.over_bytes for evaluation in evaluator.evaluations.values()) and evaluator.best is not None:
        return {}
    endless = replace(problem, devices=tuple(replace(device, capacity_bytes=None) for device in problem.devices))
    loose = Evaluator(endless, effort=evaluator.effort // 4, expired=evaluator.expired)
    alone = [layout for _, layouts in one_stage(loose.costs) for layout in layouts]
    if len(problem.devices) > 1:
        _explore(loose, random)
    bases = _first_of_each(_ranked(loose), _RECUT)
    for base in dict.fromkeys((*alone, *bases)):
        if evaluator.enough:
            return {}
        for update in problem.updates:
            apply_policies(
                evaluator, base._replace(schedule=base.schedule if base.schedule in PLAIN else "1f1b"), update
            )
    devices = {layout.parts[0].devices[0] for layout in alone if len(layout.parts[0].devices) == 1}
    if evaluator.best is None or evaluator.best.over_bytes:
        for device in devices:
            least_memory_layout(evaluator, device, min(problem.micro_batches))
    return _policies(evaluator, devices)


def _policies(evaluator: Evaluator, devices: Iterable[int]) -> dict[str, LayoutEvaluation]:
    """Evaluate the baseline policies on some devices, each with its best micro-batch."""
    found: dict[str, LayoutEvaluation] = {}
    for device in sorted(devices):
        for size in evaluator.problem.micro_batches:
            for name, layout in baseline_layouts(evaluator, device, size):
                if evaluator.enough:
                    return found
                label = f"device {device} alone, {name}"
                evaluation = evaluator.evaluate(layout)
                if label not in found or evaluation.rank < found[label].rank:
                    found[label] = evaluation
    return found


def _synthesise(evaluator: Evaluator, best: LayoutEvaluation) -> LayoutEvaluation:
    """Synthesise schedules for the best layouts; return the best evaluation, the named one if it is as good."""
    found = best
    if best.layout.late and not best.over_bytes:
        return best  # no exact schedule is quicker on its devices
    layouts = _first_of_each(_ranked(evaluator), _SYNTHESISED)
    if evaluator.case(best.layout).actions > _LONG:
        layouts = layouts[:1]
    for layout in layouts:
        case = evaluator.case(layout)
        if layout.blocks == 1 or evaluator.expired():
            continue
        schedule = auto_schedule(case.routes, case.work, case.sizes, budget_s=_SYNTHESIS_S, expired=evaluator.expired)
        made = evaluator.evaluate(layout._replace(schedule="auto"), schedule)
        bias = 1.0 if found.over_bytes or found.layout.schedule == "auto" else 1 - NAMED_BIAS
        if (made.over_bytes, made.simulation.step_s) < (found.over_bytes, found.simulation.step_s * bias):
            found = made
    return found
