"""A lower bound of a layout's step time, cheap enough to rank thousands of layouts before any is simulated. Pure.

In any order of actions, a device begins only after a micro-batch has come through the stages before its first and ends
only after all its work, and the step lasts until the last gradient has gone back through the stages before. The same
holds for a link and its messages. The largest of these sums bounds the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.crowding import crowding
from onebox.plan.model.problem import Problem
from onebox.plan.model.schedule import Routes
from onebox.plan.model.work import PlanWork


def lower_bound(work: PlanWork, routes: Routes, sizes: Sequence[float], *, split: bool) -> float:
    """Return a lower bound of the seconds of a step.

    Args:
        work: Costs of the stages.
        routes: Routes of the micro-batches.
        sizes: Micro-batches' sizes as fractions.
        split: Whether the schedule may compute a weight gradient later than the input gradient.
    """
    return _Bound(work, routes, sizes, split).seconds()


def least_step(problem: Problem) -> float:
    """Return a lower bound of the seconds of a step of any plan.

    For any non-negative weights of the devices, the largest load of a device is at least the weighted mean of the
    loads, and that is least where each sample of each segment is computed on the device with the least weighted time.
    The weights are the devices' throughputs of the whole model, which makes the bound the whole work over all speeds
    where devices differ in speed alone. Fixed times count once for each largest micro-batch.

    Args:
        problem: The problem.
    """
    costs, largest = CostModel(problem), max(problem.micro_batches)
    numbers = [device.number for device in problem.devices]
    rates, each = [], []
    for number in numbers:
        device = problem.device[number]
        speed = device.speed / crowding(problem, {number: 1.0})[number]
        rows = costs.lines(device.type)
        each.append((rows[:, 0] / largest + rows[:, 1]) * problem.batch / speed)
        rates.append(1.0 / max(float(each[-1].sum()), 1e-12))
    weighted = np.array(each) * (np.array(rates) / sum(rates))[:, None]
    return float(weighted.min(axis=0).sum())


def least_period(work: PlanWork, routes: Routes, sizes: Sequence[float]) -> float:
    """Return a lower bound of the seconds of a step in a pipeline that never runs empty.

    It is the largest load of any device, link or gradient sum in one step.

    Args:
        work: Costs of the stages.
        routes: Routes of the micro-batches.
        sizes: Micro-batches' sizes as fractions.
    """
    spent: dict[int, float] = {}
    summed: dict[int, float] = {}
    carried: dict[tuple[int, int], float] = {}
    for stage, row in zip(work.stages, routes, strict=True):
        loads = _loads(row, sizes)
        for d, (turns, size) in loads.items():
            own = (stage.forward_s[d] + stage.input_s[d] + stage.weight_s[d]) * size + 2 * work.call_s * turns
            spent[d] = spent.get(d, 0.0) + own + stage.update_s[d]
        if len(loads) > 1:
            ring_s = work.links.sum_seconds([(d,) for d in loads], stage)
            summed.update((d, summed.get(d, 0.0) + ring_s) for d in loads)
    bps = work.links.bandwidth_bps
    for edge in work.edges:
        for (a, b), size in _turns(routes[edge.source], routes[edge.target], sizes):
            if a != b:
                carried[a, b] = carried.get((a, b), 0.0) + edge.forward_bytes * size / bps[a][b]
                carried[b, a] = carried.get((b, a), 0.0) + edge.backward_bytes * size / bps[b][a]
    return max(*spent.values(), *summed.values(), *carried.values(), 0.0)


class _Bound:
    """The parts of the bound.

    Attributes:
        head: For each stage, seconds before a micro-batch's forward can begin there.
        tail: For each stage, seconds from the end of the gradient that it sends back to the end of all others' work.
    """

    def __init__(self, work: PlanWork, routes: Routes, sizes: Sequence[float], split: bool) -> None:
        self.work, self.routes, self.sizes, self.split = work, routes, sizes, split
        self.smallest = min(sizes)
        self.loads = [_loads(row, sizes) for row in routes]
        self.devices = [tuple(loads) for loads in self.loads]
        call = work.call_s
        self.forward = [
            min(stage.forward_s[d] for d in devices) * self.smallest + call
            for stage, devices in zip(work.stages, self.devices, strict=True)
        ]
        self.back = [
            min(stage.input_s[d] + (0.0 if split else stage.weight_s[d]) for d in devices) * self.smallest + call
            for stage, devices in zip(work.stages, self.devices, strict=True)
        ]
        self.head, self.tail = self._paths()

    def _paths(self) -> tuple[list[float], list[float]]:
        head = [0.0] * len(self.work.stages)
        tail = [0.0] * len(self.work.stages)
        # Edges are ordered by source and lead to later stages, so a source's path is complete when it is used.
        for edge in sorted(self.work.edges, key=lambda edge: edge.target):
            a, b = edge.source, edge.target
            way = self._hop(a, b, edge.forward_bytes)
            head[b] = max(head[b], head[a] + self.forward[a] + way)
            tail[b] = max(tail[b], self._hop(b, a, edge.backward_bytes) + self.back[a] + tail[a])
        return head, tail

    def _hop(self, source: int, target: int, size_bytes: int) -> float:
        links = self.work.links
        size = int(size_bytes * self.smallest)
        return min(links.seconds(a, b, size) for a in self.devices[source] for b in self.devices[target])

    def seconds(self) -> float:
        """Return the bound."""
        return max(self._devices(), self._links(), self._replicas())

    def _devices(self) -> float:
        """Return the bound of the devices' loads."""
        ahead: dict[int, float] = {}
        behind: dict[int, float] = {}
        whole: dict[int, float] = {}  # all work of each device
        gradients: dict[int, float] = {}  # without the work that may follow the last gradient sent back
        updates: dict[int, float] = {}
        call = self.work.call_s
        for stage, cost in enumerate(self.work.stages):
            for d in self.devices[stage]:
                ahead[d] = min(ahead.get(d, self.head[stage]), self.head[stage])
                behind[d] = min(behind.get(d, self.tail[stage]), self.tail[stage])
                updates[d] = updates.get(d, 0.0) + cost.update_s[d]
                turns, size = self.loads[stage][d]
                first = (cost.forward_s[d] + cost.input_s[d]) * size + 2 * call * turns
                later = cost.weight_s[d] * size
                whole[d] = whole.get(d, 0.0) + first + later
                gradients[d] = gradients.get(d, 0.0) + first + (0.0 if self.split else later)
        return max(ahead[d] + max(whole[d] + updates[d], gradients[d] + behind[d]) for d in whole)

    def _links(self) -> float:
        """Return the bound of the links' loads; only edges between stages of one device each count."""
        carried: dict[tuple[int, int], list[float]] = {}
        total = sum(self.sizes)
        for edge in self.work.edges:
            if len(self.devices[edge.source]) > 1 or len(self.devices[edge.target]) > 1:
                continue
            a, b = edge.source, edge.target
            after = self.forward[b] + self.back[b] + self.tail[b]
            turned = self.head[b] + self.forward[b] + self.back[b]
            self._carry(carried, a, b, edge.forward_bytes * total, self.head[a] + self.forward[a], after)
            self._carry(carried, b, a, edge.backward_bytes * total, turned, self.back[a] + self.tail[a])
        return max((start + size + after for start, size, after in carried.values()), default=0.0)

    def _carry(
        self,
        carried: dict[tuple[int, int], list[float]],
        source: int,
        target: int,
        size_bytes: float,
        before: float,
        after: float,
    ) -> None:
        pair = (self.devices[source][0], self.devices[target][0])
        if pair[0] == pair[1]:
            return
        spent = size_bytes / self.work.links.bandwidth_bps[pair[0]][pair[1]]
        found = carried.setdefault(pair, [before, 0.0, after])
        found[0], found[1], found[2] = min(found[0], before), found[1] + spent, min(found[2], after)

    def _replicas(self) -> float:
        """Return the bound of stages whose replicas sum their gradients after the last one."""
        most = 0.0
        for stage, (cost, devices) in enumerate(zip(self.work.stages, self.devices, strict=True)):
            if len(devices) == 1:
                continue
            spent = (
                (cost.forward_s[d] + cost.input_s[d] + cost.weight_s[d]) * size + 2 * self.work.call_s * turns
                for d, (turns, size) in self.loads[stage].items()
            )
            ring = self.work.links.sum_seconds([(d,) for d in devices], cost)
            update = max(cost.update_s[d] for d in devices)
            most = max(most, self.head[stage] + max(spent) + ring + update)
        return most


