"""Cuts of a chain of segments for uneven devices and links, by dynamic programming. Pure.

For devices in a given order, each place of a cut is tried (:meth:`SegmentChain.best_cuts`).

Otherwise, for a bottleneck time T, stages are laid from the last segment to the first (:class:`ChainProgram`). A state
is the number of used devices of each class and the stage laid last; of all ways to reach it the one that got furthest
is kept, since each stage takes as many segments as T, its memory and its links allow. T is found by bisection. Going
backward, the number of stages behind is known, and with it the micro-batches that 1F1B keeps in flight. Where there are
more states than the beam is wide, those are kept whose remaining devices have most time to spare for the remaining
segments; otherwise the result is exact but for ties between devices of a class.

Stages are placed on units: single devices, or several that become replicas of one stage. Units of a class are laid in
the order of their numbers, over the links that they have there; or, where their placement is refined afterwards
(:mod:`onebox.plan.search.placement`), as if the best link between two classes were between any two of their units.
One bad link within a class then does not exclude its devices.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, permutations
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onebox.cost import DeviceGroups
from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.device_groups import LinkWay, ways_between
from onebox.plan.model.layout import LayoutStage
from onebox.plan.model.problem import DeviceSpec
from onebox.plan.model.shares import apportion

Array = NDArray[np.float64]

CutWeights = tuple[Sequence[Array], Sequence[Array]]
"""For each stage the prefix sums of its segments' weights along a chain, and the weight of a cut at each place."""

_PRECISION = 0.01
"""Relative precision of the bisection; the local search that follows moves whole segments anyway."""

_SPREAD = (1.0, 1.05, 1.2, 1.5, 2.0)
"""Multiples of the best T that are laid out, too: a larger T needs fewer stages, which may suit a short step."""


class _Laid(NamedTuple):
    """A stage, and those behind it.

    Args:
        start: Its first segment.
        devices: Its devices.
        end: Its end; the stage behind it begins there.
        behind: The stage behind it.
    """

    start: int
    devices: tuple[int, ...]
    end: int
    behind: _Laid | None


_MORE = 1
"""Maximum number of stages beyond the fewest possible ones for a T."""

_States = dict[tuple[tuple[int, ...], int], _Laid | None]
"""The number of used devices of each class, and the class used last: the stage laid last."""


@dataclass(frozen=True, kw_only=True)
class PartitionLimits:
    """Constraints of the stages.

    Args:
        units: Classes of units that are alike; each unit is the devices that hold a stage as its replicas.
        samples: Samples of a micro-batch.
        count: Micro-batches of a step.
        in_flight: Maximum micro-batches that a stage holds; 1F1B's own number of stages from here to the last if less.
        joined: Allowed numbers of units of a class that hold a stage together.
        stages: Maximum number of stages.
        beam: States that are kept for each number of stages.
        versions: Versions of the weights that a device holds.
        unseated: Whether the placement of a class's units is refined afterwards.
    """

    samples: int
    count: int
    in_flight: int
    units: Sequence[Sequence[tuple[int, ...]]]
    joined: tuple[int, ...]
    stages: int
    beam: int = 64
    versions: int = 1
    unplaced: bool = False


def partitions(costs: CostModel, order: Sequence[int], limits: PartitionLimits) -> list[tuple[LayoutStage, ...]]:
    """Return :meth:`ChainProgram.partitions` of a chain."""
    return ChainProgram(costs, order, limits).partitions()


def alike(units: Sequence[tuple[DeviceSpec, ...]], near: DeviceGroups = ()) -> list[list[tuple[int, ...]]]:
    """Group units whose devices have the same types, speeds and memories, and are near to each other.

    Args:
        units: The devices of each unit.
        near: Groups of devices that are near to each other; empty if all are.

    Returns:
        For each class the numbers of its units' devices.
    """
    place = {device: turn for turn, group in enumerate(near) for device in group}
    groups: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
    for unit in units:
        # Units of several devices are interchangeable wherever they are; single devices are distinguished by their
        # location.
        where = place.get(unit[0].number, 0) if len(unit) == 1 else 0
        key = (where, *sorted((device.type, device.speed, device.capacity_bytes or 0) for device in unit))
        groups.setdefault(key, []).append(tuple(device.number for device in unit))
    return list(groups.values())


