"""What a step of a changed plan takes, by simulation or, quickly, at least. Pure."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from onebox.errors import UsageError
from onebox.plan.evaluate.evaluator import Evaluator
from onebox.plan.model.layout import StageLayout, layout_of
from onebox.plan.model.plan import ASYNC, Plan
from onebox.plan.model.problem import DeviceSpec, Problem
from onebox.plan.model.schedule import Schedule
from onebox.plan.schedules.async_window import steady_window
from onebox.plan.schedules.synthesis import auto_schedule
from onebox.plan.simulate.steady_state import simulate_steady_state
from onebox.plan.simulate.step import Simulation

_SYNTHESIS_S = 0.04
"""Nominal seconds for a synthesised order."""


class StepTimes:
    """Times layouts that are changes of one plan.

    Args:
        problem: Devices and links as they are believed to be.
        plan: The plan that is in force.
        budget_actions: Actions that may be simulated.
    """

    def __init__(self, problem: Problem, plan: Plan, budget_actions: int) -> None:
        self.problem, self.plan = within_limits(problem, plan), plan
        self.judge = Evaluator(self.problem, effort=budget_actions, expired=lambda: False)
        now = layout_of(problem, plan)
        self.now = now._replace(schedule="auto") if now.schedule == "table" else now  # the order is told apart
        self._table = Schedule.parse(plan.table) if plan.schedule == "table" else None

    @property
    def spent(self) -> bool:
        """Whether all has been simulated that may be."""
        return self.judge.left <= 0

    def step(self, layout: StageLayout, table: Schedule | None = None) -> Simulation:
        """Simulate a step.

        Args:
            layout: The stages.
            table: The order of actions, where it is not what the schedule's name says, or the plan's table.

        Raises:
            UsageError: A value would go to an earlier stage, or the plan's table is not for these stages and shares.
        """
        if layout.schedule == ASYNC and layout == self.now:
            return self._unchanged
        return self.judge.judge(layout, table or self.order(layout)).simulation

    def bound_s(self, layout: StageLayout) -> float:
        """Return seconds that a step takes at least; infinite for a layout that cannot be.

        Of a pipeline that never runs empty it is also half of a step from end to end, as no more than two are under way
        at a time: about what it takes.
        """
        try:
            bound_s = self.judge.bound(layout)
            if layout.schedule != ASYNC:
                return bound_s
            return max(bound_s, self.judge.bound(layout._replace(schedule="1f1b")) / 2)
        except UsageError:  # a value would go to an earlier stage
            return float("inf")

    def order(self, layout: StageLayout) -> Schedule | None:
        """Return the plan's own table with devices that may have changed places; nothing where a name says it."""
        if layout.schedule != "auto":
            return None
        if self._table is None:
            self._table = self.made(self.now)
        pairs = list(zip(self.now.parts, layout.parts, strict=False))
        if len(layout.parts) != len(self.now.parts) or any(one.shares != other.shares for one, other in pairs):
            raise UsageError("a table is for as many stages as it has, and for their shares")
        names = {a: b for one, other in pairs for a, b in zip(one.devices, other.devices, strict=True)}
        return Schedule(rows={names[device]: row for device, row in self._table.rows.items()})

    def made(self, layout: StageLayout) -> Schedule:
        """Return an order of actions that is made for what is believed now."""
        case = self.judge.case(layout)
        return auto_schedule(case.routes, case.work, case.sizes, budget_s=_SYNTHESIS_S)

    def in_flight(self, layout: StageLayout) -> tuple[int, ...]:
        """Return how many micro-batches stages have in flight where the pipeline never runs empty; see the plan's."""
        return self.judge.judge(layout).in_flight if layout.schedule == ASYNC else ()

    @cached_property
    def _unchanged(self) -> Simulation:
        """A step of the plan that is in force, with its own micro-batches in flight."""
        case = self.judge.case(self.now)
        window = steady_window(
            case.routes, [(edge.source, edge.target) for edge in case.work.edges], self.plan.in_flight
        )
        versions = self.problem.versions
        return simulate_steady_state(window, case.routes, case.work, case.sizes, versions=versions, detail=False)


def within_limits(problem: Problem, plan: Plan) -> Problem:
    """Return a problem with the limits of memory that a plan was made for, and its size of micro-batches."""
    limits = dict(zip(plan.devices, plan.memory_bytes, strict=True)) if plan.memory_bytes else {}

    def capacity(device: DeviceSpec) -> int | None:
        known = [size for size in (device.capacity_bytes, limits.get(device.number)) if size]
        return min(known, default=None)

    devices = tuple(replace(device, capacity_bytes=capacity(device)) for device in problem.devices)
    return replace(problem, devices=devices)
