"""Stages on groups of consecutive devices of a row, by dynamic programming. Pure.

Given the order of the devices, from the first stage to the last, a stage takes some that follow one another as its
replicas. For a bottleneck time T, stages are laid from the last device to the first (:func:`row_partitions`): of all
ways to use the last `j` devices the one that gets furthest along the chain is kept. The replicas from a stage to the
end, which decide how many micro-batches 1F1B keeps in flight, are the devices laid so far; so the program is exact for
its row, but for the seconds of links, and takes the square of the number of devices for each T, in vectors. T is found
by bisection. Larger groups make fewer stages, with fewer actions to simulate and to execute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.layout import LayoutStage

_PRECISION = 0.004
"""Relative precision of the bisection."""

_SLOWEST = 64.0
"""Multiple of the least T up to which it is looked for."""

_STEP = 1.3
"""Factor by which T is raised before the bisection."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RowLimits:
    """Constraints of the stages.

    Args:
        samples: Samples of a micro-batch.
        count: Micro-batches of a step.
        widest: Maximum number of devices of a stage.
        spread: Maximum ratio of the throughputs of a stage's devices.
        versions: Versions of the weights that a device holds.
    """

    samples: int
    count: int
    widest: int
    spread: float = np.inf
    versions: int = 1


class DeviceOrder:
    """A chain of segments, and a row of devices for it.

    Args:
        costs: Costs of the segments.
        order: The segments, in an order in which values go from earlier to later ones.
        row: The devices, from the first stage to the last.
        limits: Constraints of the stages.

    Attributes:
        rounds: Number of steps of the program so far, each of which extends all layouts by a device.
    """

    def __init__(self, costs: CostModel, order: Sequence[int], row: Sequence[int], limits: RowLimits) -> None:
        self._costs, self._order, self._limits = costs, tuple(order), limits
        self._row = tuple(row[::-1])  # from the last stage to the first, as it is laid
        self.rounds = 0
        self._call_s = 2 * costs.problem.call_s
        powers = np.array([costs.power(number, limits.samples) for number in self._row])
        self._work = self._fractions(powers)
        self._held, self._saved, self._late, self._kept, self._most = self._memory()
        # Under zb-h1 a stage may defer as many gradients of weights as the first one has micro-batches in flight.
        self._deferred = min(limits.count, len(row)) if "zb-h1" in costs.problem.schedules else 0
        caps = costs.problem.capacity_bytes
        self._room = np.array([float(caps.get(number, np.inf)) for number in self._row])
        self._least_s = 1.0 / float(powers.sum())
        self._group(powers)

    def _fractions(self, powers: Floats) -> Floats:
        """Return prefix sums of the segments' parts of the work, on the mean of the devices."""
        device, samples = self._costs.problem.device, self._limits.samples
        total = np.zeros(len(self._order))
        for kind in self._costs.types:
            weight = sum(power for power, number in zip(powers, self._row, strict=True) if device[number].type == kind)
            lines = self._costs.lines(kind)[list(self._order)]
            each = lines[:, 0] + lines[:, 1] * samples
            total += weight * each / max(float(each.sum()), 1e-300)
        return np.concatenate([[0.0], np.cumsum(total / max(float(total.sum()), 1e-300))])

    def _memory(self) -> tuple[Floats, Floats, Floats, Floats, float]:
        """Return prefix sums of held, saved and late bytes, bytes kept of values that cross each cut, and of work."""
        samples, more = self._limits.samples, self._limits.versions - 1
        sizes = [self._costs.sizes((index,)) for index in self._order]
        held = np.cumsum([0.0, *(size.state + more * size.parameter for size in sizes)])
        saved = np.cumsum([0.0, *(float(size.saved * samples) for size in sizes)])
        late = np.cumsum([0.0, *(float(size.late * samples) for size in sizes)])
        place = {index: position for position, index in enumerate(self._order)}
        steps = np.zeros(len(self._order) + 2)
        for value in self._costs.problem.values:
            if value.kept and value.consumers:
                steps[place[value.source] + 1] += value.forward_bytes * samples
                steps[max(place[consumer] for consumer in value.consumers) + 1] -= value.forward_bytes * samples
        work = max(max(size.forward_work, size.backward_work + size.late) for size in sizes) * samples
        return held, saved, late, np.cumsum(steps), float(work)

    def _group(self, powers: Floats) -> None:
        """Compute for each group of devices its throughput, its largest share, and its least memory.

        The throughput is that of the device which the rounding of shares to whole micro-batches favours least; it is 0
        where a device would have none, or where the devices differ too much.
        """
        size, count, widest = len(powers), self._limits.count, self._limits.widest
        self._power = np.zeros((size + 1, size + 1))
        self._share = np.ones((size + 1, size + 1))
        self._least_room = np.zeros((size + 1, size + 1))
        for first in range(size):
            own = powers[first : first + widest]
            inside = np.tril(np.ones((len(own), len(own)), dtype=np.bool_))
            turns = np.where(inside, np.rint(count * own[None, :] / np.cumsum(own)[:, None]), 0.0)
            slowest = (turns / (count * own)[None, :]).max(axis=1)
            idle = (inside & (turns < 1)).any(axis=1)
            idle |= np.maximum.accumulate(own) > self._limits.spread * np.minimum.accumulate(own)
            until = slice(first + 1, first + len(own) + 1)
            self._power[first, until] = np.where(idle, 0.0, 1.0 / np.where(idle, 1.0, slowest))
            self._share[first, until] = turns.max(axis=1) / count
            self._least_room[first, until] = np.minimum.accumulate(self._room[first : first + widest])

    def partition(self, narrowest: int) -> tuple[LayoutStage, ...]:
        """Return the stages for the least T; empty if none fit.

        Args:
            narrowest: Minimum number of devices of a stage.
        """
        high = self._least_s * _SLOWEST
        found = self._lay(high, narrowest)
        if not found:
            return ()
        low, tried = self._least_s, self._least_s * (1 + _PRECISION)
        while tried < high:
            if nearer := self._lay(tried, narrowest):
                high, found = tried, nearer
            else:
                low, tried = tried, tried * _STEP
        while high > low * (1 + _PRECISION) * (1 + 1e-9):
            middle = (low * high) ** 0.5
            nearer = self._lay(middle, narrowest)
            if nearer:
                high, found = middle, nearer
            else:
                low = middle
        return tuple(self._stages(found))

    def _lay(self, bottleneck_s: float, narrowest: int) -> list[tuple[int, int, int, int]]:
        """Return the groups and cuts of stages of at most a bottleneck time, from the last to the first stage.

        Returns:
            For each stage its first device, the end of its devices, its first segment and the end of its segments;
            empty if not all segments fit.
        """
        work, segments = self._work, len(self._order)
        reached = np.full(len(self._row) + 1, segments)
        before = np.full(len(self._row) + 1, -1)
        for end in range(1, len(self._row) + 1):
            self.rounds += 1
            reached[end] = reached[end - 1]
            first = np.arange(max(0, end - self._limits.widest), end - narrowest + 1)
            if not len(first):
                continue
            upto = reached[first]
            share = self._share[first, end]
            allowed = self._power[first, end] * np.maximum(bottleneck_s - self._call_s * share, 0.0)
            start = np.searchsorted(work, work[upto] - allowed * (1 + 1e-12))
            start = self._fitting(start, upto, np.ceil(end * share - 1e-9), self._least_room[first, end])
            best = len(start) - 1 - int(np.argmin(start[::-1])) if narrowest == 1 else int(np.argmin(start))
            if start[best] < reached[end]:
                reached[end], before[end] = start[best], first[best]
                if not reached[end]:
                    return self._path(reached, before, end)
        return []

    def _fitting(self, start: Ints, upto: Ints, in_flight: Floats, room: Floats) -> Ints:
        """Return the first segments of the longest stages that fit the memory of their devices."""
        in_flight = np.minimum(in_flight, self._limits.count)

        def lacks(at: Ints, some: NDArray[np.bool_] | slice) -> NDArray[np.bool_]:
            ends, times = upto[some], in_flight[some]
            saved = self._saved[ends] - self._saved[at] + self._kept[at]
            late = self._late[ends] - self._late[at]
            flying = times * saved + np.maximum(self._deferred - times, 0) * late
            lacking: NDArray[np.bool_] = self._held[ends] - self._held[at] + flying + self._most > room[some]
            return lacking

        beyond = lacks(start, slice(None)) & (start < upto)
        if not beyond.any():
            return start
        low, high = start[beyond], upto[beyond]  # the low one lacks memory, the high one is empty
        while (open_ := high - low > 1).any():
            middle = np.where(open_, (low + high) // 2, high)
            over = lacks(middle, beyond) & (middle < upto[beyond])
            low, high = np.where(over & open_, middle, low), np.where(over | ~open_, high, middle)
        start = start.copy()
        start[beyond] = high
        return start

    @staticmethod
    def _path(reached: Ints, before: Ints, end: int) -> list[tuple[int, int, int, int]]:
        found = []
        while end:
            if before[end] < 0:
                end -= 1
                continue
            first = int(before[end])
            found.append((first, end, int(reached[end]), int(reached[first])))
            end = first
        return found[::-1]

    def _stages(self, groups: Sequence[tuple[int, int, int, int]]) -> Iterator[LayoutStage]:
        for first, end, start, until in groups[::-1]:
            devices = tuple(sorted(self._row[first:end]))
            shares = self._costs.shares(devices, self._limits.samples) if len(devices) > 1 else (1.0,)
            yield LayoutStage(self._order[start:until], devices, shares)
