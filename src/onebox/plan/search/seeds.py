"""Initial layouts: all of them for small problems, otherwise those that dynamic programming proposes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from math import comb, inf, perm, prod

from onebox.cost import DeviceGroups
from onebox.plan.evaluate.evaluator import Evaluator
from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.device_groups import kind, numbered_matters
from onebox.plan.model.layout import LayoutStage, StageLayout, single
from onebox.plan.model.problem import Problem
from onebox.plan.model.shares import ALIKE
from onebox.plan.search.baselines import cut, work_of
from onebox.plan.search.device_rows import DeviceOrder, RowLimits
from onebox.plan.search.partition import ChainProgram, PartitionLimits, alike
from onebox.plan.search.placement import placed
from onebox.plan_names import ASYNC, NAMED, SCHEDULE_TRAITS

PLAIN = (ASYNC, "1f1b", "zb-h1", "gpipe")
"""Schedules for one stage a device, the likeliest to be quickest first."""

_ALL = 2500
"""Number of cuts and assignments up to which all are enumerated."""

_MANY = 16
"""Number of micro-batches for each stage above which 1F1B's bubble, about a sixteenth, is small enough."""

_MANY_GROUPED = 32
"""The same for stages on groups of devices, for each device: fewer stages take less to simulate."""

_SMALL = 2
"""Number of sizes of micro-batches, the smallest ones, with which every order of the devices is tried."""

_ROUND_EFFORT = 30
"""Cost of extending the layouts on a row by a device, in simulated actions."""

_PROGRAMMED = 2
"""Divisor of the effort, for the part of it that dynamic programming over classes of devices may take."""

_EXTENSION_EFFORT = 3
"""Cost of one more stage of a state of dynamic programming, in simulated actions."""

_EXTENSIONS = 400_000
"""Maximum number of such stages; more devices are left to the program for rows, which is quicker and as good there."""

_LAYINGS = 8
"""Number of times that dynamic programming over classes of devices lays all stages, at least, to find the best T."""

System = tuple[list[list[tuple[int, ...]]], tuple[int, ...]]
"""Units that may be placed: their classes, and the numbers of a class that may hold a stage together."""


def orders(problem: Problem) -> list[tuple[int, ...]]:
    """Return distinct orders of the segments in which values go from earlier to later ones.

    The first is the problem's own. The second goes through one parallel branch after the other: cut between branches,
    they come to lie on different devices and run at the same time. The third goes through all of them side by side.
    """
    count = len(problem.segments)
    after: list[set[int]] = [set() for _ in range(count)]
    for value in problem.values:
        after[value.source].update(value.consumers)
    found = [tuple(range(count)), _walk(after, deep=True), _walk(after, deep=False)]
    return list(dict.fromkeys(found))


def _walk(after: Sequence[set[int]], *, deep: bool) -> tuple[int, ...]:
    missing = [0] * len(after)
    for targets in after:
        for target in targets:
            missing[target] += 1
    ready = [index for index, count in enumerate(missing) if not count]
    order = []
    while ready:
        index = ready.pop(0)
        order.append(index)
        fresh = []
        for target in sorted(after[index]):
            missing[target] -= 1
            if not missing[target]:
                fresh.append(target)
        ready = [*fresh, *ready] if deep else [*ready, *fresh]
    return tuple(order)


