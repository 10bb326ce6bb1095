"""Model profile from measured steps: estimates of segments, scaled to the measured times of stages. Pure.

A run measures the time of a stage on a device, but not of its segments; their ratios come from an earlier measurement
or from counted operations (:mod:`onebox.engine.problem.estimate`). A device that is slower than its declared speed from
the first step on makes its stage's segments appear more expensive, which moves cuts in the right direction, though not
as far as the device's true speed would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as replaced
from statistics import median

from msgspec.structs import replace

from onebox.cost.model_profile import ModelProfile, SegmentTimes
from onebox.engine.adaptive.measurements import JITTER_S
from onebox.engine.problem.planner_problem import device_type
from onebox.plan import Links, Plan
from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.layout import layout_of
from onebox.plan.model.problem import Problem
from onebox.plan.replan.measurements import StepMeasurement, phases_of
from onebox.pool import DeviceInfo

_KINDS = ("F", "I", "W")
_SHARED = 1.03
"""Factor of the planned times from which a host counts as slower than by itself; less is the noise of measurements."""

_Rows = Mapping[int, Sequence[float]]


def scale_profile(
    profile: ModelProfile, plan: Plan, steps: Sequence[StepMeasurement], devices: Sequence[DeviceInfo], size: int
) -> ModelProfile:
    """Return a profile scaled to measured stage times.

    Args:
        profile: The model's profile, for the size of the plan's micro-batches and perhaps others, which are scaled by
            the same factors.
        plan: The plan of the steps.
        steps: The measurements, of at least one step.
        devices: All devices of the pool.
        size: Samples of the plan's micro-batches.
    """
    names = [segment.name for segment in profile.bytes.segments]
    stages = [[names.index(name) for name in stage.segments] or list(range(len(names))) for stage in plan.stages]
    times = {}
    for kind, found in profile.times.items():
        own = next(each for each in found if each.size == size)
        measured = {device.number: device.speed for device in devices if device_type(device) == kind}
        factors = _factors(own, stages, plan, steps, measured)
        usual = median(factors.values()) if factors else 1.0
        update_s = _update_s(profile, stages, plan, steps, measured) or own.update_s
        scaled = []
        for each in found:
            rows = [list(row) for row in each.seconds]
            for stage, indices in enumerate(stages):
                for index in indices:
                    for place, what in enumerate(_KINDS):
                        rows[index][place] *= factors.get((stage, what), usual)
            seconds = tuple((forward, inputs, weight) for forward, inputs, weight in rows)
            scaled.append(replace(each, seconds=seconds, update_s=update_s, call_s=0.0))  # included in the measurement
        times[kind] = tuple(scaled)
    return replace(profile, times=times)


def slowdowns_together(problem: Problem, plan: Plan, steps: Sequence[StepMeasurement]) -> dict[str, float]:
    """Return the factors by which the processors of each host exceed their planned times; none unless all hosts do.

    Hosts are profiled one at a time. Where each of them takes longer in the first steps of a run, they share something,
    as virtual machines of one machine do, and each by itself takes the planned time. Where they are slow for another
    reason, a change of plan that counts on that time is undone.

    Args:
        problem: The problem that the plan was made for.
        plan: The plan of the steps.
        steps: The measurements, of at least one step.
    """
    used = [device for device in problem.devices if device.number in plan.devices]
    hosts = {device.host for device in used}
    if len(hosts) < 2 or len(used) < len(plan.devices) or not all(device.processor for device in used):
        return {}
    work, _ = CostModel(problem).work(layout_of(problem, plan), plan.micro_batches(problem.batch))
    factors: dict[int, list[float]] = {}
    for step in steps:
        sums: dict[int, list[float]] = {}
        for task, took in step.actions.items():
            stage, device = work.stages[task.stage], task.device
            expected = {"F": stage.forward_s, "I": stage.input_s, "W": stage.weight_s}
            kinds = phases_of(task, step.actions)
            both = sums.setdefault(device, [0.0, 0.0])
            both[0] += took.mean_s * took.actions
            both[1] += sum(expected[kind][device] for kind in kinds) * took.actions
        for device, (measured_s, planned_s) in sums.items():
            if planned_s:
                factors.setdefault(device, []).append(measured_s / planned_s)
    slowdowns = {
        host: min((_typical(factors.get(device.number, [1.0])) for device in used if device.host == host), default=1.0)
        for host in hosts
    }
    return slowdowns if min(slowdowns.values()) > _SHARED else {}


def _typical(found: Sequence[float]) -> float:
    """Return the lower quartile: disturbances lengthen steps, and workers speed up in their first steps."""
    return sorted(found)[len(found) // 4]


def _factors(
    own: SegmentTimes,
    stages: Sequence[Sequence[int]],
    plan: Plan,
    steps: Sequence[StepMeasurement],
    speeds: Mapping[int, float],
) -> dict[tuple[int, str], float]:
    """Return the factors for the estimates of each stage and kind, for devices of one type."""
    ratios: dict[tuple[int, str], list[float]] = {}
    for step in steps:
        for task, took in step.actions.items():
            if task.device not in speeds or task.stage >= len(stages):
                continue
            kinds = phases_of(task, step.actions)
            expected = sum(own.seconds[index][_KINDS.index(kind)] for index in stages[task.stage] for kind in kinds)
            if expected and took.mean_s:
                for kind in kinds:
                    ratio = took.mean_s * speeds[task.device] / expected
                    ratios.setdefault((task.stage, kind), []).append(ratio)
    return {key: _typical(found) for key, found in ratios.items()}


def _update_s(
    profile: ModelProfile,
    stages: Sequence[Sequence[int]],
    plan: Plan,
    steps: Sequence[StepMeasurement],
    speeds: Mapping[int, float],
) -> float:
    """Return the seconds of the optimizer's step over all parameters on devices of one type; 0 if unknown."""
    sizes = [segment.update_bytes for segment in profile.bytes.segments]
    own: dict[int, float] = {}
    for stage, indices in enumerate(stages):
        for device in (device for replica in plan.stages[stage].replicas for device in replica):
            own[device] = own.get(device, 0) + sum(sizes[index] for index in indices)
    found = [
        seconds * speeds[device] * sum(sizes) / own[device]
        for step in steps
        for device, seconds in step.update_s.items()
        if device in speeds and own.get(device)
    ]
    return _typical(found) if found else 0.0


def with_measured_links(links: Links, steps: Sequence[StepMeasurement], sure: frozenset[tuple[int, int]]) -> Links:
    """Return links with the measured speeds of those that steps used.

    Args:
        links: Known or assumed speeds.
        steps: The measurements.
        sure: Links with certain speeds, by their two ends.
    """
    bandwidth_bps = {a: dict(row) for a, row in links.bandwidth_bps.items()}
    rates: dict[tuple[int, int], list[float]] = {}
    for step in steps:
        for (a, b), carried in step.links.items():
            busy_s = carried.seconds - carried.messages * (links.latency_s[a][b] + JITTER_S)
            if (a, b) not in sure and busy_s > 0:  # else messages are too short to measure it
                rates.setdefault((a, b), []).append(carried.size_bytes / busy_s)
    for (a, b), found in rates.items():
        if len(found) == len(steps):
            bandwidth_bps[a][b] = max(1.0, median(found))
    return replaced(links, bandwidth_bps=bandwidth_bps)
