"""Conversion of workers' instruction times to the measurements for replanning. Pure.

The time of an action is that of its programs, without waiting: an instruction begins when its inputs are present. The
time of a link is known to the sender if both workers are on one host and share memory, also across an emulated link. A
send through a socket ends for the worker when the data is handed over; what such connections carried, and how long that
took, is told by the workers' meters. Clocks of different hosts are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from onebox.engine.compile.routine import InstructionLabel
from onebox.engine.steps.observer import EndedStep
from onebox.engine.steps.results import StepTrace
from onebox.plan import Action, Links, MicroBatch
from onebox.plan.replan.measurements import CarriedBytes, LinkTime, StepMeasurement, TaskTime, TimedTask
from onebox.plan.replan.profile_correction import TimedStep
from onebox.pool import Pool

JITTER_S = 1e-3
"""Typical lateness of messages on a machine with busy cores: 1 sleep in 100 ends this much late there."""

LEAST = 0.01
"""Fraction of a step below which an update's time is ignored as noise."""

Times = tuple[InstructionLabel, int, int]
"""An instruction with its beginning and end in monotonic nanoseconds."""

Timed = Callable[[int, int], bool]
"""Returns whether the times of transfers from the first worker to the second are known."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """A step's times with their context.

    Args:
        trace: The times.
        micro_batches: Micro-batches of its batch.
        full: Samples of a full micro-batch of the plan.
        hosts: Host of each worker.
        timed: Returns whether the times of a link are known.
    """

    trace: StepTrace
    micro_batches: Sequence[MicroBatch]
    full: int
    hosts: Mapping[int, str]
    timed: Timed


def step_context(step: EndedStep, trace: StepTrace, *, pool: Pool) -> StepContext:
    """Return a step's times with their context.

    Args:
        step: The step.
        trace: Its times.
        pool: The devices.
    """
    devices, links, shared = pool.devices, pool.links, pool.shared
    return StepContext(
        trace=trace,
        micro_batches=step.micro_batches,
        full=step.plan.micro_batch or max(part.size for part in step.micro_batches),
        hosts={device.number: device.host for device in devices},
        timed=lambda a, b: (a, b) in links or (shared and devices[a].host == devices[b].host),
    )


def measure_step(step: StepContext, before: StepTrace | None = None) -> StepMeasurement:
    """Return the measurements of a step.

    Args:
        step: The step.
        before: The previous step. The time from end to end is the pace of steps; if the client did something else in
            between, the step's own time is shorter and is used instead.
    """
    updates: dict[int, float] = {}
    links: dict[tuple[int, int], list[Times]] = {}
    for worker, times in _times(step.trace).items():
        own = [end - begin for label, begin, end in times if label.name == "optimizer"]
        if own:
            updates[worker] = sum(own) / 1e9
        for each in times:
            if each[0].target >= 0 and step.timed(worker, each[0].target):
                links.setdefault((worker, each[0].target), []).append(each)
    step_s = _step_s(step, before)
    return StepMeasurement(
        step=step.trace.step,
        step_s=step_s,
        actions={
            task: TaskTime(fmean(seconds), len(seconds), min(seconds), max(seconds))
            for task, seconds in _all_actions(step).items()
        },
        links={pair: _carried(sends) for pair, sends in links.items()},
        update_s={worker: seconds for worker, seconds in updates.items() if seconds >= LEAST * step_s},
        carried={
            pair: CarriedBytes(found.size_bytes, found.busy_ns / 1e9)
            for pair, found in step.trace.traffic.items()
            if found.size_bytes > 0
        },
    )


def time_step(step: StepContext, before: StepTrace | None = None) -> TimedStep:
    """Return the seconds of a step and of each of its actions.

    Args:
        step: The step.
        before: The previous step, as for :func:`measure_step`.
    """
    return TimedStep(step.trace.step, _step_s(step, before), _all_actions(step))


def without_jitter(seen: StepMeasurement, links: Links) -> StepMeasurement:
    """Return measurements with the known link times where the measured ones deviate insignificantly.

    The time of a short message is that of waking a thread, which does not characterise the link; deviations of less
    than :data:`JITTER_S` for one message are ignored.

    Args:
        seen: The measurements.
        links: Known link speeds.
    """
    found = {}
    for (a, b), carried in seen.links.items():
        known_s = links.latency_s[a][b] + carried.size_bytes / carried.messages / links.bandwidth_bps[a][b]
        found[a, b] = carried._replace(
            seconds=_calmed(carried.seconds / carried.messages, known_s) * carried.messages,
            least_s=_calmed(carried.least_s, known_s) if carried.least_s else 0.0,
            most_s=_calmed(carried.most_s, known_s),
        )
    return replace(seen, links=found)


def _calmed(seconds: float, known_s: float) -> float:
    """Return the seconds of a message, moved towards the known ones by at most the jitter."""
    off_s = seconds - known_s
    return known_s + math.copysign(max(0.0, abs(off_s) - JITTER_S), off_s)


def seconds_between(step: StepContext, later: StepContext) -> float:
    """Return the seconds from the end of a step to that of a later one, on the worker with the longest time.

    Args:
        step: The step.
        later: The later one.
    """
    before, after = _spans(step.trace), _spans(later.trace)
    return max((after[worker][1] - span[1] for worker, span in before.items() if worker in after), default=0) / 1e9


def _times(trace: StepTrace) -> dict[int, list[Times]]:
    """Return each worker's instructions; workers without times are left out."""
    return {
        worker: [(label, times[2 * place], times[2 * place + 1]) for place, label in enumerate(labels)]
        for worker, (labels, times, _) in trace.workers.items()
        if times
    }


