"""Local search over layouts: small changes that are better, until there are none. Pure.

The planner rates changes with the simulator, or cuts alone with a bound; the re-planner adds the cost of a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, pairwise
from random import Random

from onebox.plan.evaluate.evaluator import Evaluator, LayoutEvaluation
from onebox.plan.hill_climbing import climb
from onebox.plan.model.layout import LayoutStage, StageLayout, single
from onebox.plan.model.problem import Problem
from onebox.plan.search.placement import placed
from onebox.plan.search.split_groups import split_over

_STEPS = (1, 2, 4)
"""Numbers of segments by which a cut is moved."""


def descend(
    start: StageLayout,
    changes: Callable[[StageLayout], Iterable[StageLayout]],
    rate: Callable[[StageLayout, float], float],
    spent: Callable[[], bool],
    gain: float = 1e-6,
) -> StageLayout:
    """Follow the first change that lowers a layout's value, repeatedly.

    Args:
        start: The layout to begin with.
        changes: Yields the layouts near another one.
        rate: Returns a layout's value; where that is not below a limit, any value that is not, either.
        spent: Returns whether the effort is used up.
        gain: Relative gain that counts as lower.
    """

    def improved(at: tuple[float, StageLayout]) -> tuple[float, StageLayout] | None:
        limit = at[0] * (1 - gain)
        for layout in changes(at[1]):
            if spent():
                return None
            if (value := rate(layout, limit)) < limit:
                return value, layout
        return None

    return climb((rate(start, float("inf")), start), improved, spent)[1]


def local_search(evaluator: Evaluator, start: LayoutEvaluation) -> LayoutEvaluation:
    """Follow the first improving change repeatedly while effort is left.

    Args:
        evaluator: Evaluates layouts.
        start: The evaluation to begin with.

    Returns:
        The evaluation at the end: a local optimum, or the last one before the effort was used up.
    """

    def improved(at: LayoutEvaluation) -> LayoutEvaluation | None:
        near, best = neighbours(evaluator, at.layout), _best_placement(evaluator, at.layout)
        return evaluator.first_better(near, at) or evaluator.first_better(best, at)

    return climb(start, improved, lambda: evaluator.spent)


def _best_placement(evaluator: Evaluator, layout: StageLayout) -> Iterator[StageLayout]:
    """Yield the layout with the best placement of its devices, if links differ: many swaps at once."""
    if evaluator.uneven and layout.micro_batch is not None:
        yield placed(evaluator, layout)


def descend_cuts(
    evaluator: Evaluator,
    start: StageLayout,
    effort: int,
    *,
    bound: Callable[[StageLayout], float] | None = None,
    fixed: frozenset[int] = frozenset(),
) -> StageLayout:
    """Move cuts as long as that lowers the bound, which takes a small part of a simulation's time.

    Other changes are left to the simulator: the bound does not reflect their effect on a schedule.

    Args:
        evaluator: Counts the effort.
        start: The layout to begin with.
        effort: Maximum effort, after the bound of the first layout.
        bound: Returns the bound; ``None`` for the evaluator's.
        fixed: Cuts that stay, by the stage before them.
    """
    bound = bound or evaluator.bound
    bound(start)
    limit = evaluator.left - effort
    return descend(
        start,
        lambda layout: moved_cuts(layout, fixed),
        lambda layout, _: bound(layout),
        lambda: evaluator.spent or evaluator.left <= limit,
    )


def perturb(evaluator: Evaluator, layout: StageLayout, random: Random, changes: int = 3) -> StageLayout:
    """Return a layout some random changes away from another one."""
    for _ in range(changes):
        near = list(neighbours(evaluator, layout))
        if near:
            layout = random.choice(near)
    return layout


def neighbours(evaluator: Evaluator, layout: StageLayout) -> Iterator[StageLayout]:
    """Yield the allowed layouts one change away, the most promising first."""
    problem = evaluator.problem
    unused = _unused(problem, layout)
    changes: list[Iterator[StageLayout]] = []
    if layout.micro_batch is not None:
        changes = [
            moved_cuts(layout),
            _swapped(layout),
            _replaced(layout, unused),
            _other_sizes(problem, layout),
            _other_schedules(problem, layout),
            _merged(layout),
            _split(layout, unused),
            _shared(layout),
        ]
        if problem.splits:
            changes.insert(0, _regrouped(evaluator, layout))
    if problem.replicable:
        changes.append(_replicated(evaluator, layout, unused))
    for kind in changes:
        yield from (change for change in kind if evaluator.allows(change))


def _unused(problem: Problem, layout: StageLayout) -> list[int]:
    """Return devices without a part, one of each kind."""
    used = {device for part in layout.parts for device in part.devices}
    kinds: dict[tuple[object, ...], int] = {}
    for device in problem.devices:
        if device.number not in used:
            kinds.setdefault((device.type, device.speed, device.host, device.capacity_bytes), device.number)
    return list(kinds.values())


def moved_cuts(layout: StageLayout, fixed: frozenset[int] = frozenset()) -> Iterator[StageLayout]:
    """Yield layouts in which segments move from an end of a stage to the adjacent stage.

    Args:
        layout: The layout.
        fixed: Cuts that stay, by the stage before them.
    """
    for index, (one, other) in enumerate(pairwise(layout.parts)):
        both = one.segments + other.segments
        for step in _STEPS if index not in fixed else ():
            for cut in (len(one.segments) - step, len(one.segments) + step):
                if 0 < cut < len(both):
                    halves = one._replace(segments=both[:cut]), other._replace(segments=both[cut:])
                    yield layout.with_parts(index, *halves)
    # Moving several consecutive cuts together shifts load between stages that are not neighbours.
    sizes = [len(part.segments) for part in layout.parts]
    for a, b in combinations(range(len(sizes)), 2):
        for gains, loses in ((a, b), (b, a)):
            if b > a + 1 and sizes[loses] > 1 and fixed.isdisjoint(range(a, b)):
                moved = list(sizes)
                moved[gains] += 1
                moved[loses] -= 1
                yield layout.with_sizes(moved)


def _swapped(layout: StageLayout) -> Iterator[StageLayout]:
    """Yield layouts in which two stages exchange devices, each keeping its segments or taking the other's number."""
    for a, b in combinations(range(len(layout.parts)), 2):
        one, other = layout.parts[a], layout.parts[b]
        if one.devices == other.devices:
            continue
        parts = list(layout.parts)
        parts[a], parts[b] = _at(one, other), _at(other, one)
        swapped = layout._replace(parts=tuple(parts))
        yield swapped
        sizes = [len(part.segments) for part in parts]
        if sizes[a] != sizes[b]:
            sizes[a], sizes[b] = sizes[b], sizes[a]
            yield swapped.with_sizes(sizes)