def sequences(problem: Problem, numbers: Sequence[int], stages: int) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield the devices of some stages, and their schedule: ``plain``, or one with several stages a device."""
    if stages <= len(numbers) and any(name in problem.schedules for name in PLAIN):
        for chosen in permutations(numbers, stages):
            yield chosen, "plain"
    for name, chunks in _chunked_schedules(problem):
        across, rest = divmod(stages, chunks)
        if not rest and 1 < across <= len(numbers):
            for chosen in permutations(numbers, across):
                yield _repeated(chosen, name, chunks), name


def _chunked_schedules(problem: Problem) -> list[tuple[str, int]]:
    """Return the allowed schedules with several stages a device, with each number of these."""
    return [(name, chunks) for name in NAMED if name in problem.schedules for chunks in SCHEDULE_TRAITS[name].chunks]


def _repeated(devices: tuple[int, ...], name: str, chunks: int) -> tuple[int, ...]:
    """Return the device of each stage, where each device has several."""
    return (*devices, *devices[::-1]) if SCHEDULE_TRAITS[name].mirrored else devices * chunks


def few(problem: Problem) -> bool:
    """Return whether the layouts of single devices are few enough to enumerate."""
    segments, devices = len(problem.segments), len(problem.devices)
    total, chunks = 0, [count for own in SCHEDULE_TRAITS.values() for count in own.chunks]
    for stages in range(1, min(segments, 3 * devices) + 1):
        ways = perm(devices, stages) if stages <= devices else 0
        ways += sum(perm(devices, stages // n) for n in chunks if not stages % n and stages // n <= devices)
        total += comb(segments - 1, stages - 1) * ways
    return total <= _ALL


def every_layout(problem: Problem) -> Iterator[StageLayout]:
    """Yield all layouts of single devices under the named schedules, for small problems."""
    numbers = sorted(problem.device)
    most = min(len(problem.segments), problem.max_stages or len(problem.segments))
    for order in orders(problem):
        for stages in range(1, most + 1):
            for chosen, pattern in sequences(problem, numbers, stages):
                names = [name for name in PLAIN if name in problem.schedules] if pattern == "plain" else [pattern]
                for cuts in combinations(range(1, len(order)), stages - 1):
                    ranges = zip((0, *cuts), (*cuts, len(order)), chosen, strict=True)
                    parts = tuple(single(order[start:end], device) for start, end, device in ranges)
                    for size in problem.micro_batches:
                        yield from (StageLayout(parts, size, name) for name in names)


def grouped(evaluator: Evaluator) -> Iterator[StageLayout]:
    """Yield the layouts of stages on groups of consecutive devices, for some orders of the devices.

    Each order is tried with small micro-batches, with which most fits, and then the best one with all sizes, and with
    larger groups.
    """
    problem, order = evaluator.problem, tuple(range(len(evaluator.problem.segments)))
    rows = list(dict.fromkeys(device_rows(evaluator)))
    sizes = sorted(set(problem.micro_batches))
    sizes = [size for size in sizes if problem.batch <= size * _MANY_GROUPED * len(rows[0])] or sizes[-1:]
    best: tuple[float, int, tuple[int, ...]] | None = None
    for size in sizes[:_SMALL]:
        for row in rows:
            found = _on_row(evaluator, order, row, size)
            yield from found
            if found:
                least = min(map(evaluator.estimate, found))
                best = min(best or (least, size, row), (least, size, row))
    if best is None:
        return
    least, begun, row = best
    for size in sizes[_SMALL:]:
        found = _on_row(evaluator, order, row, size)
        yield from found
        if not found or min(map(evaluator.estimate, found)) >= least:
            break
        least, begun = min(map(evaluator.estimate, found)), size
    yield from _on_row(evaluator, order, row, begun, larger=True)


def device_rows(evaluator: Evaluator) -> Iterator[tuple[int, ...]]:
    """Yield orders of the devices from the first stage to the last.

    They are ordered by place; by memory for their speed, as early stages hold most micro-batches; by memory, slow ones
    first; and by memory, the least first.
    """
    problem, samples = evaluator.problem, max(evaluator.problem.micro_batches)
    places = [{device: turn for turn, group in enumerate(level) for device in group} for level in evaluator.near]
    near = {number: (*(place[number] for place in places[::-1]), number) for number in problem.device}
    power = {number: evaluator.costs.power(number, samples) for number in problem.device}
    room = {number: float(problem.capacity_bytes.get(number, inf)) for number in problem.device}
    among = sorted(near, key=lambda number: (-power[number], near[number]))[: problem.max_devices]
    yield tuple(sorted(among, key=lambda number: near[number]))
    yield tuple(sorted(among, key=lambda number: (-room[number] / power[number], power[number], near[number])))
    yield tuple(sorted(among, key=lambda number: (-room[number], power[number], near[number])))
    yield tuple(sorted(among, key=lambda number: (room[number], power[number], near[number])))


def _on_row(
    evaluator: Evaluator, order: tuple[int, ...], row: tuple[int, ...], samples: int, *, larger: bool = False
) -> list[StageLayout]:
    """Return the layouts of a row of devices, with groups of one device or more, or of two, four and so on or more.

    There are some whose stages are on devices of one speed each, and others.
    """
    problem = evaluator.problem
    late = ASYNC in problem.schedules
    limits = RowLimits(
        samples=samples,
        count=-(-problem.batch // samples),
        widest=len(row) if problem.replicable else 1,
        versions=problem.versions if late else 1,
    )
    found = list[tuple[LayoutStage, ...]]()
    for spread in (ALIKE, inf) if limits.widest > 1 else (inf,):
        program = DeviceOrder(evaluator.costs, order, row, replace(limits, spread=spread))
        narrowest = 2 if larger else 1
        while narrowest <= (limits.widest // 2 if larger else 1):
            parts = program.partition(narrowest)
            if not parts:
                break
            found.append(parts)
            narrowest *= 2
        evaluator.left -= _ROUND_EFFORT * program.rounds
    names = [name for name in PLAIN if name in problem.schedules]
    return [StageLayout(parts, samples, name) for parts in dict.fromkeys(found) for name in names]


def proposed(evaluator: Evaluator) -> Iterator[StageLayout]:
    """Yield the layouts that dynamic programming proposes, and variants of them.

    The first program is for a middle size of micro-batches, or the next smaller one that fits in the memory of 1F1B;
    the two sizes with the best bounds are chosen from its proposals for the other programs. If nothing fits, one
    micro-batch in flight is assumed, with which synthesised schedules can do.
    """
    problem = evaluator.problem
    devices = min(len(problem.devices), problem.max_devices or len(problem.devices))
    most = min(len(problem.segments), devices, problem.max_stages or devices)
    sizes = sorted(set(problem.micro_batches))
    # With more micro-batches the bubble hardly shrinks, while calls and planning time grow.
    sizes = [size for size in sizes if problem.batch <= size * _MANY * most] or sizes[-1:]
    useful = [size for size in sizes if 2 * problem.batch >= size * most] or sizes[:1]
    middle = useful[len(useful) // 2]
    choices = systems(problem, evaluator.near)
    limit = evaluator.left - evaluator.effort // _PROGRAMMED
    for order in orders(problem):
        first: list[StageLayout] = []
        for size in [one for one in sizes[::-1] if one <= middle]:
            first = _programmed(evaluator, order, size, choices[0], most, limit)
            if first:
                break
        if not first:
            first = _programmed(evaluator, order, min(problem.micro_batches), choices[0], most, limit, in_flight=1)
        yield from _derived(evaluator, order, first)
        begun = first[0].micro_batch if first else None
        by_size = {
            size: min((evaluator.bound(one._replace(micro_batch=size)) for one in first), default=0.0)
            for size in sizes
            if begun in (None, middle) or size <= (begun or size)
        }
        for size in sorted(by_size, key=lambda size: (by_size[size], size))[:2]:
            for number, choice in enumerate(choices):
                if size != begun or number:
                    yield from _derived(evaluator, order, _programmed(evaluator, order, size, choice, most, limit))


def systems(problem: Problem, levels: Sequence[DeviceGroups]) -> list[System]:
    """Return the units that dynamic programming may place: classes, and how many of a class may hold a stage together.

    Units are single devices, several of a kind that are near to each other and, whatever their kinds, all of a group
    together: a host, or all hosts of a switch. Where groups have as many devices each, units are also one device of
    each group together: then values of forward and backward stay within a group, and gradients go between groups.

    Args:
        problem: Its devices.
        levels: Groups of devices that are near to each other, the smallest first.
    """
    alone = [(device,) for device in problem.devices]
    single_ones = alike(alone, levels[0])
    found: list[System] = [(single_ones, (1,))]
    if len(kinds := alike(alone)) < len(single_ones):
        found.append((kinds, (1,)))  # fewer classes: the beam holds more different cuts
    if not problem.replicable:
        return found
    if max(map(len, single_ones)) > 1:
        found.append((single_ones, (1, 2, 4, 8)))
    for groups in levels:
        rows = [tuple(problem.device[number] for number in group) for group in groups]
        if len(rows) > 1 and max(map(len, rows)) > 1:
            found.append((alike(rows), (1,)))
        if len(rows) > 1 and len({len(row) for row in rows}) == 1 < len(rows[0]):
            ranked = [sorted(row, key=lambda device: (str(kind(device)), device.number)) for row in rows]
            found.append((alike([*zip(*ranked, strict=True)]), (1,)))
    return found


def _programmed(
    evaluator: Evaluator,
    order: tuple[int, ...],
    samples: int,
    system: System,
    most: int,
    limit: int,
    in_flight: int | None = None,
) -> list[StageLayout]:
    """Return the layouts of dynamic programming, on the devices as numbered and, where links differ, with placement."""
    problem, (units, joined) = evaluator.problem, system
    count = -(-problem.batch // samples)
    late = ASYNC in problem.schedules and in_flight is None
    limits = PartitionLimits(
        units=units,
        samples=samples,
        count=count,
        in_flight=in_flight or count,
        joined=joined,
        stages=most,
        versions=problem.versions if late else 1,
    )
    name = ASYNC if late else "1f1b"
    found = [StageLayout(parts, samples, name) for parts in _partitions(evaluator, order, limits, limit)]
    if not numbered_matters(problem.links, units):
        return found
    unplaced = _partitions(evaluator, order, replace(limits, unplaced=True), limit)
    at = (placed(evaluator, StageLayout(parts, samples, name), quickly=True) for parts in unplaced)
    return list(dict.fromkeys((*found, *at)))


def _partitions(
    evaluator: Evaluator, order: tuple[int, ...], limits: PartitionLimits, limit: int
) -> list[tuple[LayoutStage, ...]]:
    """Return the stages that dynamic programming proposes while more effort is left than a limit, and count it.

    There are none where the program would be given up before it has laid all stages a few times.
    """
    most = min((evaluator.left - limit) // _EXTENSION_EFFORT, _EXTENSIONS)
    states = min(limits.beam, prod(len(units) + 1 for units in limits.units))
    if most <= _LAYINGS * states * len(limits.units) * len(limits.joined) * limits.stages or evaluator.enough:
        return []
    program = ChainProgram(evaluator.costs, order, limits, most)
    found = program.partitions()
    evaluator.left -= _EXTENSION_EFFORT * program.extensions
    return found


def _derived(evaluator: Evaluator, order: tuple[int, ...], layouts: Sequence[StageLayout]) -> Iterator[StageLayout]:
    """Yield variants under all plain schedules, and with several stages a device where each stage has one device."""
    plain = [name for name in PLAIN if name in evaluator.problem.schedules]
    for layout in layouts:
        yield from (layout._replace(schedule=name) for name in plain)
        if all(len(part.devices) == 1 for part in layout.parts):
            assert layout.micro_batch is not None
            yield from chunked(evaluator.costs, order, layout.parts, layout.micro_batch)


def chunked(
    costs: CostModel, order: Sequence[int], parts: Sequence[LayoutStage], samples: int
) -> Iterator[StageLayout]:
    """Yield layouts of several stages a device, from a layout of one stage a device."""
    problem = costs.problem
    devices = tuple(part.devices[0] for part in parts)
    most = min(len(order), problem.max_stages or len(order))
    for name, chunks in _chunked_schedules(problem):
        sequence = _repeated(devices, name, chunks)
        if len(devices) > 1 and len(sequence) <= most:
            yield spread(costs, order, sequence, samples, name)


def spread(costs: CostModel, order: Sequence[int], devices: Sequence[int], samples: int, schedule: str) -> StageLayout:
    """Cut a chain in proportion to the speeds of a sequence of devices.

    Args:
        costs: Costs of the segments.
        order: The chain.
        devices: The device of each stage; one may hold several.
        samples: Samples of a micro-batch.
        schedule: Name of the schedule.
    """
    problem = costs.problem
    first = problem.device[devices[0]]
    nominal = work_of(costs, order, first.type, samples)
    ranges = cut(nominal, [costs.power(device, samples) for device in devices])
    parts = (single(tuple(order[a:b]), device) for (a, b), device in zip(ranges, devices, strict=True))
    return StageLayout(tuple(parts), samples, schedule)
