"""Baseline plans: one device, pure data parallel, even cuts. A searched plan is compared with them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from onebox.cost import DeviceGroups
from onebox.errors import UsageError
from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.layout import LayoutStage, StageLayout, plan_of, single
from onebox.plan.model.plan import Plan
from onebox.plan.model.problem import Problem
from onebox.plan.model.shares import apportion

DATA_PARALLEL = "data parallel"
"""Beginning of the labels of data-parallel plans."""

_LIKE = 0.05
"""Relative difference below which speeds of devices count as equal."""


def even_plan(problem: Problem, devices: Sequence[int], schedule: str, micro_batch: int) -> Plan:
    """Cut the segments into stages that take equally long on a nominal device, one for each device.

    Args:
        problem: Segments, values, devices.
        devices: Numbers of the devices, in the order of the stages; the first one's type is the nominal device.
        schedule: Name of the schedule.
        micro_batch: Samples of a micro-batch.

    Raises:
        UsageError: There are more devices than segments, or no devices.
    """
    return plan_of(problem, even_layout(CostModel(problem), devices, schedule, micro_batch))


def even_layout(costs: CostModel, devices: Sequence[int], schedule: str, micro_batch: int) -> StageLayout:
    """Return :func:`even_plan` as a layout."""
    problem = costs.problem
    order = tuple(range(len(problem.segments)))
    if not 1 <= len(devices) <= len(order):
        raise UsageError(f"{len(devices)} devices for {len(order)} segments: each device needs a segment")
    kind = problem.device[devices[0]].type
    ranges = cut(work_of(costs, order, kind, micro_batch), [1.0] * len(devices))
    parts = (single(order[start:end], device) for (start, end), device in zip(ranges, devices, strict=True))
    return StageLayout(tuple(parts), micro_batch, schedule)


def work_of(costs: CostModel, order: Sequence[int], kind: str, samples: int) -> list[float]:
    """Return each segment's seconds of forward and backward on a type of device."""
    found = (costs.seconds((index,))[kind] for index in order)
    return [sum(fixed + part * samples for fixed, part in seconds[:3]) for seconds in found]


def cut(work: Sequence[float], weights: Sequence[float]) -> list[tuple[int, int]]:
    """Cut a sequence of works into consecutive non-empty parts, each cut as close to the weights as possible.

    Args:
        work: Work of each segment; at least as many as weights.
        weights: Each part's weight, positive.

    Returns:
        Start and end of each part.

    Example:
        >>> cut([1.0] * 6, [2.0, 1.0])
        [(0, 4), (4, 6)]
    """
    total, whole = sum(weights), sum(work)
    sums = [0.0]
    for one in work:
        sums.append(sums[-1] + one)
    ends, due = [0], 0.0
    for turn, weight in enumerate(weights[:-1]):
        due += weight / total * whole
        allowed = range(ends[-1] + 1, len(work) - (len(weights) - turn - 1) + 1)
        ends.append(min(allowed, key=lambda end: (abs(sums[end] - due), end)))
    ends.append(len(work))
    return list(pairwise(ends))


def one_stage(costs: CostModel) -> Iterator[tuple[str, list[StageLayout]]]:
    """Yield the names of one-stage plans, each with its variants: one for each allowed micro-batch.

    Of like devices, only the first has a plan of its own.
    """
    problem = costs.problem
    every = tuple(range(len(problem.segments)))
    numbers = sorted(problem.device)
    kinds: dict[tuple[object, ...], int] = {}
    for number in numbers:
        device = problem.device[number]
        kinds.setdefault((device.type, device.speed, device.capacity_bytes), number)
    for number in kinds.values():
        variants = [StageLayout((single(every, number),), size, "1f1b") for size in problem.micro_batches]
        yield f"device {number} alone", variants
    if len(numbers) > 1:
        yield f"{DATA_PARALLEL}, equal shares", _data_parallel(costs, numbers, [1.0] * len(numbers))
        yield f"{DATA_PARALLEL}, shares by speed", shared_by_speed(costs, numbers)


def nested(costs: CostModel, near: Sequence[DeviceGroups]) -> list[tuple[int, ...]]:
    """Return the quickest devices, as many as the largest powers of two below their number, each half of those before.

    Args:
        costs: Their speeds.
        near: Groups of devices that are near to each other, the smallest first; equally quick devices are kept together
            by group.
    """
    problem = costs.problem
    places = [{device: turn for turn, group in enumerate(level) for device in group} for level in near]
    samples = max(problem.micro_batches)

    def rank(number: int) -> tuple[int, ...]:
        slowness = round(-math.log(costs.power(number, samples)) / _LIKE)
        return slowness, *(place[number] for place in places[::-1]), number

    ranked = sorted(problem.device, key=rank)
    largest = (len(ranked) - 1).bit_length() - 1
    return [tuple(sorted(ranked[: 1 << power])) for power in range(largest, 0, -1)]


def shared_by_speed(costs: CostModel, numbers: Sequence[int]) -> list[StageLayout]:
    """Return one-stage layouts on some devices, with shares by speed; one for each allowed micro-batch."""
    return _data_parallel(costs, numbers, costs.shares(numbers, max(costs.problem.micro_batches)))


def even_cuts(costs: CostModel) -> Iterator[tuple[str, list[StageLayout]]]:
    """Yield the names of plans with even cuts, each with its variants: one for each allowed micro-batch.

    A name says so where there are fewer segments than devices, so that some of these stay idle.
    """
    problem = costs.problem
    every = sorted(problem.device)
    numbers = every[: len(problem.segments)]
    some = f" over {len(numbers)} of {len(every)} devices" if len(numbers) < len(every) else ""
    if len(numbers) > 1:
        for name in ("gpipe", "1f1b"):
            layouts = [even_layout(costs, numbers, name, size) for size in problem.micro_batches]
            yield f"even cuts{some}, {name}", layouts


def _data_parallel(costs: CostModel, numbers: Sequence[int], shares: Sequence[float]) -> list[StageLayout]:
    """Return data-parallel layouts in which each device has samples; without any, those that leave devices idle, which
    the evaluator refuses with a reason."""
    problem = costs.problem
    part = LayoutStage(tuple(range(len(problem.segments))), tuple(numbers), tuple(shares))
    layouts = []
    own = apportion(problem.batch, shares)
    if problem.free_shares and min(own) > 0 and max(own) <= max(problem.micro_batches):
        layouts.append(StageLayout((part,), None, "1f1b"))
    layouts += [
        StageLayout((part,), size, "1f1b")
        for size in problem.micro_batches
        if min(apportion(math.ceil(problem.batch / size), shares)) > 0
    ]
    return layouts or [StageLayout((part,), min(problem.micro_batches), "1f1b")]
