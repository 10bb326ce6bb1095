"""What stages cost, summed up from their segments. Pure; sums are remembered, as planning asks for the same again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from onebox.plan.inputs import Problem
from onebox.plan.layout import Layout, layout_of, owners
from onebox.plan.plan import MicroBatch, Plan
from onebox.plan.shares import apportion
from onebox.plan.work import Edge, StageWork, Work


class Seconds(NamedTuple):
    """Times of some segments on one type of device, at speed 1: fixed and per-sample parts, then the update's.

    Args:
        forward: Seconds of forward.
        inputs: Seconds of the gradient of the inputs.
        weights: Seconds of the gradients of the parameters.
        update_s: Seconds of the optimizer step.
    """

    forward: tuple[float, float]
    inputs: tuple[float, float]
    weights: tuple[float, float]
    update_s: float


class Sizes(NamedTuple):
    """Bytes of some segments; all but the first two are for each sample."""

    parameter: int
    state: int
    saved: int
    late: int
    forward_work: int
    backward_work: int


class Costs:
    """Costs of a problem's segments.

    Args:
        problem: What it is about.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.types = sorted({device.type for device in problem.devices})
        lines = [
            [
                part
                for kind in self.types
                for time in (segment.forward_s[kind], segment.input_s[kind], segment.weight_s[kind])
                for part in (time.fixed_s, time.sample_s)
            ]
            + [segment.update_s.get(kind, 0.0) for kind in self.types]
            for segment in problem.segments
        ]
        self._lines = np.array(lines, dtype=np.float64)
        names = ("parameter", "state", "saved", "late", "forward_work", "backward_work")
        self._sizes = np.array([[getattr(s, f"{name}_bytes") for name in names] for s in problem.segments], np.int64)
        self._ties: list[list[int]] = [[] for _ in problem.segments]
        for number, tie in enumerate(problem.ties):
            for index in set(tie.segments):
                self._ties[index].append(number)
        self._seconds: dict[tuple[int, ...], dict[str, Seconds]] = {}
        self._bytes: dict[tuple[int, ...], Sizes] = {}

    def seconds(self, segments: tuple[int, ...]) -> dict[str, Seconds]:
        """Return the times of some segments by type of device."""
        if segments not in self._seconds:
            total = self._lines[sorted(segments)].sum(axis=0).tolist()
            base = 6 * len(self.types)
            self._seconds[segments] = {
                kind: Seconds(
                    (total[6 * n], total[6 * n + 1]),
                    (total[6 * n + 2], total[6 * n + 3]),
                    (total[6 * n + 4], total[6 * n + 5]),
                    total[base + n],
                )
                for n, kind in enumerate(self.types)
            }
        return self._seconds[segments]

    def sizes(self, segments: tuple[int, ...]) -> Sizes:
        """Return the bytes of some segments, parameters that they share with others included."""
        if segments not in self._bytes:
            rows = self._sizes[list(segments)]
            parameter, state, saved, late = rows[:, :4].sum(axis=0).tolist()
            forward, backward = rows[:, 4:].max(axis=0).tolist()
            held = [self.problem.ties[number] for number in self.ties(segments)]
            parameter += sum(tie.parameter_bytes for tie in held)
            state += sum(tie.state_bytes for tie in held)
            self._bytes[segments] = Sizes(parameter, state, saved, late, forward, backward)
        return self._bytes[segments]

    def power(self, number: int, samples: int) -> float:
        """Return how many micro-batches of the whole model a device computes in a second.

        Args:
            number: The device.
            samples: Samples of a micro-batch.
        """
        device = self.problem.device[number]
        whole = self.seconds(tuple(range(len(self.problem.segments))))[device.type]
        return device.speed / max(sum(fixed + each * samples for fixed, each in whole[:3]), 1e-12)

    def ties(self, segments: tuple[int, ...]) -> set[int]:
        """Return the numbers of the ties that some segments have a part in."""
        return {number for index in segments for number in self._ties[index]}

    def edges(self, where: Sequence[int], samples: int) -> tuple[tuple[Edge, ...], list[int]]:
        """Return the values between stages, and for each stage the bytes of received values that it keeps.

        Args:
            where: The stage of each segment.
            samples: Samples of a micro-batch.
        """
        found: dict[tuple[int, int], list[int]] = {}
        kept = [0] * (max(where) + 1)
        for value in self.problem.values:
            source = where[value.source]
            for target in {where[consumer] for consumer in value.consumers} - {source}:
                both = found.setdefault((source, target), [0, 0])
                both[0] += value.forward_bytes * samples
                both[1] += value.backward_bytes * samples
                kept[target] += value.forward_bytes * samples * value.kept
        edges = (
            Edge(source=a, target=b, forward_bytes=f, backward_bytes=r) for (a, b), (f, r) in sorted(found.items())
        )
        return tuple(edges), kept

    def work(self, layout: Layout, parts: Sequence[MicroBatch]) -> tuple[Work, list[float]]:
        """Return what the stages of a layout cost, and the micro-batches' sizes as fractions of the largest.

        Args:
            layout: The stages.
            parts: The micro-batches.
        """
        largest = layout.micro_batch or max(part.size for part in parts)
        where = owners(layout.parts, len(self.problem.segments))
        edges, kept = self.edges(where, largest)
        stages = tuple(self._stage(layout, stage, largest, parts, kept[stage]) for stage in range(len(layout.parts)))
        problem = self.problem
        work = Work(
            stages=stages,
            edges=edges,
            links=problem.links,
            capacity_bytes=problem.capacity_bytes,
            call_s=problem.call_s,
        )
        return work, [part.size / largest for part in parts]

    def _stage(
        self, layout: Layout, stage: int, largest: int, micro_batches: Sequence[MicroBatch], kept: int
    ) -> StageWork:
        part = layout.parts[stage]
        by_type, sizes = self.seconds(part.segments), self.sizes(part.segments)
        tied = self._tied_s(layout, stage)
        times: list[dict[int, float]] = [{}, {}, {}, {}]
        for turn, number in enumerate(part.devices):
            device = self.problem.device[number]
            found = by_type[device.type]
            # A replica with one micro-batch of its own size: the fixed parts must not shrink with it.
            own = largest if layout.micro_batch is not None else _own(part.shares, turn, micro_batches)
            for place, (fixed, each) in enumerate(found[:3]):
                times[place][number] = (fixed + each * own) * (largest / own) / device.speed
            times[3][number] = found.update_s / device.speed + tied
        return StageWork(
            forward_s=times[0],
            input_s=times[1],
            weight_s=times[2],
            update_s=times[3],
            state_bytes=sizes.state,
            gradient_bytes=sizes.parameter,
            saved_bytes=sizes.saved * largest + kept,
            late_bytes=sizes.late * largest,
            forward_work_bytes=sizes.forward_work * largest,
            backward_work_bytes=sizes.backward_work * largest,
        )

    def _tied_s(self, layout: Layout, stage: int) -> float:
        """Return how long a stage takes to sum the gradients of its tied parameters with the other stages."""
        total = 0.0
        for number in self.ties(layout.parts[stage].segments):
            tie = self.problem.ties[number]
            holders = [part.devices[0] for part in layout.parts if not set(tie.segments).isdisjoint(part.segments)]
            places = list(dict.fromkeys(holders))
            total += self.problem.links.ring_seconds([(place,) for place in places], tie.parameter_bytes)
        return total


def _own(shares: Sequence[float], turn: int, micro_batches: Sequence[MicroBatch]) -> int:
    """Return the size of a replica's one micro-batch; replicas with a share too small for a sample have none."""
    batch = sum(part.size for part in micro_batches)
    return max(1, apportion(batch, shares)[turn])


def stage_work(problem: Problem, plan: Plan) -> Work:
    """Return what the stages of a plan cost.

    Times, bytes and edges are for a micro-batch of the plan's size, or where the plan sets none for the largest share
    of a replica. A parameter that stages share is held by each of them, and each one's update takes as long as the sum
    of its gradients over them, too.

    Args:
        problem: Segments, values, devices, links.
        plan: The plan.

    Raises:
        UsageError: The plan is none for this problem.
    """
    return Costs(problem).work(layout_of(problem, plan), plan.micro_batches(problem.batch))[0]
