"""The planner: search for the plan with the quickest step within the memory of every device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random

from onebox.errors import PlanError
from onebox.plan.evaluate.bounds import least_step
from onebox.plan.evaluate.evaluator import Evaluator, LayoutEvaluation
from onebox.plan.evaluate.infeasibility import infeasible_error
from onebox.plan.model.crowding import crowding
from onebox.plan.model.layout import StageLayout
from onebox.plan.model.problem import Problem
from onebox.plan.policies.apply import apply_policies, baseline_layouts, least_memory_layout
from onebox.plan.schedules.synthesis import auto_schedule
from onebox.plan.search.baselines import even_cuts, nested, one_stage, shared_by_speed
from onebox.plan.search.local_search import descend_cuts, local_search, perturb
from onebox.plan.search.placement import placed
from onebox.plan.search.result import NAMED_BIAS, SearchResult, better_of, finished, notable, simplest
from onebox.plan.search.seeds import PLAIN, every_layout, few, grouped, proposed, spread
from onebox.plan.search.split_groups import every_split_layout, split_models, split_variants
from onebox.plan_names import ASYNC

EFFORT = 340_000
"""Simulated actions per second of a search's budget; a core of a laptop simulates as many in 0.6 s."""

_STARTS = 3
"""Number of best different layouts from which local search begins."""

_AT_LEAST = 16
"""Number of proposals that are made, and simulated until two fit, even without effort left; one without time left."""

_ALIKE = 1.02
"""Factor of the bounds within which the trivial plan with the fewest micro-batches is shown, and within which plans
without limits of memory are not looked for."""

_DESCENTS = 6
"""Number of best different proposals that are improved by their bounds."""

_FRUITLESS = 50
"""Number of random restarts without a gain after which the search ends."""

_NEAR = 1.02
"""Factor over the best within which the bound of a restart is followed up with the simulator."""

_SYNTHESIS_S = 0.4
"""Nominal seconds for each synthesised schedule."""

_SCHEDULED = 150
"""Effort of a search for each action of a layout, below which no schedule is synthesised for it."""

_WHOLE, _WITH_GROUPS = 2 / 3, 1 / 2
"""Part of the time of a search for plans of whole layers where layers may be split, too; and the effort of the search
for these, as a part of that for whole layers."""

_NESTED = 1 / 4
"""Part of effort and time for plans that leave devices idle."""

_FEWEST = 4
"""Number of devices below which only dynamic programming leaves some idle."""

_EXPLORED, _WITH_POLICIES = 0.75, 0.9
"""Parts of the time after which a search goes on with activation policies and with schedules."""

_FOR_POLICIES = 1 / 8
"""Effort for activation policies, where memory is limited, as a part of that for all else."""

_LONG = 10_000
"""Number of actions above which schedules are synthesised for one layout only, and not chosen for trivial plans."""

_VERY_LONG = 100_000
"""Number of actions above which a layout is simulated only within the effort that is left."""

_TRIVIAL = 80
"""Effort of a search for each action of the trivial plans that are simulated."""

_HOPELESS = 50
"""Number of infeasible layouts that are simulated where none fits, to report the closest one."""

_RECUT = 6
"""Number of best different layouts without limits of memory to which activation policies are applied."""

_SYNTHESISED = 3
"""Number of best different layouts for which a schedule is synthesised, and of those with the least bounds."""


