"""Cuts of a chain over devices in a given order, by dynamic programming, and which order is promising. Pure.

This is what local search begins from: a stage takes what its device takes for a micro-batch, a link what crosses the
cut, and a step about ``(count - 1)`` times the slowest of these and once all of them (Narayanan et al. 2019,
doi:10.1145/3341301.3359646, section 3.1, find the least slowest one in the same way). Another one finds the cuts that
move least of those whose slowest stage is about as quick as that.
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
"""By these factors the slowest stage may exceed the least possible while the sum of all is made small."""

NEARLY = 1.01
"""What takes no longer than something else by this factor is as good, and what moves less is better."""

_ROUNDS = 8
"""So often the best exchange of two devices, one of which may be idle, is followed at most."""


class CutSolver:
    """Cuts of one chain.

    Args:
        costs: Costs of the segments.
        layout: Stages that are all of the same kind, each device with one of them.
        count: Micro-batches of a step.
        moved: Counts what a change moves.
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
        """Yield the layout with other cuts, for the devices as they are and for those in the most promising order."""
        parts = self._layout.parts
        yield from self._cut(parts)
        better = self._reordered(parts)
        if better != parts:
            yield from self._cut(better)

    def quickest(self) -> StageLayout:
        """Return the layout with the cuts of which the slowest stage is quickest, for the devices as they are."""
        return next(self._cut(self._layout.parts), self._layout)

    def _cut(self, parts: Sequence[LayoutStage]) -> Iterator[StageLayout]:
        """Yield layouts with the quickest slowest stage, then with less in all, then with less that moves."""
        least = self._solve(parts, np.inf)
        if least is None:
            return
        slowest, _ = self._takes(parts, least)
        for factor in _LOOSE:
            yield self._with(parts, self._solve(parts, slowest * factor * (1 + 1e-9), self._all_s(parts)))
        for factor in (1.0, NEARLY):
            yield self._with(parts, self._solve(parts, slowest * factor * (1 + 1e-9), self._brought(parts)))

    def _with(self, parts: Sequence[LayoutStage], ends: list[int] | None) -> StageLayout:
        """Return the layout with stages that end there."""
        assert ends is not None, "what is within a limit is so whatever is summed up"
        ranges = zip((0, *ends), ends, parts, strict=False)
        return self._layout._replace(parts=tuple(p._replace(segments=self._chain[a:b]) for a, b, p in ranges))

    def _reordered(self, parts: tuple[LayoutStage, ...]) -> tuple[LayoutStage, ...]:
        """Return the stages on the devices in the order that exchanges of two lead to."""
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
        """Return the bytes that are moved at least, where the slowest stage is to be about as quick as it can be."""
        return min((self._moved.total(layout) for layout in self._cut(parts)), default=0)

    def _relieved(self, parts: tuple[LayoutStage, ...]) -> Iterator[tuple[LayoutStage, ...]]:
        """Yield the stages with one device replaced by one that has none so far."""
        used = {device for part in parts for device in part.devices}
        for number, part in enumerate(parts):
            for idle in self._costs.problem.device.keys() - used:
                changed = part._replace(devices=(idle, *part.devices[1:]))
                yield (*parts[:number], changed, *parts[number + 1 :])

    def _estimate(self, parts: Sequence[LayoutStage]) -> float:
        """Return about what a step takes with the best cuts."""
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
        """Return where the stages end, so that the slowest is quickest, or a sum is least with none above a limit.

        Args:
            parts: The stages.
            most: The limit, in seconds of a micro-batch.
            weights: For each stage what the segments up to each place of the chain weigh, and what a cut there does.
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
        """Return the bytes that each stage's devices would get; a cut has none."""
        none = np.zeros(len(self._chain) + 1)
        each = ([self._moved.brought(index, part) for index in self._chain] for part in parts)
        return [np.concatenate([[0.0], np.cumsum(one)]) for one in each], [none] * len(parts)

    def _takes(self, parts: Sequence[LayoutStage], ends: Sequence[int]) -> tuple[float, float]:
        """Return seconds of the slowest stage or link, and of all of them, for a micro-batch."""
        took = []
        for number, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
            whole = self._stage(parts[number])
            took += [float(whole[end] - whole[start]), float(self._link(parts, number)[start])]
        return max(took), sum(took)

    def _stage(self, part: LayoutStage) -> _Array:
        """Return seconds of a micro-batch on the devices of a stage, up to each place of the chain."""
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
        """Return seconds that the slower direction before a stage is taken for a micro-batch, by where it begins."""
        if not number:
            return np.zeros(len(self._chain) + 1)
        bandwidth, links = np.zeros(2), self._costs.problem.links.bandwidth_bps
        for a in parts[number - 1].devices:  # each pair carries its part of the micro-batches
            for b in parts[number].devices:
                bandwidth += (links[a][b] if a != b else np.inf, links[b][a] if a != b else np.inf)
        return np.asarray((self._crossing / bandwidth[:, None]).max(axis=0))


def exchanged(parts: tuple[LayoutStage, ...], one: int, other: int) -> tuple[LayoutStage, ...]:
    """Return stages of which two have exchanged their devices; segments and policies stay where they are."""
    found, a, b = list(parts), parts[one], parts[other]
    found[one] = a._replace(devices=b.devices, shares=b.shares)
    found[other] = b._replace(devices=a.devices, shares=a.shares)
    return tuple(found)
