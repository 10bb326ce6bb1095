"""Schedules synthesised for measured times, transfers and memory: list scheduling, then local search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil

from onebox.plan.model.schedule import Action, Routes, Schedule
from onebox.plan.model.work import PlanWork
from onebox.plan.schedules.blocks import block_schedule
from onebox.plan.schedules.critical_path import ScheduleSearch
from onebox.plan.schedules.list_scheduler import UNLIMITED, DispatchRule, list_schedule
from onebox.plan.schedules.named import as_schedule, dispatch_rule_of, named_schedule
from onebox.plan.simulate.instance import SchedulingInstance, instance_of
from onebox.plan_names import NAMED

LIST_S = 4e-6
"""Nominal seconds per action in the list scheduler; measured on a 2-core virtual machine."""


def auto_schedule(
    routes: Routes,
    work: PlanWork,
    sizes: Sequence[float] | None = None,
    *,
    budget_s: float = 0.25,
    expired: Callable[[], bool] = lambda: False,
) -> Schedule:
    """Make a schedule for measured times, transfers and memory.

    Every named schedule is a candidate, so that none of them that fits into the memory is predicted to be faster. Next
    come list schedules on the measured times, under policies that differ in their priorities, in the number of
    micro-batches in flight and in whether the backward is split; all respect the memory. The best one is then improved
    by moving actions on its critical path. Equal inputs give equal schedules: the budget is of nominal, not real,
    seconds.

    Args:
        routes: Routes of the micro-batches.
        work: Times, bytes, edges, links, and the memory of the devices.
        sizes: Size of each micro-batch, as a fraction of the plan's; ``None`` stands for 1 each.
        budget_s: Approximate time limit; the named schedules are always tried.
        expired: Returns whether the time limit has passed, regardless of the budget.

    Returns:
        The best schedule found by :func:`~onebox.plan.simulate.step`: the fastest that fits or, if none does, the one
        that lacks least memory.

    Raises:
        UsageError: Routes and work do not fit together.
    """
    instance = instance_of(routes, work, sizes)
    search = ScheduleSearch(instance, budget_s, expired)
    edges = [(edge.source, edge.target) for edge in work.edges]
    for table in _named(routes, edges):
        search.consider([table.rows[device] for device in instance.devices])
    search.consider(one_by_one(instance))
    for rule in dispatch_rules(instance):
        if search.left_s < budget_s / 3 or search.perfect or expired():
            break
        search.spend(LIST_S * search.actions)
        search.consider(list_schedule(instance, rule))
    search.improve()
    return as_schedule(instance, search.rows)


def _named(routes: Routes, edges: Sequence[tuple[int, int]]) -> Iterator[Schedule]:
    """Yield the named schedules, for blocks of stages on the same devices first, which have less in flight."""
    for name in NAMED:
        blocks, stages = (make(name, routes, edges=edges) for make in (block_schedule, named_schedule))
        yield blocks
        if stages != blocks:
            yield stages


def one_by_one(instance: SchedulingInstance) -> list[list[Action]]:
    """Return rows that run one micro-batch forward and backward before the next one: the least possible memory."""
    rows: list[list[Action]] = [[] for _ in instance.devices]
    for micro_batch in range(instance.count):
        order = [Action("F", stage, micro_batch) for stage in range(instance.stages)]
        order += [Action("B", stage, micro_batch) for stage in range(instance.stages - 1, -1, -1)]
        for action in order:
            for member in instance.slots[instance.slot_of[action.stage * instance.count + micro_batch]].members:
                rows[member].append(action)
    return rows


_DRAFTS = (
    (True, 3.0, "inputs", 1.0, 0.5),
    (False, 1.0, "due", 1.0, 0.0),
    (True, 2.0, "due", 0.5, 0.0),
    (True, 1.0, "due", 0.5, 0.5),
    (True, None, "inputs", 1.0, 0.0),
    (True, None, "due", 0.5, 0.5),
    (False, 3.0, "forward", 1.0, 0.0),
    (True, 1.0, "due", 1.0, 0.5),
    (True, 1.5, "forward", 1.0, 0.5),
    (True, 1.2, "inputs", 1.0, 0.5),
    (True, 2.0, "inputs", 1.0, 0.0),
    (True, 1.0, "forward", 1.0, 0.5),
    (True, 1.5, "due", 0.5, 0.5),
    (True, 1.5, "inputs", 1.0, 0.5),
    (False, None, "forward", 1.0, 0.0),
)
"""Drafts: split; factor on the numbers in flight, or no limit; urgency; pace; patience.