def search(
    problem: Problem,
    *,
    budget_s: float = 5.0,
    seed: int = 0,
    effort: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Find the plan whose step is predicted to be the quickest of those that fit.

    Small problems are enumerated, with bounds that avoid most simulations. For larger ones, dynamic programming
    proposes layouts: stages on groups of consecutive devices (:mod:`onebox.plan.search.device_rows`), one of which is
    simulated at once, and, as far as half of the effort goes, cuts and classes of devices
    (:mod:`onebox.plan.search.partition`); the likeliest by bound are simulated; local search with the simulator as its
    objective changes cuts, devices, replicas, micro-batches and schedules; the remaining effort goes into random
    restarts nearby. Fewer devices are searched where their bound allows a better plan. Finally, schedules are
    synthesised for the best layouts, and for those with the least bounds under one, if ``auto`` is allowed.

    Where the problem has the costs of split layers, a second search, with half of the effort, has groups of devices
    that split a stage in all of these; its plan is taken if it gains enough.

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
    deadline = Deadline(clock, clock() + budget_s)
    effort = round(EFFORT * budget_s) if effort is None else effort
    if not problem.splits:
        return _search(problem, deadline, seed, effort)
    whole: SearchResult | None = None
    try:
        whole = _search(replace(problem, splits={}), deadline.part(_WHOLE), seed, effort)
    except PlanError as error:
        refused = error
    try:
        # Stages whose layers are split keep their activations.
        kept, less = replace(problem, policies=("keep",)), round(effort * _WITH_GROUPS)
        split = _search(kept, deadline, seed, less, required=whole is None)
    except PlanError as error:
        if whole is None:
            raise min(refused, error, key=lambda one: one.missing_bytes or 0) from None
        return whole
    return split if whole is None else better_of(whole, split)


def _search(problem: Problem, whole: Deadline, seed: int, effort: int, *, required: bool = True) -> SearchResult:
    """Search as :func:`search` does, with or without groups of devices that split layers.

    Args:
        problem: The problem.
        whole: Ends the search.
        seed: Seed of the random restarts.
        effort: Actions to simulate.
        required: Whether to go on past the time limit until a plan fits.
    """
    evaluator = Evaluator(problem, effort=effort, expired=whole, required=required)
    trivial = _look(evaluator, whole.part(_EXPLORED), seed)
    complete = not evaluator.spent
    evaluator.left = max(evaluator.left, 0) + round(effort * _FOR_POLICIES)
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


def _look(
    evaluator: Evaluator, deadline: Deadline, seed: int, *, outermost: bool = True, than_s: float = inf
) -> dict[str, LayoutEvaluation]:
    """Search for the best plan without activation policies and synthesised schedules; return the trivial plans.

    The search is repeated for the quicker half of the devices, and for half of these, and so on, until nothing fits or
    no plan on them can be better than one that is known: the best result of each is a candidate, so that more devices
    do not give a worse plan, as far as either search goes.

    Args:
        evaluator: Evaluates layouts.
        deadline: Ends the search.
        seed: Seed of the random restarts.
        outermost: Whether this is the search on all devices.
        than_s: Seconds of a step that is known on more devices.
    """
    problem = evaluator.problem
    evaluator.expired = deadline
    plain = (*one_stage(evaluator.costs), *(even_cuts(evaluator.costs) if outermost else ()))
    if problem.splits:
        plain = (*plain, *split_models(evaluator))
    trivial = {label: _best(evaluator, layouts) for label, layouts in plain}
    if ASYNC in problem.schedules:
        for _, layouts in one_stage(evaluator.costs):
            _best(evaluator, [layout._replace(schedule=ASYNC) for layout in layouts])
    for numbers in nested(evaluator.costs, evaluator.near) if problem.replicable else ():
        _best(evaluator, shared_by_speed(evaluator.costs, numbers))
    groups = _groups(evaluator)
    if problem.splits:
        groups |= _bounds(evaluator, split_variants(evaluator, list(groups)))
    _simulate_likeliest(evaluator, groups)
    fewer = _fewer(evaluator, than_s)
    share = int(evaluator.left * _NESTED) if fewer else 0
    reserve = share + int((evaluator.left - share) * _NESTED) if fewer else 0
    evaluator.left -= reserve
    evaluator.expired = deadline.part(1 - _NESTED) if fewer else deadline
    if few(problem):
        _simulate(evaluator, _bounds(evaluator, every_layout(problem)), evaluator.left // 2)
        if problem.splits:
            names = [name for name in PLAIN if name in problem.schedules]
            split = every_split_layout(evaluator, tuple(range(len(problem.segments))), names)
            _simulate(evaluator, _bounds(evaluator, split), evaluator.left // 2)
    _explore(evaluator, Random(seed), groups)
    evaluator.left += reserve
    evaluator.expired = deadline
    known_s = min(than_s, _best_s(evaluator))
    if fewer and not evaluator.enough and (outermost or _best_s(evaluator) < inf) and least_step(fewer) < known_s:
        _look_at_fewer(evaluator, fewer, share, deadline, seed, known_s)
    return trivial


def _look_at_fewer(
    evaluator: Evaluator, fewer: Problem, effort: int, deadline: Deadline, seed: int, than_s: float
) -> None:
    """Search for the best plan on some of the devices, and go on from it on all if it is better."""
    less = Evaluator(fewer, effort=effort, expired=deadline, required=False)
    _look(less, deadline, seed, outermost=False, than_s=than_s)
    evaluator.left -= less.effort - less.left
    evaluator.simulated += less.simulated
    before = evaluator.best
    candidates = [evaluator.evaluate(layout) for layout in _ranked(less)[:_STARTS]]
    if evaluator.best is not before and candidates:
        local_search(evaluator, min(candidates, key=lambda evaluation: evaluation.rank))


def _fewer(evaluator: Evaluator, than_s: float) -> Problem | None:
    """Return the problem for the quicker half of the devices, or a little more.

    There is none if the devices are few, if these cannot hold the model, or if no plan on them can be better than the
    best one or one of some seconds.
    """
    problem = evaluator.problem
    if len(problem.devices) < _FEWEST or few(problem):
        return None
    numbers = nested(evaluator.costs, evaluator.near)[0]
    if not evaluator.costs.may_hold(numbers):
        return None
    fewer = problem_among(problem, numbers)
    return fewer if least_step(fewer) < min(than_s, _best_s(evaluator)) else None


def problem_among(problem: Problem, numbers: Sequence[int]) -> Problem:
    """Return the problem for some devices, which are as quick in it as beside the others while these are idle.

    Args:
        problem: The problem, whose times were measured while all of its devices were at work.
        numbers: The devices.
    """
    devices = tuple(problem.device[number] for number in numbers)
    part = replace(problem, devices=devices)
    running = dict.fromkeys(numbers, 1.0)
    own, beside = crowding(part, running), crowding(problem, running)
    quicker = {number: own[number] / beside[number] for number in numbers}
    return replace(
        part,
        devices=tuple(replace(device, speed=device.speed * quicker[device.number]) for device in devices),
    )


def _best(evaluator: Evaluator, layouts: Sequence[StageLayout]) -> LayoutEvaluation:
    """Evaluate the variant with the least bound or, if that does not fit, the one of the smallest micro-batches."""
    # A very long schedule gains little over a long one, and would take the time of the search.
    longest = max(min(_LONG, evaluator.effort // _TRIVIAL), min(map(evaluator.actions, layouts)))
    layouts = [layout for layout in layouts if evaluator.actions(layout) <= longest]
    least = min(evaluator.bound(layout) for layout in layouts)
    near = [layout for layout in layouts if evaluator.bound(layout) <= least * _ALIKE]
    chosen = evaluator.evaluate(min(near, key=evaluator.actions))
    if not chosen.over_bytes:
        return chosen
    smallest = min(layouts, key=lambda layout: max(part.size for part in evaluator.case(layout).micro_batches))
    return min(chosen, evaluator.evaluate(smallest), key=lambda evaluation: evaluation.rank)


def _groups(evaluator: Evaluator) -> dict[StageLayout, float]:
    """Return the layouts of groups of devices with their bounds, which take little and are near the best."""
    bounds: dict[StageLayout, float] = {}
    for layout in grouped(evaluator):
        if evaluator.allows(layout) and evaluator.affords(layout):
            bounds[layout] = evaluator.bound(layout)
        if evaluator.enough:
            break
    return bounds


def _simulate_likeliest(evaluator: Evaluator, layouts: Iterable[StageLayout]) -> None:
    """Simulate one of the likeliest layouts, that with the fewest actions."""
    layouts = [layout for layout in layouts if evaluator.bound(layout) < inf]
    limit = min(map(evaluator.estimate, layouts), default=inf) * (1 + NAMED_BIAS)
    near = [layout for layout in layouts if evaluator.estimate(layout) <= limit]
    if near:
        evaluator.evaluate(min(near, key=evaluator.actions))


def _explore(evaluator: Evaluator, random: Random, groups: Mapping[StageLayout, float]) -> None:
    """Evaluate the proposals of dynamic programming, improve the best, and go on from random changes of the best.

    Args:
        evaluator: Evaluates layouts.
        random: Draws the changes.
        groups: The layouts of groups of devices, with their bounds.
    """
    bounds = {**groups, **_bounds(evaluator, () if evaluator.spent and groups else proposed(evaluator))}
    share = evaluator.left // 4
    starts = _first_of_each(sorted(bounds, key=evaluator.estimate), _DESCENTS)
    improved = [descend_cuts(evaluator, layout, share // _DESCENTS) for layout in starts]
    bounds |= _bounds(evaluator, [*improved, *(placed(evaluator, layout) for layout in improved)])
    for layout in _for_synthesis(evaluator, bounds)[:1]:
        evaluator.evaluate(layout)
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
    """Simulate the layouts that can be better than the best one, the likeliest first, until the effort is used up."""
    limit, hopeless, fitting = evaluator.left - effort, 0, 0
    for turn, layout in enumerate(sorted(bounds, key=evaluator.estimate)):
        if bounds[layout] >= _best_s(evaluator) < inf or _too_long(evaluator, layout):
            continue
        hopeless += bounds[layout] == inf
        enough = fitting >= 2 or turn >= _AT_LEAST or evaluator.enough
        if enough and (evaluator.spent or evaluator.left < limit or hopeless > _HOPELESS):
            return
        fitting += not evaluator.evaluate(layout).over_bytes


def _too_long(evaluator: Evaluator, layout: StageLayout) -> bool:
    """Return whether a layout has many actions, and would take more than the effort that is left."""
    return evaluator.actions(layout) > _VERY_LONG and not evaluator.affords(layout)


def _ranked(evaluator: Evaluator) -> list[StageLayout]:
    """Return the layouts that were simulated and are allowed, the best first."""
    found = (evaluation for evaluation in evaluator.evaluations.values() if evaluator.allows(evaluation.layout))
    return [evaluation.layout for evaluation in sorted(found, key=lambda evaluation: evaluation.rank)]


def _first_of_each(layouts: Iterable[StageLayout], count: int) -> list[StageLayout]:
    """Return the first layouts that differ in devices or in the size of micro-batches."""
    found: dict[tuple[object, ...], StageLayout] = {}
    for layout in layouts:
        found.setdefault((*((part.devices, part.ranks) for part in layout.parts), layout.micro_batch), layout)
        if len(found) == count:
            break
    return list(found.values())


def _with_policies(evaluator: Evaluator, random: Random) -> dict[str, LayoutEvaluation]:
    """Apply activation policies to layouts that do not fit; return the baseline policies' evaluations.

    Layouts that would be quick with unlimited memory are found by a search for devices without limits. Further ones
    have a stage on each device, which then holds least. Those that already fit, and are as quick, are skipped.
    """
    problem = evaluator.problem
    if not _has_policies(problem) or evaluator.enough:
        return {}
    if not any(evaluation.over_bytes for evaluation in evaluator.evaluations.values()) and evaluator.best is not None:
        return {}
    roomy = tuple(replace(device, capacity_bytes=None) for device in problem.devices)
    endless = replace(problem, devices=roomy, splits={})  # stages whose layers are split keep their activations
    loose = Evaluator(endless, effort=evaluator.left // 2, expired=evaluator.expired, required=False)
    alone = [layout for _, layouts in one_stage(loose.costs) for layout in layouts]
    alone = [layout for layout in alone if evaluator.costs.may_hold(layout.parts[0].devices)]
    if len(problem.devices) > 1:
        groups = _groups(loose)
        if min(groups.values(), default=0.0) * _ALIKE < _best_s(evaluator):  # what policies take is worth it
            _explore(loose, random, groups)
    evaluator.left -= loose.effort - loose.left
    ranked = _first_of_each(_ranked(loose), _RECUT)
    for base in dict.fromkeys((*alone, *ranked, *_one_stage_each(loose))):
        if evaluator.enough:
            return {}
        if not _done(evaluator) and loose.bound(base) < _best_s(evaluator):  # policies do not make it quicker
            for update in problem.updates:
                apply_policies(
                    evaluator, base._replace(schedule=base.schedule if base.schedule in PLAIN else "1f1b"), update
                )
    devices = {layout.parts[0].devices[0] for layout in alone if len(layout.parts[0].devices) == 1}
    if evaluator.best is None or evaluator.best.over_bytes:
        for device in devices:
            least_memory_layout(evaluator, device, min(problem.micro_batches))
    return _policies(evaluator, devices)


def _one_stage_each(evaluator: Evaluator) -> list[StageLayout]:
    """Return the layouts of one stage on each device, cut by speed, for each size of micro-batches."""
    problem, order = evaluator.problem, tuple(range(len(evaluator.problem.segments)))
    devices = sorted(problem.device)[: problem.max_devices]
    names = [name for name in ("1f1b", *PLAIN) if name in problem.schedules]
    if not names or not 1 < len(devices) <= min(len(order), problem.max_stages or len(order)):
        return []
    layouts = (spread(evaluator.costs, order, devices, size, names[0]) for size in problem.micro_batches)
    return [layout for layout in layouts if evaluator.actions(layout) <= _LONG]


def _has_policies(problem: Problem) -> bool:
    """Return whether time may be traded for memory, and memory is limited."""
    return bool(problem.capacity_bytes) and (problem.policies != ("keep",) or problem.updates != ("device",))


def _best_s(evaluator: Evaluator) -> float:
    """Return the seconds of the best step that fits; infinite without one."""
    best = evaluator.best
    return inf if best is None or best.over_bytes else best.simulation.step_s


def _done(evaluator: Evaluator) -> bool:
    """Return whether effort is used up, and a plan fits."""
    return evaluator.spent and _best_s(evaluator) < inf


def _policies(evaluator: Evaluator, devices: Iterable[int]) -> dict[str, LayoutEvaluation]:
    """Evaluate the baseline policies on some devices, each with its best micro-batch.

    Of long schedules, only the one of the largest micro-batches is simulated.
    """
    found: dict[str, LayoutEvaluation] = {}
    sizes = sorted(evaluator.problem.micro_batches, reverse=True)
    for device in sorted(devices):
        for size in sizes:
            for name, layout in baseline_layouts(evaluator, device, size):
                if evaluator.enough or _done(evaluator):
                    return found
                if size != sizes[0] and evaluator.actions(layout) > _LONG:
                    continue
                label = f"device {device} alone, {name}"
                evaluation = evaluator.evaluate(layout)
                if label not in found or evaluation.rank < found[label].rank:
                    found[label] = evaluation
    return found


def _synthesise(evaluator: Evaluator, best: LayoutEvaluation) -> LayoutEvaluation:
    """Synthesise schedules for the best layouts, and for those that they may serve most.

    Returns:
        The best evaluation, that of a named schedule if it is as good.
    """
    found = best
    if best.layout.late and not best.over_bytes:
        return best  # no exact schedule is quicker on its devices
    ranked = _ranked(evaluator)
    layouts = _first_of_each(ranked, _SYNTHESISED)
    if evaluator.case(best.layout).actions > _LONG:
        layouts = layouts[:1]
    for layout in dict.fromkeys((*layouts, *_for_synthesis(evaluator, ranked))):
        if evaluator.expired() or not _may_be_synthesised(evaluator, layout):
            continue
        bias = 1.0 if found.over_bytes or found.layout.schedule == "auto" else 1 - NAMED_BIAS
        if not found.over_bytes and evaluator.bound(layout._replace(schedule="auto")) >= found.simulation.step_s * bias:
            continue
        case = evaluator.case(layout)
        schedule = auto_schedule(case.routes, case.work, case.sizes, budget_s=_SYNTHESIS_S, expired=evaluator.expired)
        made = evaluator.evaluate(layout._replace(schedule="auto"), schedule)
        if (made.over_bytes, made.simulation.step_s) < (found.over_bytes, found.simulation.step_s * bias):
            found = made
    return found


def _may_be_synthesised(evaluator: Evaluator, layout: StageLayout) -> bool:
    """Return whether a schedule can be synthesised for a layout, and is worth the effort."""
    return layout.blocks > 1 and not layout.late and _SCHEDULED * evaluator.actions(layout) <= evaluator.effort


def _for_synthesis(evaluator: Evaluator, layouts: Iterable[StageLayout]) -> list[StageLayout]:
    """Return the different layouts with the least bounds under synthesised schedules; none where these are not allowed.

    Named schedules may be far from these bounds: they neither suit devices of different speeds nor slow links.
    """
    if "auto" not in evaluator.problem.schedules:
        return []
    able = [
        layout for layout in layouts if evaluator.actions(layout) <= _LONG and _may_be_synthesised(evaluator, layout)
    ]
    able.sort(key=lambda layout: evaluator.bound(layout._replace(schedule="auto")))
    return _first_of_each(able, _SYNTHESISED)
