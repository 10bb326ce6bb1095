"""Correction of a profile by the first steps of a run. Pure.

Measured actions are compared with the planned ones at their lower quartile, which other programs do not disturb. So are
the planned times: without the load of other programs that the profile contains. What then is missing between the
simulated and the measured median of a step is the load of the run, where workers leave no core of their host free, and
so is a slowdown that all of its devices have in common; elsewhere its cause is unknown, and it is in no profile.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import msgspec
from msgspec import Struct

from onebox.plan.evaluate.predict import prediction_of, schedule_of, simulate_order
from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.crowding import profiled_crowding
from onebox.plan.model.layout import layout_of
from onebox.plan.model.plan import Plan, Prediction
from onebox.plan.model.problem import DeviceSpec, Problem, Segment
from onebox.plan.model.schedule import Kind
from onebox.plan.model.work import PlanWork
from onebox.plan.replan.change_detection import AGAIN, MEDIAN_ERROR
from onebox.plan.replan.decisions import milliseconds
from onebox.plan.replan.estimates import PLAIN, bounded, longer
from onebox.plan.replan.measurements import PHASES, TimedTask, action_times, phases_of, planned_seconds
from onebox.plan.simulate.step import Simulation

FEWEST_STEPS = 9
"""Steps after which the median is compared with the prediction for the first time: its standard error is then 0.4 of
the standard deviation of steps."""

SURE = 0.05
"""Standard error of the median of steps, relative to it, up to which it is used: about that of a standard deviation of
12 % over nine steps."""

_OFF = 0.1
"""Difference of the median from the prediction that is corrected also inside the predicted interval."""

_QUARTILES = 1.349
"""Distance of the quartiles of normal samples, in standard deviations."""

_LITTLE = 0.01
"""Part of a device's planned time below which the time of a kind of action is not compared by itself."""

_MOST_LOAD = 8.0
"""Most cores that other programs are estimated to want, relative to those that there are."""

_SAME_LOAD = 0.05
"""Difference of loads, in cores, up to which they count as equal."""

_CLOSE = 2e-3
"""Relative difference at which the search for the load ends."""

_TRIES = 12
"""Most steps that are simulated in that search, once its bounds are known."""