def _loads(row: Sequence[tuple[int, ...]], sizes: Sequence[float]) -> dict[int, tuple[int, float]]:
    """Return for each device the number of micro-batches of a stage that it computes, and their total size."""
    first = row[0][0]
    if row.count(row[0]) == len(row):
        return {first: (len(row), sum(sizes))}
    turns: dict[int, int] = Counter(replica[0] for replica in row)
    whole, last = sizes[0], row[-1][0]
    if sizes[-1] <= whole == min(sizes[:-1]) == max(sizes[:-1]):  # the usual case: only the last one is smaller
        return {d: (count, count * whole + (sizes[-1] - whole) * (d == last)) for d, count in turns.items()}
    totals = dict.fromkeys(turns, 0.0)
    for (d, *_), size in zip(row, sizes, strict=True):
        totals[d] += size
    return {d: (count, totals[d]) for d, count in turns.items()}


def _turns(
    sources: Sequence[tuple[int, ...]], targets: Sequence[tuple[int, ...]], sizes: Sequence[float]
) -> Iterable[tuple[tuple[int, int], float]]:
    """Yield the pairs of devices that exchange values, with the total size of the micro-batches concerned."""
    if sources.count(sources[0]) == len(sources) and targets.count(targets[0]) == len(targets):
        return (((sources[0][0], targets[0][0]), sum(sizes)),)
    found: dict[tuple[int, int], float] = {}
    for (a, *_), (b, *_), size in zip(sources, targets, sizes, strict=True):
        found[a, b] = found.get((a, b), 0.0) + size
    return found.items()


def least_bytes(work: PlanWork, routes: Routes, versions: int = 1) -> dict[int, int]:
    """Return the least memory of each device under any schedule.

    Args:
        work: Costs of the stages.
        routes: Routes of the micro-batches.
        versions: Versions of the weights.
    """
    held: dict[int, int] = {}
    use: dict[int, int] = {}
    for cost, row in zip(work.stages, routes, strict=True):
        for d in {device for route in set(row) for device in route}:
            held[d] = held.get(d, 0) + cost.state_bytes + (versions - 1) * cost.gradient_bytes
            most = max(cost.forward_work_bytes, cost.backward_work_bytes)
            use[d] = max(use.get(d, 0), cost.saved_bytes + cost.offloaded_bytes + most)
    return {d: held[d] + use[d] for d in held}
