"""Steady state of consecutive steps: the time of each, and its memory. Pure.

A device that has finished its part of a step begins the next one at once. So a step takes less time than a single one,
which lasts until the last device has finished; the difference depends on the time of the weight updates:

- ``step``: a device ends its part of a step with its updates, for which it waits until replicas have summed gradients;
- ``overlap``: a stage's update is before its first forward of the next step, and sums go on until then;
- ``window``: the rows are windows (:mod:`onebox.plan.schedules.async_window`), and each contains the update of the step
  before: after the last backward of that step or, where replicas sum its gradients, at the window's end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from onebox.errors import UsageError
from onebox.plan.model.schedule import Action, Routes, Schedule
from onebox.plan.model.window import repeated_routes, unrolled
from onebox.plan.model.work import PlanWork
from onebox.plan.simulate.event_loop import execute_rows
from onebox.plan.simulate.instance import UPDATE, GradientSums, SchedulingInstance, Turn, instance_of
from onebox.plan.simulate.memory import peak, state_bytes
from onebox.plan.simulate.step import ActionSpan, Simulation, Transfer, UpdateSpan, simulation_of, transfers_of

UpdateTiming = Literal["step", "overlap", "window"]
"""Time of the weight updates; see the module's description."""

_STEPS, _MOST_STEPS, _MOST_TURNS = 5, 40, 200_000
"""Minimum and maximum number of simulated steps, and maximum number of actions; steps usually converge to equal
lengths."""

_EQUAL = 1e-9


def simulate_steady_state(
    schedule: Schedule,
    routes: Routes,
    work: PlanWork,
    sizes: Sequence[float] | None = None,
    *,
    updates: UpdateTiming = "window",
    versions: int = 2,
    detail: bool = True,
) -> Simulation:
    """Time a step among many that follow one another.

    Args:
        schedule: The row of each device for one step; with ``window`` its steady window.
        routes: Routes of the micro-batches of one step.
        work: Times, bytes, edges, links.
        sizes: Size of each micro-batch of a step, as a fraction of the plan's; ``None`` stands for 1 each.
        updates: When weights are updated.
        versions: With ``window``, the number of weight versions on a device.
        detail: Whether to return each action and message.

    Returns:
        Times of a steady-state step, and memory. The details are those of one step's rows, timed from the start of the
        first device; a device may end after ``step_s``.

    Raises:
        UsageError: The schedule deadlocks, names a device without a part, or routes and work do not fit together.

    Example:
        >>> from onebox.plan.simulate.instance import unit_work
        >>> from onebox.plan.schedules.async_window import steady_window
        >>> routes = (((0,), (0,)), ((1,), (1,)))
        >>> simulate_steady_state(steady_window(routes), routes, unit_work(routes)).bubble
        0.0
    """
    count, steps = len(routes[0]), _STEPS
    while True:
        instance = instance_of(repeated_routes(routes, steps), work, None if sizes is None else [*sizes] * steps)
        run = _Run(instance, schedule, count, updates)
        period = run.period()
        turns = sum(map(len, run.rows))
        if period is not None or 2 * steps > _MOST_STEPS or 2 * turns > _MOST_TURNS:
            break
        steps *= 2
    step_s = run.mean() if period is None else period
    peaks = _peaks(
        instance_of(repeated_routes(routes, 3), work, None if sizes is None else [*sizes] * 3), schedule, count
    )
    if updates == "window":
        for device, extra in run.late_bytes(schedule, versions).items():
            peaks[device] += extra
    spans, messages, changes = run.details() if detail else ((), (), ())
    return simulation_of(work, step_s, run.busy(), peaks, spans=spans, transfers=messages, updates=changes)


def _peaks(instance: SchedulingInstance, schedule: Schedule, count: int) -> dict[int, int]:
    """Return the peak bytes of each device over three steps: values in flight cross the ends of the middle one."""
    rows = unrolled(schedule, count, 3).rows
    state = state_bytes(instance)
    return {
        device: peak(instance, held, rows.get(device, ())).size_bytes
        for device, held in zip(instance.devices, state, strict=True)
    }