def _at(part: LayoutStage, place: LayoutStage) -> LayoutStage:
    """Return a stage on the devices of another one."""
    return part._replace(devices=place.devices, shares=place.shares, ranks=place.ranks)


def _replaced(layout: StageLayout, unused: list[int]) -> Iterator[StageLayout]:
    """Yield layouts in which a device gives all of its stages to an unused one."""
    for old in dict.fromkeys(device for part in layout.parts for device in part.devices):
        for new in unused:
            yield layout.with_devices({old: new})


def _other_sizes(problem: Problem, layout: StageLayout) -> Iterator[StageLayout]:
    """Yield layouts with micro-batches of other sizes, the nearest first."""
    own = layout.micro_batch
    assert own is not None
    sizes = sorted(set(problem.micro_batches) - {own}, key=lambda size: (max(size / own, own / size), size))
    yield from (layout._replace(micro_batch=size) for size in sizes)


def _other_schedules(problem: Problem, layout: StageLayout) -> Iterator[StageLayout]:
    """Yield the layout under other schedules."""
    if len(layout.parts) > 1:
        names = (name for name in problem.schedules if name not in ("auto", layout.schedule))
        yield from (layout._replace(schedule=name) for name in names)


def _merged(layout: StageLayout) -> Iterator[StageLayout]:
    """Yield layouts in which two neighbouring stages become one, on the devices of either."""
    for index, (one, other) in enumerate(pairwise(layout.parts)):
        both = LayoutStage(one.segments + other.segments, (), ())
        for merged in dict.fromkeys((_at(both, one), _at(both, other))):
            yield layout.with_parts(index, merged, until=index + 2)


