"""Placement: the assignment of like devices to the stages of a layout, with those that exchange most closest. Pure.

Cuts and kinds of devices are given; the result is an order of the devices of each kind. A surrogate of the simulator
ranks orders: with 1F1B a stage holds no more micro-batches than there are stages from it to the last, so a
micro-batch's path from a stage to the end and back, computing and transfers, divided by that number, is a bound of the
time between two micro-batches; so is the busiest link's time for each. Local search swaps two devices, and reverses or
shifts by one the devices of a row of stages, as with tours (Lin, Computer solutions of the traveling salesman problem,
1965); it begins at the layout's own order and at the order of hosts and switches, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, cycle, islice

from onebox.plan.evaluate.evaluator import CostedLayout, Evaluator
from onebox.plan.hill_climbing import climb
from onebox.plan.model.layout import StageLayout
from onebox.plan.model.problem import Problem

_EFFORT, _SUM_EFFORT = 1, 12
"""Cost of a surrogate for each stage, and for each device that sums gradients with others, in simulated actions."""

_MOST = 1 / 16
"""Part of the whole effort that the placement of one layout may take."""

_FILLING = 0.01
"""Weight of a second of the pipeline's fill time where it is filled only once."""

_WORTH = 1 - 1e-6
"""Minimum relative improvement of a change, above rounding."""


def placed(evaluator: Evaluator, layout: StageLayout, *, quickly: bool = False) -> StageLayout:
    """Return a layout with the best placement of its devices and of unused ones of their kinds.

    Where layers are split, it stays as it is: a group's devices belong to one host.

    Args:
        evaluator: Computes the layout's costs.
        layout: The layout.
        quickly: Whether to begin at the best of the orders only, and not at each.
    """
    if layout.split:
        return layout
    places = _Places(evaluator, layout)
    if not places.movable:
        return layout
    own = places.own
    starts = list(dict.fromkeys((own, places.by_tree(), places.by_tree(backward=True))))
    if quickly:
        starts = [min(starts, key=places.cost)]
    best = min(map(places.settle, starts), key=lambda found: found[0])
    return layout if best[1] == own or best[0] >= _WORTH * places.cost(own) else places.moved(best[1])