class SegmentChain:
    """A chain of segments: times and bytes along it for micro-batches of one size, and its best cuts for given devices.

    Args:
        costs: Costs of the segments.
        order: The segments, in an order in which values go from earlier to later ones.
        samples: Samples of a micro-batch.

    Attributes:
        crossing: Bytes of values and of gradients that cross each cut, and of values kept by their receivers.
    """

    def __init__(self, costs: CostModel, order: Sequence[int], samples: int) -> None:
        self.costs, self.order, self.samples, self.length = costs, tuple(order), samples, len(order)
        self.links = costs.problem.links
        place = {index: position for position, index in enumerate(order)}
        sums = np.zeros((3, self.length + 2), np.int64)
        for value in costs.problem.values:
            if not value.consumers:
                continue
            first, last = place[value.source] + 1, max(place[consumer] for consumer in value.consumers) + 1
            row = np.array([value.forward_bytes, value.backward_bytes, value.forward_bytes * value.kept]) * samples
            sums[:, first] += row
            sums[:, last] -= row
        self.crossing = np.cumsum(sums, axis=1)
        self._seconds: dict[tuple[object, ...], Array] = {}

    def seconds(self, devices: tuple[int, ...], fractions: tuple[float, ...]) -> Array:
        """Return prefix sums of a micro-batch's seconds on some devices, with the slowest one's time of each segment.

        Args:
            devices: The devices.
            fractions: The part of all micro-batches that each computes.
        """
        key = devices, fractions
        if key not in self._seconds:
            rows = []
            for number, fraction in zip(devices, fractions, strict=True):
                device = self.costs.problem.device[number]
                one = (self.costs.seconds((index,))[device.type] for index in self.order)
                each = [sum(fixed + part * self.samples for fixed, part in seconds[:3]) for seconds in one]
                rows.append(np.array(each) / device.speed * fraction)
            self._seconds[key] = np.concatenate([[0.0], np.cumsum(np.max(rows, axis=0))])
        return self._seconds[key]

    def stage_s(self, part: LayoutStage) -> Array:
        """Return prefix sums of a micro-batch's seconds on the devices of a stage."""
        total = sum(part.shares)
        return self.seconds(part.devices, tuple(share / total for share in part.shares))

    def link_s(self, parts: Sequence[LayoutStage], number: int) -> Array:
        """Return a micro-batch's seconds on the slower direction of the link before a stage, by the stage's start."""
        if not number:
            return np.zeros(self.length + 1)
        bandwidth, bps = np.zeros(2), self.links.bandwidth_bps
        for a in parts[number - 1].devices:  # each pair carries its part of the micro-batches
            for b in parts[number].devices:
                bandwidth += (bps[a][b] if a != b else np.inf, bps[b][a] if a != b else np.inf)
        return np.asarray((self.crossing[:2, : self.length + 1] / bandwidth[:, None]).max(axis=0))

    def best_cuts(
        self, parts: Sequence[LayoutStage], most_s: float = np.inf, weights: CutWeights | None = None
    ) -> list[int] | None:
        """Return the ends of stages that minimise the slowest stage or link, or a sum with none above a limit.

        Args:
            parts: The stages, with their devices in order; their segments do not matter.
            most_s: The limit, in seconds of a micro-batch.
            weights: The terms of the sum; ``None`` minimises the slowest.

        Returns:
            The ends along the chain; ``None`` where no cuts are within the limit.
        """
        size = self.length + 1
        value = np.full(size, np.inf)
        value[0] = 0.0
        empty = np.tril(np.ones((size, size), dtype=np.bool_))
        choices = []
        for number, part in enumerate(parts):
            took, link = self.stage_s(part), self.link_s(parts, number)
            each = np.where(empty, np.inf, took[None, :] - took[:, None])
            if weights is None:
                reached = np.maximum(each, np.maximum(link, value)[:, None])
            else:
                own, cut = weights[0][number], weights[1][number]
                beyond = (each > most_s) | (link > most_s)[:, None]
                reached = np.where(beyond, np.inf, own[None, :] - own[:, None]) + (cut + value)[:, None]
            choices.append(np.argmin(reached, axis=0))
            value = reached[choices[-1], np.arange(size)]
        if not value[-1] < np.inf:
            return None
        ends = [size - 1]
        for choice in choices[:0:-1]:
            ends.insert(0, int(choice[ends[0]]))
        return ends


