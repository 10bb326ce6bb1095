"""Evaluator of layouts: simulates each once, keeps the results, and enforces the limits of a search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from onebox.cost import DeviceGroups
from onebox.plan.evaluate.bounds import least_bytes, least_period, lower_bound
from onebox.plan.evaluate.predict import order_of, simulate_order
from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.device_groups import kind, near, numbered_matters
from onebox.plan.model.layout import LayoutStage, StageLayout, plan_of
from onebox.plan.model.plan import MicroBatch
from onebox.plan.model.problem import Problem
from onebox.plan.model.schedule import Routes, Schedule
from onebox.plan.model.shares import ALIKE, apportion, deal
from onebox.plan.model.stage import OFFLOADING_POLICIES
from onebox.plan.model.work import PlanWork
from onebox.plan.schedules.async_window import depths
from onebox.plan.simulate.step import Simulation
from onebox.plan_names import ASYNC, SCHEDULE_TRAITS

_BOUND_EFFORT = 20
"""Cost of a bound for each stage and each further replica, in simulated actions."""

_UNEVEN = 1.08
"""Factor of the step over its bound, beyond that of other plans, where devices of different speeds share a stage: 1.01
to 1.15 in searches for random plans of 16 and 64 devices."""

_SCHEDULING, _SIMULATING = 3, 2
"""Cost of making a schedule and of simulating it for each action, in simulated actions."""

_ENDLESS = 30
"""Cost of a steady-state simulation for each action of a step, in simulated actions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedLayout:
    """A layout with its costs: the input of scheduling and simulation.

    Args:
        micro_batches: The parts of the batch.
        work: Costs of its stages.
        routes: Routes of the micro-batches.
        sizes: Micro-batches' sizes as fractions.
    """

    micro_batches: tuple[MicroBatch, ...]
    work: PlanWork
    routes: Routes
    sizes: list[float]

    @property
    def actions(self) -> int:
        """Approximate number of actions of a schedule."""
        return 2 * len(self.routes) * len(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutEvaluation:
    """The evaluation of a layout.

    Args:
        layout: The layout.
        case: The layout with its costs.
        schedule: The order of its actions.
        simulation: The simulation of that order.
        in_flight: Micro-batches in flight of each stage, where they differ from the schedule's rule.
    """

    layout: StageLayout
    case: CostedLayout
    schedule: Schedule
    simulation: Simulation
    in_flight: tuple[int, ...] = ()

    @property
    def over_bytes(self) -> int:
        """Total missing bytes of its devices."""
        return sum(self.simulation.over_bytes.values())

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key, less is better: first layouts that fit, then quick ones."""
        return self.over_bytes, self.simulation.step_s


class Evaluator:
    """Evaluator of the layouts of one problem.

    Args:
        problem: The planning problem.
        effort: Maximum number of simulated actions.
        expired: Returns whether the time limit has passed.
        required: Whether to go on past the time limit until a plan fits.
    """

    def __init__(self, problem: Problem, *, effort: int, expired: Callable[[], bool], required: bool = True) -> None:
        self._required = required
        self.problem, self.costs = problem, CostModel(problem)
        self.left, self.effort, self.expired = effort, effort, expired
        self.simulated = 0
        self.best: LayoutEvaluation | None = None
        self.evaluations: dict[StageLayout, LayoutEvaluation] = {}
        self._parts: dict[int | None, tuple[MicroBatch, ...]] = {}
        self._rows: dict[tuple[object, ...], tuple[tuple[int, ...], ...]] = {}
        self._cases: dict[tuple[object, ...], CostedLayout] = {}
        self._bounds: dict[tuple[object, ...], float] = {}
        self._schedules: dict[tuple[object, ...], tuple[Sequence[int], Schedule]] = {}

    @cached_property
    def near(self) -> tuple[DeviceGroups, ...]:
        """The groups of devices that are near to each other, the smallest first."""
        return near(self.problem)

    @cached_property
    def kinds(self) -> dict[int, tuple[object, ...]]:
        """A key for each device, equal for interchangeable ones."""
        return {device.number: kind(device) for device in self.problem.devices}

    @cached_property
    def uneven(self) -> bool:
        """Return whether devices of a kind differ in their distances, so that their placement matters."""
        classes: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
        for number, own in self.kinds.items():
            classes.setdefault(own, []).append((number,))
        return numbered_matters(self.problem.links, list(classes.values()))

    @cached_property
    def _power(self) -> dict[int, float]:
        """The throughput of each device."""
        samples = max(self.problem.micro_batches)
        return {number: self.costs.power(number, samples) for number in self.problem.device}

    @property
    def spent(self) -> bool:
        """Return whether effort or time is used up."""
        return self.left <= 0 or self.expired()

    @property
    def enough(self) -> bool:
        """Return whether time is up, and a plan that fits was found if one is required; if not, effort may be, too."""
        if not self._required:
            return self.spent
        return self.expired() and self.best is not None and not self.best.over_bytes

    def affords(self, layout: StageLayout) -> bool:
        """Return whether the effort that is left is enough to simulate a layout, or a plan that fits is required."""
        required = self._required and (self.best is None or self.best.over_bytes > 0)
        return required or (_SCHEDULING + _SIMULATING) * self.actions(layout) <= self.left

    def allows(self, layout: StageLayout) -> bool:
        """Return whether the problem allows a layout as the result; trivial ones are evaluated in any case."""
        return not self.refusal(layout)

    def refusal(self, layout: StageLayout) -> str:
        """Return the reason why the problem does not allow a layout; empty if it does."""
        problem = self.problem
        if not problem.replicable and any(len(part.shares) > 1 for part in layout.parts):
            return "replicas are not allowed"
        if layout.split and (reason := self._unsplittable(layout)):
            return reason
        if problem.max_stages is not None and layout.blocks > problem.max_stages:
            return f"more than {problem.max_stages} stages"
        policies = {part.policy for part in layout.parts} - set(problem.policies)
        away = {part.policy for part in layout.parts if part.policy in OFFLOADING_POLICIES}
        if policies:
            return f"{policies.pop()} is not allowed"
        if layout.update is not None and layout.update not in problem.updates:
            return f"the optimizer on the {layout.update} is not allowed"
        if layout.late and away:
            return f"versions of weights do not go together with {away.pop()}"
        idle = self._idle(layout)
        if idle is not None:
            return f"device {idle} would have no samples"
        used = {device for part in layout.parts for device in part.devices}
        if problem.max_devices is not None and len(used) > problem.max_devices:
            return f"more than {problem.max_devices} device{'s' * (problem.max_devices > 1)}"
        # Where all plans are late, one of a single stage holds versions of its weights, too.
        named = layout.blocks > 1 or layout.late or problem.schedules == (ASYNC,)
        if named and layout.schedule not in problem.schedules:
            return f"schedule {layout.schedule} is not allowed"
        return ""

    def _unsplittable(self, layout: StageLayout) -> str:
        """Return the reason why layers cannot be split as in a layout; empty if they can."""
        split = [part for part in layout.parts if part.ranks > 1]
        used = Counter(device for part in layout.parts for device in part.devices)
        for part in split:
            if part.ranks not in self.problem.splits or layout.micro_batch is None:
                return f"layers cannot be split over {part.ranks} devices"
            if any(used[device] > 1 for device in part.devices):
                return "a device that splits layers has another stage"
            if part.policy != "keep" or part.codec != "none" or part.sends != "none":
                return "split layers are kept as they are"
            for replica in part.replicas:
                if len({(self.kinds[device], self.problem.device[device].host) for device in replica}) > 1:
                    return "layers are split over different devices"
        return ""

    def _idle(self, layout: StageLayout) -> int | None:
        """Return a replica to which no micro-batch goes, if there is one: the layout would seem to use its device."""
        batch, size = self.problem.batch, layout.micro_batch
        for part in layout.parts:
            if len(part.shares) > 1:
                units = apportion(batch if size is None else -(-batch // size), part.shares)
                if min(units) == 0:
                    return part.replicas[units.index(0)][0]
        return None

    def case(self, layout: StageLayout) -> CostedLayout:
        """Return a layout with its costs."""
        key = (layout.parts, layout.micro_batch, layout.update, layout.late)
        if key not in self._cases:
            batch, size = self.problem.batch, layout.micro_batch
            if size is None or size not in self._parts:
                plan = plan_of(self.problem, layout)
                self._parts[size] = plan.micro_batches(batch)
            parts = self._parts[size]
            routes = plan.routes(batch) if size is None else tuple(self._row(part, len(parts)) for part in layout.parts)
            work, sizes = self.costs.work(layout, parts)
            self._cases[key] = CostedLayout(micro_batches=parts, work=work, routes=routes, sizes=sizes)
        return self._cases[key]

    def actions(self, layout: StageLayout) -> int:
        """Return the approximate number of actions of a layout's schedule; costs are not needed for it."""
        if layout.micro_batch is None:
            return self.case(layout).actions
        return 2 * len(layout.parts) * -(-self.problem.batch // layout.micro_batch)

    def _row(self, part: LayoutStage, count: int) -> tuple[tuple[int, ...], ...]:
        """Return the route of each micro-batch through a stage, as :meth:`~onebox.plan.Plan.routes` does."""
        if len(part.devices) == part.ranks:
            return (part.devices,) * count
        key = (part.devices, part.shares, part.ranks, count)
        if key not in self._rows:
            replicas = part.replicas
            self._rows[key] = tuple(replicas[turn] for turn in deal(count, part.shares))
        return self._rows[key]

    def bound(self, layout: StageLayout) -> float:
        """Return a lower bound of the seconds of a layout's step; infinite if it cannot fit."""
        split, late = SCHEDULE_TRAITS[layout.schedule].halves, layout.late
        key = (layout.parts, layout.micro_batch, layout.update, split, late)
        if key not in self._bounds:
            self.left -= _BOUND_EFFORT * (sum(len(part.devices) for part in layout.parts) + 3)
            case = self.case(layout)
            caps = self.problem.capacity_bytes
            needs = least_bytes(case.work, case.routes, self.problem.versions if late else 1)
            if any(need > caps.get(device, need) for device, need in needs.items()):
                self._bounds[key] = float("inf")
            elif late:
                self._bounds[key] = least_period(case.work, case.routes, case.sizes)
            else:
                self._bounds[key] = lower_bound(case.work, case.routes, case.sizes, split=split)
        return self._bounds[key]

    def estimate(self, layout: StageLayout) -> float:
        """Return the bound, raised where it is known to be too low; layouts are simulated in the order of this value.

        In a pipeline, devices of different speeds that share a stage hold their micro-batches for different times, and
        those behind wait for the slowest.
        """
        uneven = len(layout.parts) > 1 and any(
            max(powers) > ALIKE * min(powers)
            for powers in ([self._power[device] for device in part.devices] for part in layout.parts)
        )
        return self.bound(layout) * (_UNEVEN if uneven else 1.0)

    def evaluate(self, layout: StageLayout, schedule: Schedule | None = None) -> LayoutEvaluation:
        """Simulate a layout, once.

        Args:
            layout: The layout.
            schedule: The order of its actions; ``None`` is that of its schedule's name.
        """
        known = self.evaluations.get(layout)
        if known is not None and schedule is None:
            return known
        case = self.case(layout)
        for in_flight in dict.fromkeys((depths(case.routes, case.work) if layout.late else (), ())):
            order = schedule or self._named(layout, case, in_flight)
            simulation = self.simulate(layout.schedule, order, case)
            self.left -= (_ENDLESS if layout.late else _SIMULATING) * case.actions
            self.simulated += 1
            evaluation = LayoutEvaluation(
                layout=layout, case=case, schedule=order, simulation=simulation, in_flight=in_flight
            )
            if not evaluation.over_bytes:
                break
        if known is None or evaluation.rank < known.rank:
            self.evaluations[layout] = evaluation
        if self.allows(layout) and (self.best is None or evaluation.rank < self.best.rank):
            self.best = evaluation
        return evaluation

    def simulate(self, name: str, order: Schedule, case: CostedLayout) -> Simulation:
        """Simulate an order of the actions of a layout, without details."""
        versions = self.problem.versions
        return simulate_order(name, order, case.routes, case.work, case.sizes, versions=versions, detail=False)

    def first_better(self, layouts: Iterable[StageLayout], than: LayoutEvaluation) -> LayoutEvaluation | None:
        """Return the first layout that is better than another, or ``None``; bounds avoid most simulations."""
        for layout in layouts:
            if self.spent:
                return None
            if not than.over_bytes and self.bound(layout) >= than.simulation.step_s:
                continue
            evaluation = self.evaluate(layout)
            if evaluation.rank < than.rank:
                return evaluation
        return None

    def _named(self, layout: StageLayout, case: CostedLayout, in_flight: tuple[int, ...]) -> Schedule:
        """Return a named schedule; it is cached, as it depends only on routes and edges, which many layouts share.

        It does not depend on the numbers of the devices either, so that layouts on other devices share it, too.
        """
        places: dict[int, int] = {}
        parts = tuple(
            (tuple(places.setdefault(device, len(places)) for device in part.devices), part.shares, part.ranks)
            for part in layout.parts
        )
        edges = tuple((edge.source, edge.target) for edge in case.work.edges)
        key = (layout.schedule, parts, len(case.sizes), layout.micro_batch is None, edges, in_flight)
        if key not in self._schedules:
            self.left -= _SCHEDULING * case.actions
            self._schedules[key] = tuple(places), order_of(layout.schedule, case.routes, edges, in_flight)
        own, schedule = self._schedules[key]
        if own == tuple(places):
            return schedule
        return Schedule(rows={now: schedule.rows[then] for now, then in sorted(zip(places, own, strict=True))})
