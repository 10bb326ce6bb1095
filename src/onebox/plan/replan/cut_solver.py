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

from onebox.plan.hill_climbing import climb
from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.layout import LayoutStage, StageLayout
from onebox.plan.replan.migration_cost import MigrationCost
from onebox.plan.search.partition import CutWeights, SegmentChain

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
        order = tuple(index for part in layout.parts for index in part.segments)
        self._chain = SegmentChain(costs, order, layout.micro_batch or 1)

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
        least = self._chain.best_cuts(parts)
        if least is None:
            return
        slowest, _ = self._takes(parts, least)
        for factor in _LOOSE:
            yield self._with(parts, self._chain.best_cuts(parts, slowest * factor * (1 + 1e-9), self._all_s(parts)))
        for factor in (1.0, NEARLY):
            yield self._with(parts, self._chain.best_cuts(parts, slowest * factor * (1 + 1e-9), self._brought(parts)))

    def _with(self, parts: Sequence[LayoutStage], ends: list[int] | None) -> StageLayout:
        """Return the layout with the given ends of stages."""
        assert ends is not None, "what is within a limit is so whatever is summed up"
        sizes = [end - start for start, end in zip((0, *ends), ends, strict=False)]
        return self._layout._replace(parts=tuple(parts)).with_sizes(sizes)

    def _reordered(self, parts: tuple[LayoutStage, ...]) -> tuple[LayoutStage, ...]:
        """Return the stages with their devices reordered by successive exchanges of two."""
        rounds = iter(range(_ROUNDS))

        def improved(at: tuple[float, tuple[LayoutStage, ...]]) -> tuple[float, tuple[LayoutStage, ...]] | None:
            others = [exchanged(at[1], *pair) for pair in combinations(range(len(parts)), 2)]
            others += list(self._relieved(at[1]))
            values = [self._estimate(other) for other in others]
            if not values or (least := min(values)) >= at[0] * (1 - 1e-6):
                return None
            near = [other for other, one in zip(others, values, strict=True) if one <= least * NEARLY]
            return least, min(near, key=self._least_moved) if len(near) > 1 else near[0]

        return climb((self._estimate(parts), parts), improved, lambda: next(rounds, None) is None)[1]

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
        ends = self._chain.best_cuts(parts)
        if ends is None:
            return float("inf")
        slowest, path = self._takes(parts, ends)
        return (self._count - 1) * slowest + path

    def _all_s(self, parts: Sequence[LayoutStage]) -> CutWeights:
        """Return the seconds of a micro-batch on each stage, and on the link before it."""
        links = [self._chain.link_s(parts, number) for number in range(len(parts))]
        return [self._chain.stage_s(part) for part in parts], links

    def _brought(self, parts: Sequence[LayoutStage]) -> CutWeights:
        """Return the bytes that each stage's devices would receive; a cut has none."""
        none = np.zeros(self._chain.length + 1)
        each = ([self._moved.brought(index, part) for index in self._chain.order] for part in parts)
        return [np.concatenate([[0.0], np.cumsum(one)]) for one in each], [none] * len(parts)

    def _takes(self, parts: Sequence[LayoutStage], ends: Sequence[int]) -> tuple[float, float]:
        """Return the seconds of a micro-batch on the slowest stage or link, and on all of them."""
        took = []
        for number, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
            whole = self._chain.stage_s(parts[number])
            took += [float(whole[end] - whole[start]), float(self._chain.link_s(parts, number)[start])]
        return max(took), sum(took)


def exchanged(parts: tuple[LayoutStage, ...], one: int, other: int) -> tuple[LayoutStage, ...]:
    """Return stages of which two have exchanged their devices; segments and activation policies stay."""
    found, a, b = list(parts), parts[one], parts[other]
    found[one] = a._replace(devices=b.devices, shares=b.shares)
    found[other] = b._replace(devices=a.devices, shares=a.shares)
    return tuple(found)