class _Places:
    """The places of a layout: its devices, in the order in which its stages name them first, then the unused ones.

    Args:
        evaluator: Computes the layout's costs.
        layout: The layout.
    """

    def __init__(self, evaluator: Evaluator, layout: StageLayout) -> None:
        self._evaluator, self._layout = evaluator, layout
        problem = evaluator.problem
        used = list(dict.fromkeys(device for part in layout.parts for device in part.devices))
        self.own = (*used, *(number for number in sorted(problem.device) if number not in set(used)))
        self._used = len(used)
        self._kinds = kinds = [evaluator.kinds[number] for number in self.own]
        self.movable = [
            (a, b) for a, b in combinations(range(len(self.own)), 2) if kinds[a] == kinds[b] and a < self._used
        ]
        self._changes = [*((a, b, 0) for a, b in self.movable), *self._rows()]
        case = evaluator.case(layout)
        place = {device: number for number, device in enumerate(used)}
        self._links = problem.links
        self._count = len(case.sizes)
        self._edges = _edges(case, place)
        self._sums = [
            (tuple(place[device] for device in part.devices), stage.gradient_bytes)
            for part, stage in zip(layout.parts, case.work.stages, strict=True)
            if len(part.devices) > 1
        ]
        self._busy, self._floor = _busy(case, layout, problem)
        self._effort = _EFFORT * len(self._busy) + _SUM_EFFORT * sum(len(places) for places, _ in self._sums)
        self._limit = evaluator.left - evaluator.effort * _MOST

    def cost(self, order: Sequence[int]) -> float:
        """Return the approximate seconds of a step with a device for each place.

        In the steady state that is the time of the busiest device, link or sum, since enough micro-batches are in
        flight to hide the latency of messages; the time to fill the pipeline has a small weight, which prefers, of two
        equally quick orders, the one that needs fewer in flight.
        """
        links, last = self._links, len(self._busy)
        loads: dict[tuple[int, int], float] = {}
        ways = [0.0] * last
        for source, pairs, forward_bytes, backward_bytes in self._edges:
            for a, b, part in pairs:
                one, other = order[a], order[b]
                if one != other:
                    there = forward_bytes / links.bandwidth_bps[one][other]
                    back = backward_bytes / links.bandwidth_bps[other][one]
                    ways[source] += part * (there + back + links.latency_s[one][other] + links.latency_s[other][one])
                    loads[one, other] = loads.get((one, other), 0.0) + part * there
                    loads[other, one] = loads.get((other, one), 0.0) + part * back
        cycle_s, round_s = max(loads.values(), default=0.0), 0.0
        rings = [links.ring_seconds([(order[place],) for place in places], size) for places, size in self._sums]
        if self._layout.late:
            round_s = sum(ways) + sum(busy_s for busy_s, _ in self._busy)
            return max(max(self._floor, cycle_s) * self._count, max(rings, default=0.0)) + _FILLING * round_s
        for stage in range(last - 1, -1, -1):
            round_s += self._busy[stage][0] + ways[stage]
            cycle_s = max(cycle_s, round_s / ((last - stage) * self._busy[stage][1]))
        return max(self._floor, cycle_s) * self._count + round_s + sum(rings)

    def settle(self, order: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        """Follow improving changes until there are none; return the final cost and order."""
        evaluator, turns = self._evaluator, cycle(self._changes)

        def spent() -> bool:
            return evaluator.left <= self._limit or evaluator.expired()

        def improved(at: tuple[float, tuple[int, ...]]) -> tuple[float, tuple[int, ...]] | None:
            for change in islice(turns, len(self._changes)):  # goes on behind the last change
                if spent():
                    return None
                evaluator.left -= self._effort
                found = self._changed(at[1], *change)
                if (value := self.cost(found)) < at[0] * _WORTH:
                    return value, found
            return None

        return climb((self.cost(order), order), improved, spent)

    def _rows(self) -> Iterator[tuple[int, int, int]]:
        """Yield the changes of rows of devices of one kind: first and last place, and the change by its number."""
        alike = [0] * len(self._kinds)  # the end of the row of alike devices from each place on
        for place in range(len(self._kinds) - 1, -1, -1):
            ahead = place + 1 < len(alike) and self._kinds[place] == self._kinds[place + 1]
            alike[place] = alike[place + 1] if ahead else place
        for a, b in self.movable:
            if b - a >= 2 and b < self._used and b <= alike[a]:
                yield from ((a, b, change) for change in (1, 2, 3))

    @staticmethod
    def _changed(order: tuple[int, ...], a: int, b: int, change: int) -> tuple[int, ...]:
        """Return an order with the devices of two places swapped, or those of a row reversed or shifted by one."""
        row = order[a : b + 1]
        if change == 0:
            row = (row[-1], *row[1:-1], row[0])
        else:
            row = (row[::-1], (*row[1:], row[0]), (row[-1], *row[:-1]))[change - 1]
        return (*order[:a], *row, *order[b + 1 :])

    def by_tree(self, *, backward: bool = False) -> tuple[int, ...]:
        """Return an order in which, kind by kind, the devices of a host are adjacent, and the hosts of a switch."""
        places = [
            {device: turn for turn, group in enumerate(level) for device in group} for level in self._evaluator.near
        ]
        left: dict[object, list[int]] = {}
        rank = sorted(self.own, key=lambda device: (*(place[device] for place in places[::-1]), device))
        for device in rank[::-1] if backward else rank:
            left.setdefault(self._evaluator.kinds[device], []).append(device)
        return tuple(left[kind].pop(0) for kind in self._kinds)

    def moved(self, order: Sequence[int]) -> StageLayout:
        """Return the layout with a device for each place."""
        return self._layout.with_devices(dict(zip(self.own, order, strict=True)))


_Edge = tuple[int, list[tuple[int, int, float]], int, int]
"""The source stage of values, the pairs of places between which they go with their part of all micro-batches, bytes
there and back."""


def _edges(case: CostedLayout, place: dict[int, int]) -> list[_Edge]:
    count = len(case.sizes)
    found: list[_Edge] = []
    for edge in case.work.edges:
        pairs: dict[tuple[int, int], int] = {}
        for source, target in zip(case.routes[edge.source], case.routes[edge.target], strict=True):
            key = place[source[0]], place[target[0]]
            pairs[key] = pairs.get(key, 0) + 1
        shared = [(a, b, turns / count) for (a, b), turns in pairs.items()]
        found.append((edge.source, shared, edge.forward_bytes, edge.backward_bytes))
    return found


def _busy(case: CostedLayout, layout: StageLayout, problem: Problem) -> tuple[list[tuple[float, int]], float]:
    """Return each stage's seconds of a micro-batch and number of replicas, and the busiest device's seconds."""
    spent: dict[int, float] = {}
    stages = []
    for part, work in zip(layout.parts, case.work.stages, strict=True):
        each = {d: work.forward_s[d] + work.input_s[d] + work.weight_s[d] + 2 * problem.call_s for d in part.devices}
        for device, share in zip(part.devices, part.shares, strict=True):
            spent[device] = spent.get(device, 0.0) + each[device] * share
        stages.append((sum(map(float.__mul__, each.values(), part.shares)), len(part.devices)))
    return stages, max(spent.values())
