"""Planning problems for tests: random ones, and an exhaustive search that knows nothing of the planner's own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from random import Random

from onebox.plan import ASYNC, Plan, Stage, predict
from onebox.plan.model.problem import (
    ComputeTime,
    DeviceSpec,
    Problem,
    RankMessages,
    Segment,
    SegmentValue,
    SplitSegment,
)
from onebox.plan.model.work import Links
from onebox.plan.search.result import SPLIT_WORTH

KINDS = {"quick": 1.0, "half": 0.5, "slow": 0.25}
"""Types of devices by their speed."""


def segment(name: str, seconds: float, *, fixed: float = 0.0, state: int = 0, saved: int = 0, late: int = 0) -> Segment:
    """Return a segment whose forward takes some seconds a sample on a quick device, and either gradient as long."""
    times = {kind: ComputeTime(fixed_s=fixed / speed, sample_s=seconds / speed) for kind, speed in KINDS.items()}
    return Segment(
        name=name,
        forward_s=times,
        input_s=times,
        weight_s=times,
        update_s={kind: state * 1e-12 / speed for kind, speed in KINDS.items()},
        parameter_bytes=state // 4,
        state_bytes=state,
        saved_bytes=saved,
        late_bytes=late,
        forward_work_bytes=saved // 2,
        backward_work_bytes=saved // 2,
    )


def links(count: int, *, latency_s: float = 0.0, bandwidth_bps: float = 1e12) -> Links:
    """Return equal links between devices 0, 1, ..."""
    row = dict.fromkeys(range(count), latency_s)
    return Links(
        latency_s=dict.fromkeys(range(count), row),
        bandwidth_bps=dict.fromkeys(range(count), dict.fromkeys(range(count), bandwidth_bps)),
    )


def random_links(random: Random, count: int) -> Links:
    """Return links each with its own latency and bandwidth, the same in both directions."""
    latency: dict[int, dict[int, float]] = {a: {} for a in range(count)}
    bandwidth: dict[int, dict[int, float]] = {a: {} for a in range(count)}
    for a in range(count):
        for b in range(a + 1):
            latency[a][b] = latency[b][a] = random.choice([0.0, 1e-4, 1e-3])
            bandwidth[a][b] = bandwidth[b][a] = random.choice([1e8, 1e9, 1e10])
    return Links(latency_s=latency, bandwidth_bps=bandwidth)


def random_problem(random: Random, segments: int, devices: int, *, tight: bool = False, skips: bool = True) -> Problem:
    """Return a problem with uneven segments, devices and links, and some values that skip segments.

    Args:
        random: Draws it.
        segments: How many segments.
        devices: How many devices.
        tight: Whether each device's memory holds about 70 % of the model.
        skips: Whether there are values that skip segments.
    """
    made = tuple(
        segment(
            f"segment{index}",
            random.uniform(0.2, 2.0) * 1e-3,
            fixed=random.choice([0.0, 2e-4]),
            state=random.randrange(1, 20) * 10**6,
            saved=random.randrange(1, 10) * 10**5,
            late=random.randrange(1, 5) * 10**4,
        )
        for index in range(segments)
    )
    values = [
        SegmentValue(source=index, consumers=(index + 1,), forward_bytes=size, backward_bytes=size)
        for index in range(segments - 1)
        for size in [random.randrange(1, 10) * 10**4]
    ]
    if skips and segments > 3:
        source = random.randrange(segments - 2)
        consumers = tuple(sorted({random.randrange(source + 1, segments), segments - 1}))
        values.append(SegmentValue(source=source, consumers=consumers, forward_bytes=50_000, backward_bytes=50_000))
    whole = sum(one.state_bytes + one.saved_bytes for one in made)
    return Problem(
        segments=made,
        devices=tuple(
            DeviceSpec(
                number=number, type=random.choice(list(KINDS)), capacity_bytes=int(whole * 0.7) if tight else None
            )
            for number in range(devices)
        ),
        links=random_links(random, devices),
        batch=8,
        micro_batches=(1, 2, 4),
        values=tuple(values),
        call_s=1e-5,
        schedules=("gpipe", "1f1b", "interleaved", "zb-h1", "zbv"),
    )


def with_splits(random: Random, problem: Problem, *ranks: int) -> Problem:
    """Return a problem on alike devices of one host with the costs of random splits of its segments."""

    def part(one: Segment, count: int) -> SplitSegment:
        share = min(1.0, random.uniform(1.0, 1.3) / count)
        return SplitSegment(
            forward_share=share,
            backward_share=min(1.0, random.uniform(1.0, 1.3) / count),
            forward=RankMessages(sums=random.randrange(2), sample_bytes=random.randrange(2) * 1e4),
            backward=RankMessages(gathers=random.randrange(3), fixed_bytes=1e4, sample_bytes=1e3),
            forward_end_bytes=random.randrange(2) * 10_000,
            backward_end_bytes=random.randrange(2) * 10_000,
            parameter_bytes=int(one.parameter_bytes * share),
            state_bytes=int(one.state_bytes * share),
            optimizer_bytes=int(one.optimizer_bytes * share),
            saved_bytes=int(one.saved_bytes * share),
            late_bytes=int(one.late_bytes * share),
            forward_work_bytes=one.forward_work_bytes,
            backward_work_bytes=one.backward_work_bytes,
        )

    return replace(
        problem,
        devices=tuple(replace(device, type="quick", host="h") for device in problem.devices),
        links=links(len(problem.devices), latency_s=random.choice([1e-6, 1e-4, 3e-4]), bandwidth_bps=1e9),
        splits={count: tuple(part(one, count) for one in problem.segments) for count in ranks},
    )


def split_plans(problem: Problem) -> Iterator[Plan]:
    """Yield the same with stages on groups of devices, one at least, if the problem has costs of split layers."""
    names = [one.name for one in problem.segments]
    numbers = [device.number for device in problem.devices]
    groups = [group for ranks in problem.splits for group in combinations(numbers, ranks)]
    for stages in range(1, len(names) + 1) if groups else ():
        for units in permutations([*((number,) for number in numbers), *groups], stages):
            used = [device for unit in units for device in unit]
            if len(set(used)) < len(used) or len(used) == stages:
                continue
            for cuts in combinations(range(1, len(names)), stages - 1):
                made = tuple(
                    Stage(segments=tuple(names[a:b]) if stages > 1 else (), replicas=(unit,), shares=(1.0,))
                    for (a, b), unit in zip(pairwise([0, *cuts, len(names)]), units, strict=True)
                )
                for size in problem.micro_batches:
                    for schedule in ("1f1b", "zb-h1", "gpipe") if stages > 1 else ("1f1b",):
                        yield Plan(stages=made, micro_batch=size, schedule=schedule)


def every_plan(problem: Problem) -> Iterator[Plan]:
    """Yield each contiguous cut on each assignment of devices, with each size of micro-batches and named schedule.

    Where the asynchronous schedule is allowed, it is the only one.
    """
    names = [one.name for one in problem.segments]
    numbers = [device.number for device in problem.devices]
    for stages in range(1, len(names) + 1):
        for chosen, schedules in _assignments(numbers, stages):
            for cuts in combinations(range(1, len(names)), stages - 1):
                bounds = [0, *cuts, len(names)]
                pieces = [tuple(names[a:b]) for a, b in pairwise(bounds)]
                made = tuple(
                    Stage(segments=piece if stages > 1 else (), replicas=((device,),), shares=(1.0,))
                    for piece, device in zip(pieces, chosen, strict=True)
                )
                for size in problem.micro_batches:
                    for schedule in (ASYNC,) if ASYNC in problem.schedules else schedules:
                        yield Plan(stages=made, micro_batch=size, schedule=schedule)


def _assignments(numbers: Sequence[int], stages: int) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
    if stages <= len(numbers):
        for chosen in permutations(numbers, stages):
            yield chosen, ("1f1b", "zb-h1", "gpipe") if stages > 1 else ("1f1b",)
    if stages % 2 == 0 and 2 <= stages // 2 <= len(numbers):
        for chosen in permutations(numbers, stages // 2):
            yield chosen + chosen, ("interleaved",)
            yield chosen + chosen[::-1], ("zbv",)


def exhaustive(problem: Problem) -> tuple[float, Plan | None]:
    """Return the least predicted time over all plans that fit, and its plan.

    A plan whose busiest device alone works longer than the best one known takes is not simulated. Plans that split
    layers count if they gain as much as the planner asks for.
    """
    best, found = math.inf, None
    for plan in every_plan(problem):
        if _busiest_s(problem, plan) >= best:
            continue
        predicted, simulation = predict(problem, plan)
        if not simulation.over_bytes and predicted.step_s < best:
            best, found = predicted.step_s, plan
    whole_s = best
    for plan in split_plans(problem):
        predicted, simulation = predict(problem, plan)
        if not simulation.over_bytes and predicted.step_s < min(best, SPLIT_WORTH * whole_s):
            best, found = predicted.step_s, plan
    return best, found


def _busiest_s(problem: Problem, plan: Plan) -> float:
    kinds = {device.number: device.type for device in problem.devices}
    segments = {one.name: one for one in problem.segments}
    spent: dict[int, float] = {}
    count = -(-problem.batch // (plan.micro_batch or problem.batch))
    for stage in plan.stages:
        device = stage.replicas[0][0]
        for name in stage.segments or tuple(segments):
            one = segments[name]
            times = [known[kinds[device]] for known in (one.forward_s, one.input_s, one.weight_s)]
            each = sum(time.fixed_s * count + time.sample_s * problem.batch for time in times)
            spent[device] = spent.get(device, 0.0) + each
    return max(spent.values())
