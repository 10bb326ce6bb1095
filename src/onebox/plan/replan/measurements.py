"""Measurements of steps: the only input of the re-plan controller. Pure data."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple, TypeVar

from onebox.errors import UsageError
from onebox.plan.model.schedule import Kind
from onebox.plan.model.work import PlanWork

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

PHASES: tuple[Kind, ...] = ("F", "I", "W")
"""Parts of a stage's work that have times of their own: forward, the gradient of its inputs, that of its parameters."""


class TimedTask(NamedTuple):
    """A timed task: one kind of action of one stage of a device.

    Args:
        device: Its number in the pool.
        stage: The stage's index in the plan of the step.
        kind: The kind of action.
    """

    device: int
    stage: int
    kind: Kind


class TaskTime(NamedTuple):
    """Measured time of like actions.

    Args:
        mean_s: Mean seconds of one, for a micro-batch of the plan's size or, where the plan sets none, of the largest
            share; times of other sizes are scaled to it. Waiting for inputs is excluded.
        actions: Number of actions, at least one.
        least_s: Seconds of the shortest; 0 if unknown.
        most_s: Seconds of the longest; infinite if unknown.
    """

    mean_s: float
    actions: int
    least_s: float = 0.0
    most_s: float = math.inf


class LinkTime(NamedTuple):
    """Measured traffic of a link in one direction.

    Args:
        size_bytes: Bytes of all messages.
        seconds: Total seconds in transit: of each message from the later of its sender's start and the arrival of the
            message before it on this link, until its own arrival. Waiting for a receiver that is not ready is excluded.
        messages: Number of messages, at least one.
        least_s: Seconds of the shortest; 0 if unknown.
        most_s: Seconds of the longest; infinite if unknown.
    """

    size_bytes: int
    seconds: float
    messages: int
    least_s: float = 0.0
    most_s: float = math.inf


class CarriedBytes(NamedTuple):
    """Measured traffic of the connections between two devices of different hosts, in one direction.

    Args:
        size_bytes: Bytes that arrived, of all kinds of messages.
        seconds: Seconds in which bytes were on the way or queued, without round trips.
    """

    size_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """Measurements of one step, or of several (:func:`together`).

    Args:
        step: Its number; of several, that of the first.
        step_s: Seconds from the end of the step before to its own end.
        actions: Times of actions; those without measurements are missing.
        links: Traffic by numbers of source and target device; links without traffic are missing.
        update_s: Seconds of the optimizer's step on each device that timed it.
        carried: Traffic of connections between hosts, by numbers of source and target device.
        steps: Number of steps; ``step_s`` and ``update_s`` are means of them.
    """

    step: int
    step_s: float
    actions: Mapping[TimedTask, TaskTime]
    links: Mapping[tuple[int, int], LinkTime] = field(default_factory=dict)
    update_s: Mapping[int, float] = field(default_factory=dict)
    carried: Mapping[tuple[int, int], CarriedBytes] = field(default_factory=dict)
    steps: int = 1

    def __post_init__(self) -> None:
        for what, seconds in self._seconds():
            if not 0 <= seconds < math.inf:
                raise UsageError(
                    f"step {self.step} was measured with {seconds} s of {what}: finite is right, from 0 up"
                )
        if any(took.actions < 1 for took in self.actions.values()):
            raise UsageError(f"step {self.step} was measured with a mean of no actions: leave those out")
        if any(carried.messages < 1 or carried.size_bytes < 0 for carried in self.links.values()):
            raise UsageError(f"step {self.step} was measured with links without messages: leave those out")
        if any(carried.size_bytes < 1 for carried in self.carried.values()):
            raise UsageError(f"step {self.step} was measured with connections that carried nothing: leave those out")

    def _seconds(self) -> Iterator[tuple[str, float]]:
        yield "the step", self.step_s
        yield from (
            (f"{task.stage}{task.kind} on device {task.device}", took.mean_s) for task, took in self.actions.items()
        )
        for links in (self.links, self.carried):
            yield from ((f"link {pair[0]} to {pair[1]}", carried.seconds) for pair, carried in links.items())
        yield from ((f"the update on device {device}", seconds) for device, seconds in self.update_s.items())


def phases_of(task: TimedTask, measured: Collection[TimedTask]) -> tuple[Kind, ...]:
    """Return the phases that a kind of action computes: ``F``, ``I``, ``W``, or both gradients.

    Where a schedule divides backward and no other stage waits for the gradient of a stage's inputs, that is computed
    with the gradient of the parameters.

    Args:
        task: The kind of action.
        measured: All kinds that were measured in a step.
    """
    if task.kind == "B" or (task.kind == "W" and task._replace(kind="I") not in measured):
        return ("I", "W")
    return (task.kind,)


def action_times(work: PlanWork) -> dict[TimedTask, float]:
    """Return the planned seconds of each phase, for a micro-batch of the plan's size."""
    found: dict[TimedTask, float] = {}
    for number, stage in enumerate(work.stages):
        for phase, times in zip(PHASES, (stage.forward_s, stage.input_s, stage.weight_s), strict=True):
            found |= {TimedTask(device, number, phase): seconds for device, seconds in times.items()}
    return found


def planned_seconds(planned: Mapping[TimedTask, float], task: TimedTask, measured: Collection[TimedTask]) -> float:
    """Return the planned seconds of a kind of action.

    Args:
        planned: Planned seconds of each phase, of :func:`action_times`.
        task: The kind of action.
        measured: All kinds that were measured in a step.
    """
    return math.fsum(planned[task._replace(kind=phase)] for phase in phases_of(task, measured))


def together(steps: Sequence[StepMeasurement]) -> StepMeasurement:
    """Combine the measurements of consecutive steps under one plan into those of one step: their means.

    Args:
        steps: At least one, in order.
    """
    if len(steps) == 1:
        return steps[0]
    updates = {device for seen in steps for device in seen.update_s}
    return StepMeasurement(
        step=steps[0].step,
        step_s=fmean(seen.step_s for seen in steps),
        actions={task: _took(every) for task, every in _each(seen.actions for seen in steps).items()},
        links={link: _carried(every) for link, every in _each(seen.links for seen in steps).items()},
        update_s={
            device: fmean(seen.update_s[device] for seen in steps if device in seen.update_s) for device in updates
        },
        carried={
            link: CarriedBytes(sum(one.size_bytes for one in every), math.fsum(one.seconds for one in every))
            for link, every in _each(seen.carried for seen in steps).items()
        },
        steps=sum(seen.steps for seen in steps),
    )


def _each(known: Iterable[Mapping[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return all values of each key."""
    found: dict[_Key, list[_Value]] = {}
    for one in known:
        for key, value in one.items():
            found.setdefault(key, []).append(value)
    return found


def _took(every: Sequence[TaskTime]) -> TaskTime:
    actions = sum(took.actions for took in every)
    mean_s = math.fsum(took.mean_s * took.actions for took in every) / actions
    return TaskTime(mean_s, actions, min(took.least_s for took in every), max(took.most_s for took in every))


def _carried(every: Sequence[LinkTime]) -> LinkTime:
    return LinkTime(
        sum(carried.size_bytes for carried in every),
        math.fsum(carried.seconds for carried in every),
        sum(carried.messages for carried in every),
        min(carried.least_s for carried in every),
        max(carried.most_s for carried in every),
    )