class ChainProgram(SegmentChain):
    """The dynamic program that places the stages of a chain on free devices.

    Args:
        costs: Costs of the segments.
        order: The segments, in an order in which values go from earlier to later ones.
        limits: Constraints of the stages.
        most: Number of stages to lay, after which a layout that is not complete is given up.

    Attributes:
        extensions: Number of stages laid so far.
    """

    def __init__(
        self, costs: CostModel, order: Sequence[int], limits: PartitionLimits, most: int = sys.maxsize
    ) -> None:
        super().__init__(costs, order, limits.samples)
        self.most = most
        self.limits, self.extensions, problem = limits, 0, costs.problem
        self.classes = limits.units
        self.call_s = 2 * problem.call_s
        self.times = [self._times(units[0]) for units in self.classes]
        self.powers = [self._power(times) for times in self.times]
        self.room = [
            min((problem.capacity_bytes[d] for d in units[0] if d in problem.capacity_bytes), default=None)
            for units in self.classes
        ]
        self.forward, self.backward, _ = self.crossing.tolist()
        self._crossing_kept = self.crossing[2]
        samples, more = self.samples, self.limits.versions - 1
        sizes = [self.costs.sizes((index,)) for index in self.order]
        self._held = np.cumsum([0, *(size.state + more * size.parameter for size in sizes)], dtype=np.int64)
        self._saved = np.cumsum([0, *(size.saved * samples for size in sizes)], dtype=np.int64)
        self._work = np.array(
            [max(size.forward_work, size.backward_work + size.late) * samples for size in sizes], np.int64
        )
        self.ways = [[self._common(found) for found in row] for row in ways_between(self.links, self.classes)]

    def _common(self, ways: set[LinkWay]) -> list[LinkWay]:
        """Return the bandwidth between two classes if it is the same for all, or taken to be; else an empty list."""
        if self.limits.unplaced and ways:
            return [(max(there for there, _ in ways), max(back for _, back in ways))]
        return list(ways) if len(ways) == 1 else []

    def _times(self, unit: tuple[int, ...]) -> list[float]:
        """Return prefix sums of a micro-batch's seconds on a unit."""
        turns = apportion(self.limits.count, self.costs.shares(unit, self.samples))
        return self.seconds(unit, tuple(turn / self.limits.count for turn in turns)).tolist()

    def _power(self, times: list[float]) -> float:
        """Return the largest speed ratio of a class to the first class at any segment."""
        nominal, other = np.diff(self.times[0]), np.diff(times)
        some = other > 0
        return float((nominal[some] / other[some]).max()) if some.any() else 1.0

    def _fits(self, starts: range, end: int, in_flight: int, room: int) -> NDArray[np.bool_]:
        """Return whether the stages with some starts and one end fit, with a number of micro-batches in flight."""
        most = np.maximum.accumulate(self._work[starts.start : end][::-1])[::-1]
        part = slice(starts.start, end)
        saved = (self._saved[end] - self._saved[part] + self._crossing_kept[part]) * in_flight
        fitting: NDArray[np.bool_] = self._held[end] - self._held[part] + saved + most <= room
        return fitting

    def partitions(self) -> list[tuple[LayoutStage, ...]]:
        """Cut the chain for the best bottleneck time, and for some larger ones.

        Returns:
            Stages in order of the chain, for each T and number of stages; empty if none fits.
        """
        low = self.least_s()
        most = self.most_s()
        if not self.lay(most, first=True):
            return []
        high = low
        while high < most and not self.lay(high, first=True):
            low, high = high, min(high * 1.5, most)
        while high > low * (1 + _PRECISION):
            middle = (low * high) ** 0.5
            if self.lay(middle, first=True):
                high = middle
            else:
                low = middle
        results: dict[tuple[LayoutStage, ...], None] = {}
        for factor in _SPREAD:
            for last in self.lay(high * factor):
                results[self.parts(last)] = None
        return list(results)

    def least_s(self) -> float:
        """Return a lower bound of T."""
        power = sum(power * len(members) for power, members in zip(self.powers, self.classes, strict=True))
        return max(self.times[0][-1] / power, 1e-12)

    def most_s(self) -> float:
        """Return a T above which a larger one gains nothing."""
        cuts = max(*self.forward, *self.backward)
        rows = self.links.bandwidth_bps
        numbers = [device.number for device in self.costs.problem.devices]
        slowest = min((rows[a][b] for a, b in permutations(numbers, 2)), default=float("inf"))
        return 4 * (max(times[-1] for times in self.times) + self.call_s + cuts / slowest) + 1e-9

    def lay(self, bottleneck_s: float, *, first: bool = False) -> list[_Laid]:
        """Lay stages of at most a bottleneck time.

        Args:
            bottleneck_s: The time.
            first: Whether to stop at the first complete layout.

        Returns:
            At most one complete layout for each number of stages.
        """
        complete: list[_Laid] = []
        none = (0,) * len(self.classes)
        frontier: _States = {(none, -1): None}
        extents: dict[tuple[int, int, int, int], int] = {}
        for behind in range(min(self.limits.stages, sum(map(len, self.classes)))):
            level: _States = {}
            if self.extensions > self.most:
                break
            for (used, after), last in frontier.items():
                for number, units in enumerate(self.classes):
                    for joined in self.limits.joined:
                        if used[number] + joined > len(units):
                            break
                        self.extensions += 1
                        devices = tuple(chain.from_iterable(units[used[number] : used[number] + joined]))
                        end = self._end(bottleneck_s, number, devices, after, last)
                        if end is None:
                            continue
                        laid = self._extend(bottleneck_s, number, devices, joined, last, end, behind, extents)
                        if laid is None:
                            continue
                        now = (*used[:number], used[number] + joined, *used[number + 1 :])
                        known = level.get((now, number))
                        if known is None or laid.start < known.start:
                            level[(now, number)] = laid
            done = [laid for laid in level.values() if laid is not None and laid.start == 0]
            complete += done[:1]
            if complete and (first or not done or len(complete) > _MORE):
                break
            frontier = self._keep(bottleneck_s, level)
            if not frontier:
                break
        return complete

    def _extend(
        self,
        bottleneck_s: float,
        number: int,
        devices: tuple[int, ...],
        joined: int,
        last: _Laid | None,
        end: int,
        behind: int,
        extents: dict[tuple[int, int, int, int], int],
    ) -> _Laid | None:
        """Lay one more stage before the last one, within the constraints."""
        turns = -(-self.limits.count // joined)
        depth = min(turns, self.limits.in_flight, behind + 1)
        key = (number, end, turns, depth)
        if key not in extents:
            extents[key] = self._extent(number, end, bottleneck_s * self.limits.count / turns - self.call_s, depth)
        return _Laid(extents[key], devices, end, last) if extents[key] < end else None

    def _extent(self, number: int, end: int, allowed_s: float, depth: int) -> int:
        """Return the first segment of the longest stage with a given end that fits a class of devices."""
        times = self.times[number]
        start = bisect_left(times, times[end] - allowed_s * (1 + 1e-12))
        room = self.room[number]
        if room is not None and start < end:
            fitting = self._fits(range(start, end), end, depth, room)
            start = start + int(fitting.argmax()) if fitting.any() else end
        return start

    def _end(
        self, bottleneck_s: float, number: int, devices: tuple[int, ...], after: int, last: _Laid | None
    ) -> int | None:
        """Return the latest end of a stage before the last one such that a link carries its crossing values in time."""
        if last is None:
            return self.length
        share = max(len(devices), len(last.devices))  # number of replica pairs that carry it side by side
        ways = self.ways[number][after]
        if not ways:
            bps = self.links.bandwidth_bps
            ways = [(bps[a][b], bps[b][a]) for a in devices for b in last.devices]
        for end in range(last.start, last.end):  # the stage behind may begin later, at a smaller cut
            there, back = self.forward[end], self.backward[end]
            for one, other in ways:
                if there <= bottleneck_s * share * one and back <= bottleneck_s * share * other:
                    return end
        return None

    def _keep(self, bottleneck_s: float, level: _States) -> _States:
        """Return the states to continue with: those with most time to spare, up to the beam width."""
        nominal, powers = self.times[0], self.powers
        whole = sum(power * len(members) for power, members in zip(powers, self.classes, strict=True))
        found = []
        for turn, ((used, number), laid) in enumerate(level.items()):
            assert laid is not None
            left = whole - sum(map(mul, powers, used))
            lack = nominal[laid.start] - bottleneck_s * left
            if laid.start > 0 and lack <= 1e-9 * whole * bottleneck_s:  # with less no path leads to the beginning
                found.append((lack, turn, (used, number), laid))
        return {state: laid for _, _, state, laid in sorted(found)[: self.limits.beam]}

    def parts(self, laid: _Laid | None) -> tuple[LayoutStage, ...]:
        """Return the stages of a complete layout."""
        found, start = [], 0
        while laid is not None:
            segments = self.order[start : laid.end]  # a stage may begin later than possible, at a smaller cut
            found.append(LayoutStage(segments, laid.devices, self.costs.shares(laid.devices, self.samples)))
            start, laid = laid.end, laid.behind
        return tuple(found)