Chosen out of 330 combinations, each for its gain over those before it, on 150 random problems: chains, graphs,
replicas, several stages on a device, with and without slow links and memory caps. These come within 0.05 % of the best
of all, on average, and within 3 % at worst.
"""


def dispatch_rules(instance: SchedulingInstance) -> Iterator[DispatchRule]:
    """Yield policies for the list scheduler that respect the memory, the most promising first."""
    capacity = [instance.work.capacity_bytes.get(device, UNLIMITED) for device in instance.devices]
    timing = Timing(instance)
    yield dispatch_rule_of("zb-h1", instance, more=1.5, capacity=capacity)
    for split, factor, urgency, pace, patience in _DRAFTS:
        limits = timing.in_flight(split=split)
        yield DispatchRule(
            priority=timing.priority(urgency, pace),
            split=[split] * len(limits),
            in_flight=[UNLIMITED if factor is None else ceil(limit * factor) for limit in limits],
            unfinished=[UNLIMITED] * len(limits),
            device_in_flight=[UNLIMITED] * len(capacity),
            device_unfinished=[UNLIMITED] * len(capacity),
            capacity=capacity,
            patience=patience,
        )
    for name in NAMED:
        yield dispatch_rule_of(name, instance, capacity=capacity)
    yield dispatch_rule_of("zbv", instance, more=2.0, capacity=capacity)


class Timing:
    """Round-trip time of a micro-batch through the stages, and the pace at which micro-batches can follow one another.

    Args:
        instance: The scheduling problem.
    """

    def __init__(self, instance: SchedulingInstance) -> None:
        self.instance = instance
        self.turns = [0] * len(instance.slots)
        for slot in instance.slot_of:
            self.turns[slot] += 1
        call_s = instance.work.call_s
        self.forward_s, self.input_s, self.weight_s = ([0.0] * instance.stages for _ in range(3))
        busy = [0.0] * len(instance.devices)
        for slot, (stage, members) in enumerate(instance.slots):
            part = self.turns[slot] / instance.count
            times = [instance.seconds[kind][slot] + call_s for kind in "FIW"]
            self.forward_s[stage] += part * times[0]
            self.input_s[stage] += part * times[1]
            self.weight_s[stage] += part * times[2]
            for member in members:
                busy[member] += part * sum(times)
        self.period_s = max(busy)
        self.edge_s = self._edges()
        self.tail_s = self._tails()

    def _edges(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Return for each edge the mean seconds of a value and of a gradient."""
        instance, count = self.instance, self.instance.count
        size = len(instance.devices)
        found = {}
        for edge in instance.work.edges:
            there = back = 0.0
            for micro_batch in range(count):
                a = instance.first[edge.source * count + micro_batch]
                b = instance.first[edge.target * count + micro_batch]
                there += instance.latency_s[a * size + b] + edge.forward_bytes * instance.per_byte_s[a * size + b]
                back += instance.latency_s[b * size + a] + edge.backward_bytes * instance.per_byte_s[b * size + a]
            found[edge.source, edge.target] = (there / count, back / count)
        return found

    def _tails(self) -> list[float]:
        """Return for each kind and stage the seconds from its start to the end of the step, without waiting."""
        stages = self.instance.stages
        forward, inputs = [0.0] * stages, [0.0] * stages
        for stage in range(stages):
            before = [back + inputs[a] for (a, b), (_, back) in self.edge_s.items() if b == stage]
            inputs[stage] = self.input_s[stage] + max([self.weight_s[stage], *before])
        for stage in range(stages - 1, -1, -1):
            after = [there + forward[b] for (a, b), (there, _) in self.edge_s.items() if a == stage]
            forward[stage] = self.forward_s[stage] + max([inputs[stage], *after])
        return [*forward, *inputs, *self.weight_s]

    def priority(self, urgency: str, pace: float = 1.0) -> list[float]:
        """Return each node's place in the order of preference.

        Args:
            urgency: ``due`` prefers the action that has to start first if micro-batches are to end at the pace of the
                busiest device; ``forward`` and ``inputs`` prefer that kind, and within a kind the action that is due.
            pace: Factor on the time between micro-batches.
        """
        count, stages = self.instance.count, self.instance.stages
        step = self.period_s * pace
        due = [micro_batch * step - tail for tail in self.tail_s for micro_batch in range(count)]
        if urgency == "due":
            return due
        apart = max(due) - min(due) + 1.0
        kinds = (0, 1, 2) if urgency == "forward" else (1, 0, 2)
        return [place + apart * kinds[node // (stages * count)] for node, place in enumerate(due)]

    def in_flight(self, *, split: bool) -> list[int]:
        """Return the number of micro-batches that each slot starts during the round trip of the first one."""
        stages = self.instance.stages
        back_s = [i + (0.0 if split else w) for i, w in zip(self.input_s, self.weight_s, strict=True)]
        trip = [0.0] * stages
        for stage in range(stages - 1, -1, -1):
            after = [sum(ways) + trip[b] for (a, b), ways in self.edge_s.items() if a == stage]
            trip[stage] = self.forward_s[stage] + max(after, default=0.0) + back_s[stage]
        if self.period_s <= 0:
            return [self.instance.count] * len(self.instance.slots)
        return [
            max(1, ceil(trip[slot.stage] / self.period_s * turns / self.instance.count - 1e-9))
            for slot, turns in zip(self.instance.slots, self.turns, strict=True)
        ]