def _all_actions(step: StepContext) -> dict[TimedTask, list[float]]:
    """Return the seconds of the actions of each kind, scaled to a full micro-batch."""
    actions: dict[TimedTask, list[float]] = {}
    for worker, times in _times(step.trace).items():
        for task, seconds in _actions(worker, times, step):
            actions.setdefault(task, []).append(seconds)
    return actions


def _actions(worker: int, times: Sequence[Times], step: StepContext) -> Iterator[tuple[TimedTask, float]]:
    """Yield the seconds of each action, scaled to a full micro-batch."""
    spent: dict[Action, int] = {}
    for label, begin, end in times:
        if label.action is not None:  # a split action takes several instructions
            spent[label.action] = spent.get(label.action, 0) + end - begin
    for action, took in spent.items():
        size = step.micro_batches[action.micro_batch].size  # the step before has negative numbers, from the end
        yield TimedTask(worker, action.stage, action.kind), took / 1e9 * step.full / size


def _carried(sends: Sequence[Times]) -> LinkTime:
    """Return the transfers over a link, each message timed from when the link was free for it."""
    seconds, free = [], 0
    for _, begin, end in sorted(sends, key=lambda each: each[1]):
        seconds.append(max(0, end - max(begin, free)) / 1e9)
        free = max(free, end)
    size_bytes = sum(label.size_bytes for label, _, _ in sends)
    return LinkTime(size_bytes, math.fsum(seconds), len(sends), min(seconds), max(seconds))


def _step_s(step: StepContext, before: StepTrace | None) -> float:
    """Return the seconds of a step."""
    spans = _spans(step.trace)
    hosts: dict[str, list[tuple[int, int]]] = {}
    for worker, span in spans.items():
        hosts.setdefault(step.hosts[worker], []).append(span)
    took = max((max(end for _, end in own) - min(begin for begin, _ in own) for own in hosts.values()), default=0)
    if before is not None:
        earlier = _spans(before)
        apart = [span[1] - earlier[worker][1] for worker, span in spans.items() if worker in earlier]
        took = min([took, *([max(apart)] if apart else [])])
    return max(0, took) / 1e9


def _spans(trace: StepTrace) -> dict[int, tuple[int, int]]:
    """Return the beginning of each worker's first computation and the end of its last one."""
    found = {}
    for worker, times in _times(trace).items():
        computed = [(begin, end) for label, begin, end in times if label.track == "compute"]
        if computed:
            found[worker] = min(begin for begin, _ in computed), max(end for _, end in computed)
    return found