class TimeFactors(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Correction of a planning problem.

    Args:
        devices: Factors of the times of each device, by its number.
        segments: By type of device and name of a segment, the factors of its times there: forward, gradient of its
            inputs, gradients of its parameters.
        load: By name of a host, the cores that other programs want there now.

    Raises:
        ValueError: A factor is not positive and finite, or a load is negative or infinite.
    """

    devices: dict[int, float] = {}
    segments: dict[str, dict[str, tuple[float, float, float]]] = {}
    load: dict[str, float] = {}

    def __post_init__(self) -> None:
        phases = (factors for named in self.segments.values() for factors in named.values())
        factors = (*self.devices.values(), *chain.from_iterable(phases))
        if not all(0 < factor < math.inf for factor in factors):
            raise ValueError(f"{self}: factors of times are positive and finite")
        if not all(0 <= cores < math.inf for cores in self.load.values()):
            raise ValueError(f"{self}: a load is finite, from 0 up")

    def then(self, later: TimeFactors) -> TimeFactors:
        """Return this correction with a later one of the corrected problem."""
        numbers = {**self.devices, **later.devices}
        segments = self.segments_with(later)
        for kind, named in self.segments.items():
            for name in named.keys() & later.segments.get(kind, {}).keys():
                segments[kind][name] = _product(named[name], later.segments[kind][name])
        return TimeFactors(
            devices={n: bounded(self.devices.get(n, 1.0) * later.devices.get(n, 1.0)) for n in numbers},
            segments=segments,
            load={**self.load, **later.load},
        )

    def segments_with(self, other: TimeFactors) -> dict[str, dict[str, tuple[float, float, float]]]:
        """Return the factors of segments of another correction and, where it has none, those of this one."""
        kinds = {**self.segments, **other.segments}
        return {kind: {**self.segments.get(kind, {}), **other.segments.get(kind, {})} for kind in kinds}

    def applied(self, problem: Problem) -> Problem:
        """Return a corrected problem; what it does not contain is ignored, and what is beyond the limits of estimates,
        as it may come from a file, is cut to them.

        Args:
            problem: The problem, with the times of a profile.
        """
        most = {host: _MOST_LOAD * cores for host, cores in problem.cores.items()}
        load = {host: min(cores, most[host]) for host, cores in self.load.items() if host in most}
        slower = {
            host: profiled_crowding(problem, host, cores) / profiled_crowding(problem, host)
            for host, cores in load.items()
        }

        def device_of(device: DeviceSpec) -> DeviceSpec:
            factor = bounded(self.devices.get(device.number, 1.0)) * (
                slower.get(device.host, 1.0) if device.processor else 1.0
            )
            return replace(device, speed=device.speed / factor)

        def segment_of(segment: Segment) -> Segment:
            for kind, named in self.segments.items():
                if segment.name in named:
                    forward, inputs, weights = map(bounded, named[segment.name])
                    segment = replace(
                        segment,
                        forward_s=longer(segment.forward_s, forward, of=kind),
                        input_s=longer(segment.input_s, inputs, of=kind),
                        weight_s=longer(segment.weight_s, weights, of=kind),
                    )
            return segment

        return replace(
            problem,
            devices=tuple(map(device_of, problem.devices)),
            segments=tuple(map(segment_of, problem.segments)),
            load={**problem.load, **load},
        )


class TimedStep(NamedTuple):
    """Measured times of a step.

    Args:
        step: Its number.
        step_s: Seconds from the end of the step before to its own end.
        actions: Seconds of each action, for a micro-batch of the plan's size or, where the plan sets none, of the
            largest share.
    """

    step: int
    step_s: float
    actions: Mapping[TimedTask, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class ProfileCorrection:
    """The first steps of a run, compared with their prediction.

    Args:
        first: Number of the first compared step.
        steps: Number of compared steps.
        planned: The plan's prediction.
        measured_s: Median of the steps' seconds.
        spread: Standard deviation of the steps' seconds, relative to their median, by their quartiles.
        devices: By number of a device, the factor by which its computations take longer than planned.
        stages: The same for each kind of action of a device's stages.
        rest: Factor by which steps take longer than they would with these computations and the load in ``factors``.
        factors: Correction of the planner's problem; ``None`` without a problem, or if the steps are as planned or too
            noisy.
        predicted: Prediction of later steps; the plan's own if the steps are too noisy.
    """

    first: int
    steps: int
    planned: Prediction
    measured_s: float
    spread: float
    devices: Mapping[int, float]
    stages: Mapping[TimedTask, float]
    rest: float
    factors: TimeFactors | None
    predicted: Prediction

    @property
    def factor(self) -> float:
        """The measured median over the planned one."""
        return self.measured_s / self.planned.step_s

    @property
    def noisy(self) -> bool:
        """True if steps spread so much that plans cannot be compared by their times."""
        return not _sure(self.spread, self.steps)

    @property
    def differs(self) -> bool:
        """True if the median is outside of the predicted interval, or more than a tenth from the predicted one, or if
        a device is far from as fast as planned, even if steps do not wait for it."""
        low_s, high_s = self.planned.interval_s or (0.0, math.inf)
        off = not low_s <= self.measured_s <= high_s or abs(self.factor - 1) > _OFF
        return off or not all(1 / PLAIN < factor < PLAIN for factor in self.devices.values())

    @property
    def line(self) -> str:
        """A one-line description; empty if the steps are as planned."""
        if self.noisy:
            return (
                f"steps spread by {self.spread:.0%} around {milliseconds(self.measured_s)}, "
                f"{milliseconds(self.planned.step_s)} planned: too noisy to choose a plan by"
            )
        if not self.differs:
            return ""
        load = {} if self.factors is None else self.factors.load
        usual = min(self.devices.values(), default=1.0) if any(load.values()) else 1.0  # that is due to the load
        reasons = [
            f"device {number} {factor:.2f} times"
            for number, factor in sorted(self.devices.items())
            if not 1 / AGAIN < factor / usual < AGAIN
        ]
        reasons += [f"other programs want {cores:.1f} cores of {host}" for host, cores in load.items()]
        if not 1 / AGAIN < self.rest < AGAIN:
            reasons.append(f"{self.rest:.2f} times for another reason than computing")
        told = f": {', '.join(reasons)}" if reasons else ""
        return (
            f"steps take {self.factor:.2f} times as long as planned ({milliseconds(self.measured_s)} instead of "
            f"{milliseconds(self.planned.step_s)}){told}"
        )


def is_sure(steps_s: Sequence[float]) -> bool:
    """Return whether the median of steps is known well enough to be compared with a prediction.

    Args:
        steps_s: Seconds of steps.
    """
    return len(steps_s) >= FEWEST_STEPS and _sure(_spread(steps_s), len(steps_s))


def correct_profile(plan: Plan, steps: Sequence[TimedStep], problem: Problem | None = None) -> ProfileCorrection:
    """Compare the first steps of a run with the prediction of its plan.

    Args:
        plan: The plan, of whole layers, with its prediction.
        steps: Measurements of some steps with the predicted batch, at least two.
        problem: The problem that the plan was made for; ``None`` if it is unknown, so that devices are compared with
            the prediction alone, and no problem is corrected.

    Raises:
        UsageError: The plan does not match the problem.
    """
    planned, steps_s = plan.predicted, [step.step_s for step in steps]
    assert planned is not None, "a plan that is compared has a prediction"
    known = None if problem is None else _PlannedSteps(plan, planned, problem)
    ratios, weights = _ratios(_predicted_times(plan, planned) if known is None else known.undisturbed_s, steps)
    devices = {number: _mean(ratios, weights, number) for number in {task.device for task in ratios}}
    measured_s, spread = statistics.median(steps_s), _spread(steps_s)
    found = ProfileCorrection(
        first=steps[0].step,
        steps=len(steps),
        planned=planned,
        measured_s=measured_s,
        spread=spread,
        devices=devices,
        stages=ratios,
        rest=1.0,
        factors=None,
        predicted=planned,
    )
    if found.noisy:
        return found
    if known is None:
        predicted = _measured(planned, planned, measured_s, steps_s)
        return replace(found, predicted=predicted, rest=found.factor / max(devices.values(), default=1.0))
    common = min(devices.values(), default=1.0)
    if known.shared_host is not None and common > AGAIN:  # programs that never pause disturb the lower quartile, too
        devices = {number: factor / common for number, factor in devices.items()}
        ratios = {task: ratio / common for task, ratio in ratios.items()}
    computing = known.with_alike(_attributed(plan, known.names, known.types, ratios, devices), devices)
    factors = computing.then(TimeFactors(load=known.load(computing, measured_s, steps)))
    expected = known.prediction(factors)
    return replace(
        found,
        predicted=_measured(expected, planned, measured_s, steps_s),
        rest=measured_s / expected.step_s if expected.step_s else 1.0,
        factors=factors if found.differs else None,
    )


class _PlannedSteps:
    """Steps of a plan, simulated in one order of actions for corrected problems.

    Args:
        plan: The plan.
        planned: Its prediction.
        problem: The problem that it was made for.
    """

    def __init__(self, plan: Plan, planned: Prediction, problem: Problem) -> None:
        self._plan = plan
        self._problem = replace(problem, batch=planned.batch, sharded=plan.optimizer == "sharded")
        self._parts, self._routes = plan.micro_batches(planned.batch), plan.routes(planned.batch)
        self._layout = layout_of(self._problem, plan)
        self.names = [[problem.segments[index].name for index in part.segments] for part in self._layout.parts]
        work, sizes = CostModel(self._problem).work(self._layout, self._parts)
        self._order = schedule_of(plan, self._routes, work, sizes)
        alone = TimeFactors(load=dict.fromkeys(problem.cores, 0.0)).applied(self._problem)
        self.undisturbed_s = action_times(CostModel(alone).work(self._layout, self._parts)[0])

    @property
    def types(self) -> dict[int, str]:
        """The type of each device, by its number."""
        return {device.number: device.type for device in self._problem.devices}

    @property
    def shared_host(self) -> str | None:
        """The host of all of the plan's devices, if their workers leave none of its cores free; else ``None``."""
        used = [self._problem.device[number] for number in self._plan.devices]
        host = used[0].host
        full = sum(device.threads for device in used) >= self._problem.cores.get(host, math.inf)
        return host if full and all(device.host == host and device.processor for device in used) else None

    def with_alike(self, computing: TimeFactors, measured: Collection[int]) -> TimeFactors:
        """Return corrections in which devices without measurements are as quick as all measured ones of their kind.

        A slow device says nothing about others, but if the measured ones are quicker than in the profile, others of
        their type and host hardly differ from them.

        Args:
            computing: Corrections of devices and segments.
            measured: The devices that were measured.
        """
        found, device = dict(computing.devices), self._problem.device
        for other in self._problem.devices:
            alike = [
                computing.devices.get(number, 1.0)
                for number in measured
                if (device[number].type, device[number].host) == (other.type, other.host)
            ]
            if other.number not in measured and alike and max(alike) < 1 / PLAIN:
                found[other.number] = max(alike)
        return TimeFactors(devices=found, segments=computing.segments)

    def load(self, computing: TimeFactors, measured_s: float, steps: Sequence[TimedStep]) -> dict[str, float]:
        """Return the load with which steps take as long as measured, where the workers leave no core of it free.

        It is empty if that is the load of the problem. It is at most the load with which actions take as long as
        measured: what else makes steps longer is no program that wants cores.

        Args:
            computing: Corrections of devices and segments.
            measured_s: Median of the steps.
            steps: The steps.
        """
        host = self.shared_host
        if host is None:
            return {}

        def with_load(load: float) -> TimeFactors:
            return computing.then(TimeFactors(load={host: load}))

        def step_s(load: float) -> float:
            return self._simulated(with_load(load))[1].step_s

        def computed_s(load: float) -> float:
            phases_s = action_times(self._work(with_load(load))[1])
            return math.fsum(planned_seconds(phases_s, task, counts) * count for task, count in counts.items())

        actions = steps[0].actions
        counts = {task: len(actions[task]) for task in actions if task._replace(kind="F") in self.undisturbed_s}
        took_s = statistics.median(
            math.fsum(math.fsum(step.actions.get(task, ())) for task in counts) for step in steps
        )
        cores = self._problem.cores[host]
        most = _reached(computed_s, took_s, cores, _MOST_LOAD * cores)
        found = _reached(step_s, measured_s, min(cores, most), most)
        return {host: found} if abs(found - self._problem.load.get(host, 0.0)) > _SAME_LOAD else {}

    def prediction(self, factors: TimeFactors) -> Prediction:
        """Return the prediction for a corrected problem."""
        work, simulation = self._simulated(factors)
        return prediction_of(self._plan, self._problem, work, simulation)

    def _work(self, factors: TimeFactors) -> tuple[Problem, PlanWork, list[float]]:
        """Return the corrected problem, and the work of the plan in it with the sizes of its micro-batches."""
        problem = factors.applied(self._problem)
        return (problem, *CostModel(problem).work(self._layout, self._parts))

    def _simulated(self, factors: TimeFactors) -> tuple[PlanWork, Simulation]:
        problem, work, sizes = self._work(factors)
        plan, versions = self._plan, problem.versions
        return work, simulate_order(
            plan.schedule, self._order, self._routes, work, sizes, versions=versions, detail=False
        )


def _reached(function: Callable[[float], float], target: float, first: float, most: float) -> float:
    """Return the argument, from 0 up, at which a growing function reaches a value, or the largest allowed one.

    Args:
        function: The function.
        target: The value.
        first: An argument at which to look first.
        most: The largest argument.
    """
    low, low_value = 0.0, function(0.0)
    if low_value >= target:
        return 0.0
    high, high_value = first, function(first)
    while high_value < target:
        if high >= most:
            return most
        low, low_value, high = high, high_value, min(2 * high, most)
        high_value = function(high)
    for _ in range(_TRIES):
        between = low + (high - low) * (target - low_value) / (high_value - low_value)
        value = function(between)
        if abs(value / target - 1) < _CLOSE:
            break
        if value < target:
            low, low_value = between, value
        else:
            high, high_value = between, value
    return between


def _ratios(
    phases_s: Mapping[TimedTask, float], steps: Sequence[TimedStep]
) -> tuple[dict[TimedTask, float], dict[TimedTask, float]]:
    """Return the measured over the planned times of actions, and the planned seconds of all of a kind as weights."""
    seconds: dict[TimedTask, list[float]] = {}
    for step in steps:
        for task, each in step.actions.items():
            if task._replace(kind="F") in phases_s:
                seconds.setdefault(task, []).extend(each)
    each_s = {task: planned_seconds(phases_s, task, seconds) for task in seconds}
    weights = {task: each_s[task] * len(each) for task, each in seconds.items()}
    whole: dict[int, float] = {}
    for task, weight in weights.items():
        whole[task.device] = whole.get(task.device, 0.0) + weight
    ratios = {
        task: bounded(_lower_quartile(each) / each_s[task])
        for task, each in seconds.items()
        if weights[task] > _LITTLE * whole[task.device]
    }
    return ratios, weights


def _attributed(
    plan: Plan,
    names: Sequence[Sequence[str]],
    types: Mapping[int, str],
    ratios: Mapping[TimedTask, float],
    devices: Mapping[int, float],
) -> TimeFactors:
    """Attribute the factors of actions to devices and, for each type of device, to segments.

    As in :class:`~onebox.plan.replan.estimates.RateEstimator` a device whose actions take a little longer is not a
    slow one, but computes segments that were measured wrongly, unless a replica of these on a device of its type takes
    as long as planned.
    """
    own: dict[int, float] = {}
    for number, factor in devices.items():
        others = {device for stage in plan.stages for (device,) in stage.replicas if (number,) in stage.replicas}
        alike = [devices[device] for device in others if device in devices and types[device] == types[number]]
        usual = min(alike, key=lambda one: abs(math.log(one)))
        if not 1 / PLAIN < usual < PLAIN:
            own[number] = factor
        elif not 1 / AGAIN < factor / usual < AGAIN:
            own[number] = factor / usual
    found: dict[tuple[str, int, Kind], list[float]] = {}
    for task, ratio in ratios.items():
        for phase in phases_of(task, ratios):
            found.setdefault((types[task.device], task.stage, phase), []).append(ratio / own.get(task.device, 1.0))
    segments: dict[str, dict[str, tuple[float, float, float]]] = {}
    for kind, stage in dict.fromkeys((kind, stage) for kind, stage, _ in found):
        forward, inputs, weights = (bounded(statistics.median(found.get((kind, stage, p), [1.0]))) for p in PHASES)
        segments.setdefault(kind, {}).update(dict.fromkeys(names[stage], (forward, inputs, weights)))
    return TimeFactors(devices=own, segments=segments)


def _predicted_times(plan: Plan, planned: Prediction) -> dict[TimedTask, float]:
    """Return the predicted seconds of phases."""
    found: dict[TimedTask, float] = {}
    for number, stage in enumerate(plan.stages):
        for place, (device,) in enumerate(stage.replicas):
            times = planned.replicas_s[number][place] if planned.replicas_s else planned.stages_s[number]
            found |= {TimedTask(device, number, phase): each_s for phase, each_s in zip(PHASES, times, strict=True)}
    return found


def _measured(expected: Prediction, planned: Prediction, measured_s: float, steps_s: Sequence[float]) -> Prediction:
    """Return a prediction with the measured median of a step.

    Its interval is the planned one, moved with the median, or the measured one where that is wider: a few steps do not
    show all that happens on a machine.
    """
    cuts = statistics.quantiles(steps_s, n=10, method="inclusive")
    low_s, high_s = min(cuts[0], measured_s), max(cuts[-1], measured_s)
    if planned.interval_s is not None:
        moved = measured_s / planned.step_s
        low_s, high_s = min(low_s, moved * planned.interval_s[0]), max(high_s, moved * planned.interval_s[1])
    return msgspec.structs.replace(expected, step_s=measured_s, interval_s=(low_s, high_s))


def _mean(ratios: Mapping[TimedTask, float], weights: Mapping[TimedTask, float], device: int) -> float:
    """Return the factor of all compared actions of a device."""
    own = [task for task in ratios if task.device == device]
    return math.fsum(ratios[task] * weights[task] for task in own) / math.fsum(weights[task] for task in own)


def _lower_quartile(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else seconds[0]


def _spread(steps_s: Sequence[float]) -> float:
    """Return the standard deviation of times relative to their median, by their quartiles."""
    lower, middle, upper = statistics.quantiles(steps_s, n=4, method="inclusive")
    return (upper - lower) / _QUARTILES / middle if middle else math.inf


def _sure(spread: float, steps: int) -> bool:
    return MEDIAN_ERROR * spread / math.sqrt(steps) <= SURE


def _product(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    forward, inputs, weights = (bounded(a * b) for a, b in zip(one, other, strict=True))
    return forward, inputs, weights
