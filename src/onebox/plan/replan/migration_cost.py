"""Data moved by a change of plan, and exchanges of like devices that reduce it. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from onebox.plan.model.layout import LayoutStage, StageLayout
from onebox.plan.model.problem import Problem
from onebox.plan.replan.changes import holders


class MigrationCost:
    """Counts the bytes moved by changes of one layout.

    Args:
        problem: Segments and links.
        now: The layout in force.
    """

    def __init__(self, problem: Problem, now: StageLayout) -> None:
        self._problem, self._before = problem, holders(now)
        self.sizes = [segment.state_bytes + segment.parameter_bytes * now.late for segment in problem.segments]

    def brought(self, index: int, part: LayoutStage) -> int:
        """Return the bytes of a segment that the devices of a stage receive if it joins that stage."""
        return sum(self.sizes[index] for device in part.devices if device not in self._before[index])

    def links(self, layout: StageLayout) -> dict[tuple[int, int], int]:
        """Return the bytes moved over each link by a change to a layout."""
        moved: dict[tuple[int, int], int] = {}
        for index, devices in enumerate(holders(layout)):
            for device in devices:
                if device not in self._before[index]:
                    link = (self._before[index][0], device)
                    moved[link] = moved.get(link, 0) + self.sizes[index]
        return moved

    def total(self, layout: StageLayout) -> int:
        """Return the bytes moved between devices by a change to a layout."""
        return sum(self.brought(index, part) for part in layout.parts for index in part.segments)

    def longest_s(self, moved: Mapping[tuple[int, int], int]) -> float:
        """Return the seconds of the slowest link."""
        return max((self._problem.links.seconds(*link, size) for link, size in moved.items()), default=0.0)

    def renamed(self, layout: StageLayout, kinds: Mapping[int, Hashable]) -> StageLayout:
        """Return a layout in which like devices have changed places so that as little as possible moves.

        Args:
            layout: The layout.
            kinds: A key for each device, equal for those that are interchangeable.
        """
        names: dict[int, int] = {}
        groups: dict[Hashable, list[int]] = {}
        for device, kind in kinds.items():
            groups.setdefault(kind, []).append(device)
        for group in groups.values():
            work = {device: self._segments(layout, device) for device in group}
            costs = [[self._brought_to(other, work[device]) for other in group] for device in group]
            names |= {group[row]: group[column] for row, column in enumerate(assigned(costs))}
        return layout.with_devices(names)

    def _segments(self, layout: StageLayout, device: int) -> list[int]:
        return [index for part in layout.parts if device in part.devices for index in part.segments]

    def _brought_to(self, device: int, segments: Sequence[int]) -> int:
        return sum(self.sizes[index] for index in segments if device not in self._before[index])


def assigned(costs: Sequence[Sequence[int]]) -> list[int]:
    """Return the column of each row in an assignment of least total cost.

    The method is Kuhn's (1955, doi:10.1002/nav.3800020109). Rows are added one by one; each takes the cheapest
    augmenting path over the columns of other rows, at reduced costs. ``scipy.optimize.linear_sum_assignment`` does the
    same, but its import alone takes longer than a decision.

    Args:
        costs: A square table.

    Example:
        >>> assigned([[4, 1, 3], [2, 0, 5], [3, 2, 2]])
        [1, 0, 2]
    """
    size = len(costs)
    row_price, price, owner = [0.0] * size, [0.0] * (size + 1), [-1] * (size + 1)
    for row in range(size):
        owner[size], column = row, size  # an extra column, from which the augmenting path begins
        least, came, seen = [float("inf")] * size, [size] * size, set[int]()
        while owner[column] >= 0:
            seen.add(column)
            other, best, step = owner[column], -1, float("inf")
            for j in (j for j in range(size) if j not in seen):
                reduced = costs[other][j] - row_price[other] - price[j]
                if reduced < least[j]:
                    least[j], came[j] = reduced, column
                if least[j] < step:
                    step, best = least[j], j
            for j in seen:
                row_price[owner[j]] += step
                price[j] -= step
            least = [one if j in seen else one - step for j, one in enumerate(least)]
            column = best
        while column != size:
            owner[column] = owner[came[column]]
            column = came[column]
    found = [0] * size
    for column, row in enumerate(owner[:size]):
        found[row] = column
    return found
