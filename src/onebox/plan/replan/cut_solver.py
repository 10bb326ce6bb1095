"""Cuts of a chain over devices in a given order, by dynamic programming, and the most promising order. Pure.

Local search begins from these: the time of a stage is that of a micro-batch on its device, the time of a link that of
the values that cross the cut, and a step takes about ``(count - 1)`` times the slowest of these plus the sum of all
(Narayanan et al. 2019, doi:10.1145/3341301.3359646, section 3.1, minimise the slowest in the same way). A second
program finds, among the cuts whose slowest stage is about as quick as that, those that move least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.layout import LayoutStage, StageLayout
from onebox.plan.replan.migration_cost import MigrationCost

_Array = NDArray[np.float64]

_LOOSE = (1.0, 1.1, 1.3)
"""Factors by which the slowest stage may exceed its minimum while the sum of all is minimised."""

NEARLY = 1.01
"""Factor up to which times count as equal, so that the change that moves less is preferred."""

_ROUNDS = 8
"""Maximum number of best exchanges of two devices, one of which may be idle."""


class CutSolver:
    """Cuts of one chain.

    Args:
        costs: Costs of the segments.
        layout: Stages that are all of the same kind, each device with one of them.
        count: Micro-batches of a step.
        moved: Counts the bytes that a change moves.
    """

    def __init__(self, costs: CostModel, layout: StageLayout, count: int, moved: MigrationCost) -> None:
        self._costs, self._layout, self._count, self._moved = costs, layout, count, moved
        self._chain = tuple(index for part in layout.parts for index in part.segments)
        self._samples = layout.micro_batch or 1
        place = {index: turn for turn, index in enumerate(self._chain)}
        forward, backward = np.zeros(len(place) + 1), np.zeros(len(place) + 1)
        for value in costs.problem.values:
            start, end = place[value.source] + 1, max(place[consumer] for consumer in value.consumers) + 1
            forward[start:end] += value.forward_bytes * self._samples
            backward[start:end] += value.backward_bytes * self._samples
        self._crossing = np.stack([forward, backward])
        self._took: dict[tuple[object, ...], _Array] = {}

    def proposals(self) -> Iterator[StageLayout]:
        """Yield layouts with other cuts, for the devices as they are and in the most promising order."""
        parts = self._layout.parts
        yield from self._cut(parts)
        better = self._reordered(parts)
        if better != parts:
            yield from self._cut(better)

    def quickest(self) -> StageLayout:
        """Return the layout whose cuts minimise the slowest stage, for the devices as they are."""
        return next(self._cut(self._layout.parts), self._layout)

    def _cut(self, parts: Sequence[LayoutStage]) -> Iterator[StageLayout]:
        """Yield layouts with the quickest slowest stage, then with a smaller sum, then with less data moved."""
        least = self._solve(parts, np.inf)
        if least is None:
            return
        slowest, _ = self._takes(parts, least)
        for factor in _LOOSE:
            yield self._with(parts, self._solve(parts, slowest * factor * (1 + 1e-9), self._all_s(parts)))
        for factor in (1.0, NEARLY):
            yield self._with(parts, self._solve(parts, slowest * factor * (1 + 1e-9), self._brought(parts)))

    def _with(self, parts: Sequence[LayoutStage], ends: list[int] | None) -> StageLayout:
        """Return the layout with the given ends of stages."""
        assert ends is not None, "what is within a limit is so whatever is summed up"
        ranges = zip((0, *ends), ends, parts, strict=False)
        return self._layout._replace(parts=tuple(p._replace(segments=self._chain[a:b]) for a, b, p in ranges))

    def _reordered(self, parts: tuple[LayoutStage, ...]) -> tuple[LayoutStage, ...]:
        """Return the stages with their devices reordered by successive exchanges of two."""
        value = self._estimate(parts)
        for _ in range(_ROUNDS):
            others = [exchanged(parts, *pair) for pair in combinations(range(len(parts)), 2)]
            others += list(self._relieved(parts))
            values = [self._estimate(other) for other in others]
            if not values or min(values) >= value * (1 - 1e-6):
                break
            value = min(values)
            near = [other for other, one in zip(others, values, strict=True) if one <= value * NEARLY]
            parts = min(near, key=self._least_moved) if len(near) > 1 else near[0]
        return parts

    def _least_moved(self, parts: Sequence[LayoutStage]) -> int:
        """Return the least bytes to be moved if the slowest stage is to be about as quick as possible."""
        return min((self._moved.total(layout) for layout in self._cut(parts)), default=0)

    def _relieved(self, parts: tuple[LayoutStage, ...]) -> Iterator[tuple[LayoutStage, ...]]:
        """Yield the stages with one device replaced by an idle one."""
        used = {device for part in parts for device in part.devices}
        for number, part in enumerate(parts):
            for idle in self._costs.problem.device.keys() - used:
                changed = part._replace(devices=(idle, *part.devices[1:]))
                yield (*parts[:number], changed, *parts[number + 1 :])

    def _estimate(self, parts: Sequence[LayoutStage]) -> float:
        """Return the approximate seconds of a step with the best cuts."""
        ends = self._solve(parts, np.inf)
        if ends is None:
            return float("inf")
        slowest, path = self._takes(parts, ends)
        return (self._count - 1) * slowest + path

    def _solve(
        self,
        parts: Sequence[LayoutStage],
        most: float,
        weights: tuple[Sequence[_Array], Sequence[_Array]] | None = None,
    ) -> list[int] | None:
        """Return the ends of stages that minimise the slowest stage, or a sum with no stage above a limit.

        Args:
            parts: The stages.
            most: The limit, in seconds of a micro-batch.
            weights: For each stage the prefix weights of the chain's segments, and the weight of a cut at each place.
        """
        size = len(self._chain) + 1
        value = np.full(size, np.inf)
        value[0] = 0.0
        empty = np.tril(np.ones((size, size), dtype=np.bool_))
        choices = []
        for number, part in enumerate(parts):
            took, link = self._stage(part), self._link(parts, number)
            each = np.where(empty, np.inf, took[None, :] - took[:, None])
            if weights is None:
                reached = np.maximum(each, np.maximum(link, value)[:, None])
            else:
                own, cut = weights[0][number], weights[1][number]
                beyond = (each > most) | (link > most)[:, None]
                reached = np.where(beyond, np.inf, own[None, :] - own[:, None]) + (cut + value)[:, None]
            choices.append(np.argmin(reached, axis=0))
            value = reached[choices[-1], np.arange(size)]
        if not value[-1] < np.inf:
            return None
        ends = [size - 1]
        for choice in choices[:0:-1]:
            ends.insert(0, int(choice[ends[0]]))
        return ends

    def _all_s(self, parts: Sequence[LayoutStage]) -> tuple[list[_Array], list[_Array]]:
        """Return the seconds of a micro-batch on each stage, and on the link before it."""
        return [self._stage(part) for part in parts], [self._link(parts, number) for number in range(len(parts))]

    def _brought(self, parts: Sequence[LayoutStage]) -> tuple[list[_Array], list[_Array]]:
        """Return the bytes that each stage's devices would receive; a cut has none."""
        none = np.zeros(len(self._chain) + 1)
        each = ([self._moved.brought(index, part) for index in self._chain] for part in parts)
        return [np.concatenate([[0.0], np.cumsum(one)]) for one in each], [none] * len(parts)

    def _takes(self, parts: Sequence[LayoutStage], ends: Sequence[int]) -> tuple[float, float]:
        """Return the seconds of a micro-batch on the slowest stage or link, and on all of them."""
        took = []
        for number, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
            whole = self._stage(parts[number])
            took += [float(whole[end] - whole[start]), float(self._link(parts, number)[start])]
        return max(took), sum(took)

    def _stage(self, part: LayoutStage) -> _Array:
        """Return prefix seconds of a micro-batch on the devices of a stage, along the chain."""
        key = (part.devices, part.shares)
        if key not in self._took:
            each = [self._segment_s(index, part) for index in self._chain]
            self._took[key] = np.concatenate([[0.0], np.cumsum(each)])
        return self._took[key]

    def _segment_s(self, index: int, part: LayoutStage) -> float:
        known, total = self._costs.seconds((index,)), sum(part.shares)
        found = 0.0
        for number, share in zip(part.devices, part.shares, strict=True):
            device = self._costs.problem.device[number]
            seconds = sum(fixed + each * self._samples for fixed, each in known[device.type][:3])
            found = max(found, seconds / device.speed * share / total)
        return found

    def _link(self, parts: Sequence[LayoutStage], number: int) -> _Array:
        """Return a micro-batch's seconds on the slower direction of the link before a stage, by the stage's start."""
        if not number:
            return np.zeros(len(self._chain) + 1)
        bandwidth, links = np.zeros(2), self._costs.problem.links.bandwidth_bps
        for a in parts[number - 1].devices:  # each pair carries its part of the micro-batches
            for b in parts[number].devices:
                bandwidth += (links[a][b] if a != b else np.inf, links[b][a] if a != b else np.inf)
        return np.asarray((self._crossing / bandwidth[:, None]).max(axis=0))


def exchanged(parts: tuple[LayoutStage, ...], one: int, other: int) -> tuple[LayoutStage, ...]:
    """Return stages of which two have exchanged their devices; segments and activation policies stay."""
    found, a, b = list(parts), parts[one], parts[other]
    found[one] = a._replace(devices=b.devices, shares=b.shares)
    found[other] = b._replace(devices=a.devices, shares=a.shares)
    return tuple(found)