def _split(layout: StageLayout, unused: list[int]) -> Iterator[StageLayout]:
    """Yield layouts in which a stage is cut in two, one of them on an unused device."""
    for index, part in enumerate(layout.parts):
        middle = len(part.segments) // 2
        if not middle:
            continue
        one, other = part._replace(segments=part.segments[:middle]), part._replace(segments=part.segments[middle:])
        for device in unused:
            for pair in ((single(one.segments, device), other), (one, single(other.segments, device))):
                yield layout.with_parts(index, *pair, until=index + 1)


def _shared(layout: StageLayout) -> Iterator[StageLayout]:
    """Yield layouts in which half of a stage's segments become a stage of a device that has one nearby or at an end."""
    parts = layout.parts
    for index, part in enumerate(parts):
        middle = len(part.segments) // 2
        near = {0, len(parts) - 1, max(index - 1, 0), min(index + 1, len(parts) - 1)} - {index}
        if not middle:
            continue
        one, other = part._replace(segments=part.segments[:middle]), part._replace(segments=part.segments[middle:])
        for place in sorted(near):
            yield layout.with_parts(index, _at(one, parts[place]), other, until=index + 1)
            yield layout.with_parts(index, one, _at(other, parts[place]), until=index + 1)


def _regrouped(evaluator: Evaluator, layout: StageLayout) -> Iterator[StageLayout]:
    """Yield layouts in which alike replicas of a host split their layers, or no longer do, or over more or fewer
    devices; and those in which two neighbouring stages become one that their devices split."""
    every = sorted(evaluator.problem.splits)
    for index, part in enumerate(layout.parts):
        for ranks in (1, *every):
            if ranks != part.ranks and (found := split_over(evaluator, part, ranks)):
                yield layout.with_parts(index, found)
    for index, (one, other) in enumerate(pairwise(layout.parts)):
        both = LayoutStage(one.segments + other.segments, tuple(dict.fromkeys(one.devices + other.devices)), ())
        for ranks in every:
            if found := split_over(evaluator, both, ranks):
                yield layout.with_parts(index, found, until=index + 2)
    for index, part in enumerate(layout.parts):
        if part.ranks > 1:
            yield layout.with_parts(index, *_side_by_side(part), until=index + 1)


def _side_by_side(part: LayoutStage) -> tuple[LayoutStage, ...]:
    """Return the stages, about equally long, of each of the devices that split a stage."""
    count = min(len(part.devices), len(part.segments))
    ends = [len(part.segments) * turn // count for turn in range(count + 1)]
    return tuple(
        single(part.segments[a:b], device) for (a, b), device in zip(pairwise(ends), part.devices, strict=False)
    )


def _replicated(evaluator: Evaluator, layout: StageLayout, unused: list[int]) -> Iterator[StageLayout]:
    """Yield layouts in which a stage has one replica more or less."""
    for index, part in enumerate(layout.parts):
        if part.ranks > 1:
            continue
        for device in unused:
            yield layout.with_parts(index, _part_on(evaluator, layout, part.segments, (*part.devices, device)))
        if len(part.devices) > 1:
            for gone in part.devices:
                rest = tuple(device for device in part.devices if device != gone)
                yield layout.with_parts(index, _part_on(evaluator, layout, part.segments, rest))


def _part_on(
    evaluator: Evaluator, layout: StageLayout, segments: tuple[int, ...], devices: tuple[int, ...]
) -> LayoutStage:
    """Return a stage on some devices, with shares in proportion to their speeds."""
    samples = layout.micro_batch or max(evaluator.problem.micro_batches)
    return LayoutStage(segments, devices, evaluator.costs.shares(devices, samples))
