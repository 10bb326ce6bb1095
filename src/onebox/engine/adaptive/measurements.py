"""From the times that workers answer a step with to what the run-time scheduler is told of it. Pure.

Seconds of an action are those of its programs: an instruction begins when what it reads is there, so waiting is not in
them. Seconds of a link are known to whoever sends, where both are on one host and share memory, also across an emulated
link; what goes by sockets ends, as far as a worker knows, when it is handed over, and nothing is said of such links.
Clocks of different hosts are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from onebox.engine.compile.routine import InstructionLabel
from onebox.engine.steps.results import StepTrace
from onebox.plan import Action, Links, MicroBatch, Plan
from onebox.plan.replan.measurements import LinkTime, StepMeasurement, TaskTime, TimedTask
from onebox.pool import Pool

JITTER_S = 1e-3
"""By which messages come late on a machine whose cores are busy: 1 sleep in 100 ends so much later there."""

LEAST = 0.01
"""Updates that take a smaller part of a step are passed over: how long they take is chance, and of no weight."""

Times = tuple[InstructionLabel, int, int]
"""An instruction, when it began and when it ended, in monotonic nanoseconds."""

Timed = Callable[[int, int], bool]
"""Tells of two workers whether the times of what the first one sends to the second are known."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What is known of a step beside its times.

    Args:
        trace: The times.
        micro_batches: The parts of its batch.
        full: Samples of a micro-batch of the plan's size.
        hosts: Of each worker.
        timed: Of which links times are known.
    """

    trace: StepTrace
    micro_batches: Sequence[MicroBatch]
    full: int
    hosts: Mapping[int, str]
    timed: Timed


def step_context(trace: StepTrace, micro_batches: Sequence[MicroBatch], plan: Plan, pool: Pool) -> StepContext:
    """Return what is known of a step.

    Args:
        trace: Its times.
        micro_batches: The parts of its batch.
        plan: The plan that it ran under.
        pool: The devices.
    """
    devices, links, shared = pool.devices, pool.links, pool.shared
    return StepContext(
        trace=trace,
        micro_batches=micro_batches,
        full=plan.micro_batch or max(part.size for part in micro_batches),
        hosts={device.number: device.host for device in devices},
        timed=lambda a, b: (a, b) in links or (shared and devices[a].host == devices[b].host),
    )


def measure_step(step: StepContext, before: StepTrace | None = None) -> StepMeasurement:
    """Return the measurements of a step.

    Args:
        step: The step.
        before: The step before it. From end to end is the pace at which steps go; where the user did something else in
            between, the step itself took less, and that counts.
    """
    actions: dict[TimedTask, list[float]] = {}
    updates: dict[int, float] = {}
    links: dict[tuple[int, int], list[Times]] = {}
    for worker, times in _times(step.trace).items():
        for task, seconds in _actions(worker, times, step):
            actions.setdefault(task, []).append(seconds)
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
            for task, seconds in actions.items()
        },
        links={pair: _carried(sends) for pair, sends in links.items()},
        update_s={worker: seconds for worker, seconds in updates.items() if seconds >= LEAST * step_s},
    )


def without_jitter(seen: StepMeasurement, links: Links) -> StepMeasurement:
    """Return measurements in which links take what they are known to take where little speaks against it.

    A short message takes as long as it takes a thread to wake, which says nothing of the link; what a message deviates
    by less than :data:`JITTER_S` is passed over.

    Args:
        seen: The measurements.
        links: What is known of links.
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
    """Return the seconds of a message, nearer to those that are known by what threads wake late."""
    off_s = seconds - known_s
    return known_s + math.copysign(max(0.0, abs(off_s) - JITTER_S), off_s)


def seconds_between(step: StepContext, later: StepContext) -> float:
    """Return the seconds from the end of a step to that of a later one, on the worker that took longest for it.

    Args:
        step: The step.
        later: The later one.
    """
    before, after = _spans(step.trace), _spans(later.trace)
    return max((after[worker][1] - span[1] for worker, span in before.items() if worker in after), default=0) / 1e9


def _times(trace: StepTrace) -> dict[int, list[Times]]:
    """Return what each worker did; workers that were not asked for times are left out."""
    return {
        worker: [(label, times[2 * place], times[2 * place + 1]) for place, label in enumerate(labels)]
        for worker, (labels, times, _) in trace.workers.items()
        if times
    }


def _actions(worker: int, times: Sequence[Times], step: StepContext) -> Iterator[tuple[TimedTask, float]]:
    """Yield the seconds of each action, as for a micro-batch of the plan's size."""
    spent: dict[Action, int] = {}
    for label, begin, end in times:
        if label.action is not None:  # one whose layers are split takes several instructions
            spent[label.action] = spent.get(label.action, 0) + end - begin
    for action, took in spent.items():
        size = step.micro_batches[action.micro_batch].size  # the step before has negative numbers, from the end
        yield TimedTask(worker, action.stage, action.kind), took / 1e9 * step.full / size


def _carried(sends: Sequence[Times]) -> LinkTime:
    """Return what went over a link: each message from when the link was free for it."""
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
    """Return when each worker's first computation began and its last one ended."""
    found = {}
    for worker, times in _times(trace).items():
        computed = [(begin, end) for label, begin, end in times if label.track == "compute"]
        if computed:
            found[worker] = min(begin for begin, _ in computed), max(end for _, end in computed)
    return found
