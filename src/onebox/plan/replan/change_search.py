"""Search for changes of plan when devices or links are not as planned: cuts, placements, shares, orders. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product

from onebox.errors import UsageError
from onebox.plan.model.layout import LayoutStage, StageLayout, layout_of, single
from onebox.plan.model.plan import Plan
from onebox.plan.model.problem import Problem
from onebox.plan.model.schedule import Schedule
from onebox.plan.model.shares import apportion
from onebox.plan.replan.changes import PlanEdit, ProposedChange, edits_of
from onebox.plan.replan.cut_solver import NEARLY, CutSolver
from onebox.plan.replan.migration_cost import MigrationCost
from onebox.plan.replan.step_times import StepTimes
from onebox.plan.search.local_search import descend, descend_cuts, moved_cuts
from onebox.plan.search.result import NAMED_BIAS

_STARTS = 3
"""Number of best proposals from which local search begins."""

_AS_GOOD = 1.02
"""Factor over its bound within which a proposal is not compared with others of a higher bound."""

_LEAST = 1e-3
"""Part of a step below which a saving is ignored."""


@dataclass(frozen=True, kw_only=True)
class ChangeTerms:
    """Costs and limits of a change.

    Args:
        horizon: Steps over which its cost has to be recovered.
        pause_s: Fixed cost of any change in seconds.
        budget_actions: Actions that may be simulated.
        barred: Returns whether a single change is barred for now.
    """

    horizon: int
    pause_s: float
    budget_actions: int
    barred: Callable[[PlanEdit], bool]


class ChangeSearch:
    """Search for the best change of a plan.

    Args:
        problem: Devices and links as estimated.
        plan: The plan in force.
        terms: Costs and limits of a change.
    """

    def __init__(self, problem: Problem, plan: Plan, terms: ChangeTerms) -> None:
        self._plan, self._terms = plan, terms
        self._pace = StepTimes(problem, plan, terms.budget_actions)
        self._problem, self._evaluator, self._now = self._pace.problem, self._pace.evaluator, self._pace.now
        self._every = [device.number for device in problem.devices]
        self._moved = MigrationCost(self._problem, self._now)
        self._before = self._pace.step(self._now)
        self._known: dict[StageLayout, float] = {}
        formats = [stage.formats for stage in plan.stages]
        self._fixed = frozenset(cut for cut, (one, other) in enumerate(pairwise(formats)) if one != other)

    @property
    def before_s(self) -> float:
        """Expected seconds of a step without a change."""
        return self._before.step_s

    def best(self, others: Iterable[Plan]) -> ProposedChange:
        """Return the change that pays best, or the present plan.

        Args:
            others: Plans that may be restored, such as the first one.
        """
        same = self._now.schedule
        starts = [layout_of(self._problem, plan)._replace(schedule=same) for plan in others]
        starts = sorted(dict.fromkeys((self._now, *starts, *self._proposed())), key=self._value)
        ends: list[StageLayout] = []
        for layout in starts[:_STARTS]:
            ends.append(self._climb(layout))
            if ends[-1] == layout:
                break  # the quickest cuts or an earlier plan led to the best one nearby
        ordered = [self._ordered(self._now)]
        for layout in self._worth((*ends, *starts)):
            ordered.append(self._ordered(layout))
            if ordered[-1].step_s <= self._value(layout) * _AS_GOOD or not self._now.late:
                break  # the step times of the others are known, or at least as long
        least_s = min(map(self._worth_s, ordered))
        best = (one for one in ordered if self._worth_s(one) <= least_s * NEARLY)
        return min(best, key=lambda one: (sum(one.moved.values()), self._worth_s(one)))

    def _worth_s(self, proposal: ProposedChange) -> float:
        """Return the seconds of a step, including its part of the cost."""
        return proposal.step_s + proposal.cost_s / self._terms.horizon

    def _worth(self, found: Iterable[StageLayout]) -> list[StageLayout]:
        """Return the layouts that are worth simulating, in order of their value.

        Of those that are about as good as the best, the ones that move less come first, with like devices assigned so
        that least moves; then the best of the others.
        """
        known = [one for one in dict.fromkeys(found) if one != self._now and self._value(one) < math.inf]
        least_s = min(map(self._value, known), default=0.0)
        near = [layout for layout in known if self._value(layout) <= least_s * NEARLY]
        kinds = {device: self._kind(device) for device in self._every}
        near += [self._moved.renamed(layout, kinds) for layout in near]
        near = [one for one in dict.fromkeys(near) if one != self._now and self._value(one) <= least_s * NEARLY]
        near.sort(key=lambda one: (self._moved.total(one), self._value(one)))
        others = sorted((layout for layout in known if layout not in near), key=self._value)
        return [*near[:_STARTS], *others[:_STARTS]]

    def _kind(self, device: int) -> tuple[float, int | None]:
        """Return a key of a device that is equal for interchangeable ones."""
        power = self._evaluator.costs.power(device, self._now.micro_batch or 1)
        return round(math.log(power) / math.log(NEARLY)), self._problem.device[device].capacity_bytes

    def _proposed(self) -> Iterator[StageLayout]:
        """Yield the proposals of dynamic programming, where each device has one stage and all stages are alike."""
        parts, now = self._now.parts, self._now
        devices = [device for part in parts for device in part.devices]
        alike = not self._fixed and all(part.policy == "keep" for part in parts)
        if len(parts) > 1 and alike and len(set(devices)) == len(devices) and now.micro_batch is not None:
            count = len(self._evaluator.case(now).micro_batches)
            yield from CutSolver(self._evaluator.costs, now, count, self._moved).proposals()
            for layout in self._resized():
                yield CutSolver(self._evaluator.costs, layout, count, self._moved).quickest()
        else:
            yield from self._placed()
        yield from self._shared(now)
        yield from self._staffed()

    def _resized(self) -> Iterator[StageLayout]:
        """Yield layouts with a stage less, which leaves its devices idle, or one more, on an idle device."""
        parts = self._now.parts
        for index, part in enumerate(parts) if len(parts) > 2 else ():
            taker = index - 1 if index else 1
            joined = (*part.segments, *parts[1].segments) if not index else (*parts[taker].segments, *part.segments)
            grown = {taker: parts[taker]._replace(segments=joined)}
            yield self._now._replace(parts=tuple(grown.get(n, one) for n, one in enumerate(parts) if n != index))
        used = {device for part in parts for device in part.devices}
        idle = [device for device in self._every if device not in used]
        if len(parts) < (self._problem.max_stages or len(self._problem.segments)):
            for device, (index, part) in product(idle, enumerate(parts)):
                if len(part.segments) > 1:
                    more = part._replace(segments=part.segments[:-1]), single(part.segments[-1:], device)
                    yield self._now.with_parts(index, *more, until=index + 1)
                    less = single(part.segments[:1], device), part._replace(segments=part.segments[1:])
                    yield self._now.with_parts(index, *less, until=index + 1)

    def _staffed(self) -> Iterator[StageLayout]:
        """Yield layouts with a replica less or more, and layouts on one host: with the same stages where the host has
        replicas of each, and with one stage, whose micro-batches may be others where the problem allows that."""
        now = self._counted()
        if now is None or now.late or self._plan.optimizer == "sharded":
            return
        count = len(self._evaluator.case(now).micro_batches)
        used = {device for part in now.parts for device in part.devices}
        idle = [device for device in self._every if device not in used and self._problem.replicable]
        for index, part in enumerate(now.parts):
            for device in part.devices if len(part.devices) > 1 else ():
                yield now.with_parts(index, _on([other for other in part.devices if other != device], part))
            for device in idle if len(part.devices) < count else ():
                yield now.with_parts(index, _on([*part.devices, device], part))
        hosts: dict[str, list[int]] = {}
        for spec in self._problem.devices:
            hosts.setdefault(spec.host, []).append(spec.number)
        for own in hosts.values() if len(hosts) > 1 else ():
            there = [[device for device in part.devices if device in own] for part in now.parts]
            if all(there):
                yield now._replace(parts=tuple(map(_on, there, now.parts)))
            if not self._fixed and all(part.policy == "keep" for part in now.parts):
                whole = now.parts[0]._replace(segments=tuple(range(len(self._problem.segments))), sends="none")
                schedule = "1f1b" if now.schedule == "auto" else now.schedule
                sizes = self._problem.micro_batches if self._problem.regroupable else (now.micro_batch,)
                several = [own] if self._problem.replicable and len(own) > 1 else []
                for devices, size in product((*([device] for device in own), *several), sizes):
                    chosen = devices[: -(-self._problem.batch // size)] if size else devices[:count]
                    found = now._replace(parts=(_on(chosen, whole),), schedule=schedule, micro_batch=size)
                    if found.parts != now.parts:
                        yield found

    def _counted(self) -> StageLayout | None:
        """Return the present layout with a size of its micro-batches, so that other devices may compute the same ones;
        ``None`` where that is impossible."""
        now = self._now
        if now.micro_batch is not None:
            return now
        sizes = [part.size for part in self._evaluator.case(now).micro_batches]
        (part,) = now.parts
        equal = part._replace(shares=(1 / len(part.devices),) * len(part.devices))
        found = now._replace(micro_batch=max(sizes), parts=(equal,))
        return found if [part.size for part in self._evaluator.case(found).micro_batches] == sizes else None

    def _placed(self) -> list[StageLayout]:
        """Return the layouts with two devices exchanged, and cuts adapted, that have the best bounds."""
        found = list(self._exchanged(self._now))
        share = self._evaluator.left // (4 * max(1, len(found)))
        found = [
            descend_cuts(self._evaluator, layout, share, bound=self._pace.bound_s, fixed=self._fixed)
            for layout in found
        ]
        return sorted(found, key=self._pace.bound_s)[:_STARTS]

    def _climb(self, start: StageLayout) -> StageLayout:
        """Follow the first change that pays repeatedly while effort is left; bounds avoid most simulations."""

        def rate(layout: StageLayout, limit: float) -> float:
            if layout not in self._known and (bound_s := self._pace.bound_s(layout)) >= limit:
                return bound_s
            return self._value(layout)

        return descend(start, self._near, rate, lambda: self._pace.spent, _LEAST)

    def _near(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Yield layouts one change away: cuts, then shares, then places."""
        yield from moved_cuts(layout, self._fixed)
        yield from self._shared(layout)
        yield from self._exchanged(layout)

    def _exchanged(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Yield layouts in which two devices with different stages, or one of them idle, have changed places."""
        stages = {device: [part.segments for part in layout.parts if device in part.devices] for device in self._every}
        for a, b in combinations(self._every, 2):
            if stages[a] != stages[b]:
                yield layout.with_devices({a: b, b: a})

    def _shared(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Yield other shares of replicas: in proportion to their speeds, and with one micro-batch given away."""
        if layout.micro_batch is None and not self._problem.free_shares:
            return
        for index, part in enumerate(layout.parts):
            if len(part.devices) > 1:
                for shares in self._other_shares(layout, part):
                    yield layout.with_parts(index, part._replace(shares=shares))

    def _other_shares(self, layout: StageLayout, part: LayoutStage) -> Iterator[tuple[float, ...]]:
        samples = layout.micro_batch or max(1, self._problem.batch // len(part.devices))
        yield self._evaluator.costs.shares(part.devices, samples)
        if layout.micro_batch is None:
            return
        count = len(self._evaluator.case(layout).micro_batches)
        turns = apportion(count, part.shares)
        for a, b in permutations(range(len(turns)), 2):
            if turns[a] > 1:
                yield tuple(turn - (n == a) + (n == b) + 0.0 for n, turn in enumerate(turns))

    def _ordered(self, layout: StageLayout) -> ProposedChange:
        """Return a proposal with the best order of actions: the layout's own unless another is clearly better."""
        best = self._proposal(layout, None)
        own = self._plan.schedule
        if self._plan.late and layout == self._now:
            return self._deeper(best)
        if self._plan.late or layout.blocks == 1:
            return best
        names = [name for name in self._problem.schedules if name not in ("auto", own)]
        found = [self._proposal(layout._replace(schedule=name), None) for name in names]
        if "auto" in self._problem.schedules or own in ("auto", "table"):
            found.append(self._proposal(layout._replace(schedule="auto"), self._pace.made(layout)))
        other = min(found, key=lambda one: one.step_s, default=best)
        return other if other.step_s < best.step_s * (1 - NAMED_BIAS) else best

    def _deeper(self, now: ProposedChange) -> ProposedChange:
        """Return the present plan with other numbers of micro-batches in flight, if that is clearly better."""
        in_flight = self._pace.in_flight(self._now)
        if in_flight == self._plan.in_flight or self._barred(self._now):
            return now
        found = self._evaluator.evaluate(self._now)
        better = found.simulation.step_s < now.step_s * (1 - NAMED_BIAS)
        if not better or found.over_bytes > sum(self._before.over_bytes.values()):
            return now
        step_s, pause_s = found.simulation.step_s, self._terms.pause_s
        return now._replace(step_s=step_s, cost_s=pause_s, simulation=found.simulation, in_flight=in_flight)

    def _proposal(self, layout: StageLayout, table: Schedule | None) -> ProposedChange:
        """Return the proposal of a layout with an order of actions, or with the plan's, or with that of a name."""
        layout = self._pace.with_order(layout) if table is None else layout
        (moved, cost_s), changed = self._cost(layout), table is not None or layout != self._now
        simulation = self._pace.step(layout, table)
        over_bytes, before_bytes = (sum(one.over_bytes.values()) for one in (simulation, self._before))
        barred = changed and self._barred(layout)
        step_s = float("inf") if barred or over_bytes > before_bytes else simulation.step_s
        if changed and not moved:
            cost_s = self._terms.pause_s
        in_flight = self._pace.in_flight(layout) if changed else self._plan.in_flight
        return ProposedChange(layout, table or self._pace.order(layout), step_s, cost_s, moved, simulation, in_flight)

    def _value(self, layout: StageLayout) -> float:
        """Return the seconds of a step, including its part of the cost; infinite for a layout that is not allowed.

        For a pipeline that never runs empty it is the bound: simulation takes ten times as long.
        """
        if layout not in self._known:
            try:
                step_s = self._pace.bound_s(layout) if layout.late else self._proposal(layout, None).step_s
            except UsageError:  # a value would go to an earlier stage
                step_s = float("inf")
            barred = layout.late and layout != self._now and self._barred(layout)
            self._known[layout] = float("inf") if barred else step_s + self._cost(layout)[1] / self._terms.horizon
        return self._known[layout]

    def _barred(self, layout: StageLayout) -> bool:
        """Return whether a layout contains a barred change."""
        return any(map(self._terms.barred, edits_of(self._now, layout)))

    def _cost(self, layout: StageLayout) -> tuple[dict[tuple[int, int], int], float]:
        """Return the bytes that a change moves over each link, and its seconds."""
        if layout == self._now:
            return {}, 0.0
        moved = self._moved.links(layout)
        return moved, self._moved.longest_s(moved) + self._terms.pause_s


def _on(devices: Sequence[int], part: LayoutStage) -> LayoutStage:
    """Return a stage on some devices: in proportion to their present shares where all have one, else in equal ones."""
    known = dict(zip(part.devices, part.shares, strict=True))
    shares = [known.get(device, 0.0) for device in devices]
    if not all(shares):
        shares = [1.0] * len(devices)
    total = math.fsum(shares)
    return part._replace(devices=tuple(devices), shares=tuple(share / total for share in shares))
