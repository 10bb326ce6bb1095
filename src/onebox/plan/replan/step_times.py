"""Step times of changed plans, by simulation or, more quickly, by a lower bound. Pure."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from onebox.errors import UsageError
from onebox.plan.evaluate.evaluator import Evaluator
from onebox.plan.evaluate.predict import schedule_of
from onebox.plan.model.layout import StageLayout, layout_of
from onebox.plan.model.plan import Plan
from onebox.plan.model.problem import DeviceSpec, Problem
from onebox.plan.model.schedule import Schedule
from onebox.plan.schedules.synthesis import auto_schedule
from onebox.plan.simulate.step import Simulation
from onebox.plan_names import NAMED

_SYNTHESIS_S = 0.04
"""Nominal seconds for a synthesised order."""


class StepTimes:
    """Timing of layouts that are changes of one plan.

    Args:
        problem: Devices and links as estimated.
        plan: The plan in force.
        budget_actions: Actions that may be simulated.
    """

    def __init__(self, problem: Problem, plan: Plan, budget_actions: int) -> None:
        self.problem, self.plan = within_limits(problem, plan), plan
        self.evaluator = Evaluator(self.problem, effort=budget_actions, expired=lambda: False)
        now = layout_of(problem, plan)
        self.now = now._replace(schedule="auto") if now.schedule == "table" else now  # the order of actions is separate
        self._table = Schedule.parse(plan.table) if plan.schedule == "table" else None

    @property
    def spent(self) -> bool:
        """Return whether the budget of actions is used up."""
        return self.evaluator.left <= 0

    def step(self, layout: StageLayout, table: Schedule | None = None) -> Simulation:
        """Simulate a step.

        Args:
            layout: The stages, of :meth:`with_order` where no table is given.
            table: The order of actions; ``None`` for that of the schedule's name, or of the plan's table.

        Raises:
            UsageError: A value would go to an earlier stage.
        """
        if layout.late and layout == self.now:
            return self._unchanged
        return self.evaluator.evaluate(layout, table or self.order(layout)).simulation

    def bound_s(self, layout: StageLayout) -> float:
        """Return a lower bound of the seconds of a step; infinite for an impossible layout.

        For a pipeline that never runs empty it is at least half of a step from end to end, as at most two are under way
        at a time: about the actual time.
        """
        try:
            bound_s = self.evaluator.bound(layout)
            if not layout.late:
                return bound_s
            return max(bound_s, self.evaluator.bound(layout._replace(schedule="1f1b")) / 2)
        except UsageError:  # a value would go to an earlier stage
            return float("inf")

    def with_order(self, layout: StageLayout) -> StageLayout:
        """Return a layout with a named schedule where it would have the plan's table, which is for other stages or
        shares; any other layout as it is.

        To make a table for each layout that a search looks at would take too long.
        """
        shares = [[part.shares for part in one.parts] for one in (self.now, layout)]
        if layout.schedule != "auto" or shares[0] == shares[1]:
            return layout
        named = [name for name in self.problem.schedules if name in NAMED] or ["1f1b"]
        return layout._replace(schedule="1f1b" if "1f1b" in named else named[0])

    def order(self, layout: StageLayout) -> Schedule | None:
        """Return the plan's own table with its devices renamed; ``None`` where the schedule has a name."""
        if layout.schedule != "auto":
            return None
        if self._table is None:
            self._table = self.made(self.now)
        pairs = zip(self.now.parts, layout.parts, strict=True)
        names = {a: b for one, other in pairs for a, b in zip(one.devices, other.devices, strict=True)}
        return Schedule(rows={names[device]: row for device, row in self._table.rows.items()})

    def made(self, layout: StageLayout) -> Schedule:
        """Return an order of actions synthesised for the present estimates."""
        case = self.evaluator.case(layout)
        return auto_schedule(case.routes, case.work, case.sizes, budget_s=_SYNTHESIS_S)

    def in_flight(self, layout: StageLayout) -> tuple[int, ...]:
        """Return the micro-batches in flight of each stage of a pipeline that never runs empty; see the plan's."""
        return self.evaluator.evaluate(layout).in_flight if layout.late else ()

    @cached_property
    def _unchanged(self) -> Simulation:
        """Simulate a step of the plan in force, with its own micro-batches in flight."""
        case = self.evaluator.case(self.now)
        order = schedule_of(self.plan, case.routes, case.work, case.sizes)
        return self.evaluator.simulate(self.now.schedule, order, case)


def within_limits(problem: Problem, plan: Plan) -> Problem:
    """Return a problem with the memory limits and micro-batch size of a plan."""
    limits = dict(zip(plan.devices, plan.memory_bytes, strict=True)) if plan.memory_bytes else {}

    def capacity(device: DeviceSpec) -> int | None:
        known = [size for size in (device.capacity_bytes, limits.get(device.number)) if size]
        return min(known, default=None)

    devices = tuple(replace(device, capacity_bytes=capacity(device)) for device in problem.devices)
    return replace(problem, devices=devices)