class _Run:
    """A simulation of several steps.

    Args:
        instance: The scheduling problem of all steps.
        schedule: The rows of one step.
        count: Micro-batches of one step.
        updates: Time of the weight updates.
    """

    def __init__(self, instance: SchedulingInstance, schedule: Schedule, count: int, updates: UpdateTiming) -> None:
        self.instance, self.count, self.steps = instance, count, instance.count // count
        self.sums = GradientSums(instance, count)
        strangers = sorted(set(schedule.rows) - set(instance.devices))
        if strangers:
            raise UsageError(f"the schedule has a row for device {strangers[0]}, which has no part in the plan")
        self.held = [
            sorted({slot.stage for slot in instance.slots if number in slot.members})
            for number in range(len(instance.devices))
        ]
        self.marks = [
            list(self._marks(number, schedule.rows.get(device, ()), updates))
            for number, device in enumerate(instance.devices)
        ]
        self.rows = [[turn for _, turn in marks] for marks in self.marks]
        self.played = execute_rows(instance, self.rows, self.sums)
        for number, row in enumerate(self.rows):
            done = self.played.done[number]
            if done < len(row):
                kind, stage, micro_batch = row[done]
                told = f"{stage}{kind}{micro_batch} on device {instance.devices[number]}"
                raise UsageError(f"the schedule never ends: {told} can never start")
        self.begins = self._begins()

    def _marks(self, device: int, row: Sequence[Action], updates: UpdateTiming) -> Iterator[tuple[int, Turn]]:
        """Yield the actions and updates of a device's row in all steps, each with the window that it belongs to."""
        every = self.steps * self.count
        for step in range(self.steps + (updates == "window")):
            turns: list[Turn] = []
            due = {stage: (UPDATE, stage, (step - 1) * self.count) for stage in self.held[device] if step}
            place = self._place(device, row)
            for number, (kind, stage, micro_batch) in enumerate(row):
                if updates == "window" and number == place:
                    turns += due.values()
                if updates == "overlap" and kind == "F" and stage in due:
                    turns.append(due.pop(stage))
                if 0 <= micro_batch + step * self.count < every:
                    turns.append((kind, stage, micro_batch + step * self.count))
            if updates == "window" and place == len(row):
                turns += due.values()
            if updates == "step" or (updates == "overlap" and step == self.steps - 1):
                turns += [(UPDATE, stage, step * self.count) for stage in self.held[device]]
            yield from ((step, turn) for turn in turns)

    def _place(self, device: int, row: Sequence[Action]) -> int:
        """Return the place in a window before which the weights are updated."""
        if len(self.instance.devices) > 1:  # it waits for the vote of all
            return len(row)
        return 1 + max((place for place, action in enumerate(row) if action.micro_batch < 0), default=-1)

    def late_bytes(self, schedule: Schedule, versions: int) -> dict[int, int]:
        """Return each device's bytes beyond one version of its weights and one sum of their gradients."""
        found = {}
        for number, device in enumerate(self.instance.devices):
            row = schedule.rows.get(device, ())
            place = self._place(number, row)
            twice = {stage for kind, stage, micro_batch in row[:place] if kind != "F" and micro_batch >= 0}
            sizes = [(stage, self.instance.work.stages[stage].gradient_bytes) for stage in self.held[number]]
            found[device] = sum(size * (versions - 1 + (stage in twice)) for stage, size in sizes)
        return found

    def _begins(self) -> list[list[float]]:
        """Return the time of each device's first forward of each step."""
        found: list[list[float]] = []
        for row in self.rows:
            times: list[float] = []
            for turn in row:
                if turn[0] == "F" and turn[2] // self.count == len(times):
                    times.append(self.played.start[self.instance.node(turn)])
            found.append(times)
        return [times for times in found if times]

    def period(self) -> float | None:
        """Return the interval between the last steps, if it is equal on all devices, over one, two or three steps.

        Such rows are sums and maxima of times, and so they become periodic (Baccelli et al. 1992, "Synchronization and
        Linearity", chapter 3).
        """
        for span in range(1, (self.steps - 2) // 2 + 1):
            each = [
                (times[a] - times[a - span]) / span
                for times in self.begins
                for a in range(self.steps - 1 - span, self.steps)
                if a >= span
            ]
            if max(each) - min(each) <= _EQUAL * max(each):
                return max(each)
        return None

    def mean(self) -> float:
        """Return the mean interval between steps on the slowest device, over the later half."""
        half = self.steps // 2
        return max((times[-1] - times[half]) / (len(times) - 1 - half) for times in self.begins)

    def busy(self) -> dict[int, float]:
        """Return the seconds of a step in which each device computes."""
        return {
            device: spent / self.steps for device, spent in zip(self.instance.devices, self.played.busy, strict=True)
        }

    def details(self) -> tuple[tuple[ActionSpan, ...], tuple[Transfer, ...], tuple[UpdateSpan, ...]]:
        """Return the actions, messages and updates of one of the last steps."""
        instance, played, step = self.instance, self.played, self.steps - 2
        shift = step * self.count
        begin = min(times[step] for times in self.begins)
        spans, updated = [], {(device, stage, first): (a, b) for device, stage, first, a, b in self.sums.updates}
        changes: list[UpdateSpan] = []
        mine: set[Turn] = set()
        for number, marks in enumerate(self.marks):
            device = instance.devices[number]
            for kind, stage, micro_batch in (turn for own, turn in marks if own == step):
                if kind == UPDATE:
                    start, end = updated[number, stage, micro_batch]
                    changes.append(UpdateSpan(device, None, start - begin, end - begin))
                    continue
                node = instance.node((kind, stage, micro_batch))
                action = Action(kind, stage, micro_batch - shift)  # type: ignore[arg-type]
                spans.append(ActionSpan(device, action, played.start[node] - begin, played.end[node] - begin))
                mine.add((kind, stage, micro_batch))
        for stage, first, start, end in self.sums.made:
            if first == shift:
                holders = (number for number, stages in enumerate(self.held) if stage in stages)
                changes += [UpdateSpan(instance.devices[n], stage, start - begin, end - begin) for n in holders]
        return tuple(spans), self._messages(mine, begin, shift), tuple(changes)

    def _messages(self, own: set[Turn], begin: float, shift: int) -> tuple[Transfer, ...]:
        """Return the messages of some actions."""
        plain = [[Action(*turn) for turn in row if turn[0] != UPDATE] for row in self.rows]  # type: ignore[arg-type]
        return tuple(
            message._replace(
                micro_batch=message.micro_batch - shift,
                start_s=message.start_s - begin,
                end_s=message.end_s - begin,
            )
            for action, message in transfers_of(self.instance, plain, self.played)
            if tuple(action) in own
        )
