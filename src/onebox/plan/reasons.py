"""What each segment's activations cost in a plan, what is saved, what is paid for that, and why. Pure.

It says in words what :mod:`onebox.plan.fates` has weighed: the time to compute again against the time to move that does
not hide under the computation of a neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from onebox.plan.costs import Costs
from onebox.plan.inputs import Problem
from onebox.plan.layout import Part, layout_of
from onebox.plan.plan import Plan, Stage


@dataclass(frozen=True, kw_only=True)
class SegmentMemory:
    """The activations of one segment, for one micro-batch.

    Args:
        segment: Its name.
        stage: The stage that it is in.
        devices: The devices of that, all replicas.
        fate: What becomes of what it makes: the stage's fate, or ``cpu`` on the host's processor beside its device.
        would_keep_bytes: What it would hold on a device from its forward to its backward.
        saved_bytes: Of these, what its fate spares the device.
        paid_s: Seconds of a micro-batch that its fate costs.
        why: Why this fate, for a person.
    """

    segment: str
    stage: int
    devices: tuple[int, ...]
    fate: str
    would_keep_bytes: int
    saved_bytes: int
    paid_s: float
    why: str


def segment_memory(problem: Problem, plan: Plan) -> tuple[SegmentMemory, ...]:
    """Return what becomes of each segment's activations, in the order of the segments.

    Args:
        problem: What the plan was made or predicted from.
        plan: The plan.

    Raises:
        UsageError: The plan is none for this problem.
    """
    layout, costs = layout_of(problem, plan), Costs(problem)
    samples = plan.micro_batch or max(part.size for part in plan.micro_batches(problem.batch))
    found: list[SegmentMemory] = []
    stages = list(enumerate(zip(plan.stages, layout.parts, strict=True)))
    for _, group in groupby(stages, key=lambda item: (item[1][0].replicas, item[1][0].shares)):
        block = list(group)
        frees = any(stage.fate != "keep" for _, (stage, _) in block)
        for turn, (number, (stage, part)) in enumerate(block):
            own = [_Segment(problem, costs, index, part, samples) for index in part.segments]
            after = block[turn + 1][1][1] if turn + 1 < len(block) else None
            waits_s = _waits_s(costs, sum(one.moves_s for one in own), after, samples)
            moves_s = sum(one.moves_s for one in own) or 1.0
            found += [one.fate(number, stage, frees, after is None, waits_s * one.moves_s / moves_s) for one in own]
    order = problem.index
    return tuple(sorted(found, key=lambda one: order[one.segment]))


def _waits_s(costs: Costs, moves_s: float, after: Part | None, samples: int) -> float:
    """Return what does not hide of a stage's transfers: one way under forward of the next one, back under backward.

    Where several micro-batches are in flight, others hide more of it.
    """
    if after is None:
        return moves_s
    device = costs.problem.device[after.devices[0]]
    times = costs.seconds(after.segments)[device.type][:3]
    forward_s, input_s, weight_s = ((fixed + each * samples) / device.speed for fixed, each in times)
    backward_s = input_s + weight_s + (forward_s if after.fate == "recompute" else 0.0)
    return max(0.0, moves_s / 2 - forward_s) + max(0.0, moves_s / 2 - backward_s)


class _Segment:
    """What may become of a segment's activations on a device, and what that would cost."""

    def __init__(self, problem: Problem, costs: Costs, index: int, part: Part, samples: int) -> None:
        self._problem = problem
        self._spec = problem.device[part.devices[0]]
        self._name = problem.segments[index].name
        fixed, each = costs.seconds((index,))[self._spec.type][0]
        self.again_s = (fixed + each * samples) / self._spec.speed
        self.keeps_bytes = problem.segments[index].saved_bytes * samples
        self.moves_s = 2 * self.keeps_bytes / self._spec.host_bps
        self._given_bytes = samples * sum(
            value.forward_bytes
            for value in problem.values
            if value.source == index and value.kept and not set(value.consumers) <= set(part.segments)
        )

    def fate(self, number: int, stage: Stage, frees: bool, last: bool, waits_s: float) -> SegmentMemory:
        """Return what has become of it.

        Args:
            number: The number of its stage.
            stage: The stage.
            frees: Whether some stage of the same devices keeps less than it could.
            last: Whether no stage of the same devices comes after it.
            waits_s: Its part of what is waited for of the transfers of its stage.
        """
        devices = tuple(device for replica in stage.replicas for device in replica)
        saved, paid, fate, why = 0, 0.0, str(stage.fate), "there is room"
        again, moves = f"{_ms(self.again_s)} to compute it again", f"{_ms(self.moves_s)} to move it there and back"
        if stage.fate == "recompute":
            saved, paid = max(0, self.keeps_bytes - self._given_bytes), self.again_s
            why = f"{again}, against {moves}"
        elif stage.fate == "offload":
            saved, paid = self.keeps_bytes, waits_s
            why = f"{moves}, of which {_ms(waits_s)} do not hide; against {again}"
        elif self._beside():
            fate, why = "cpu", "on the host's processor, so that the device beside it holds nothing of it"
        elif frees:
            cheapest = min(self.again_s, self.moves_s)
            why = "its backward comes right after its forward" if last else f"freeing it would cost {_ms(cheapest)}"
        return SegmentMemory(
            segment=self._name,
            stage=number,
            devices=devices,
            fate=fate,
            would_keep_bytes=self.keeps_bytes,
            saved_bytes=saved,
            paid_s=paid,
            why=why,
        )

    def _beside(self) -> bool:
        """Tell whether its device is the processor beside another kind of device of the same host."""
        spec = self._spec
        others = [one for one in self._problem.devices if one.host == spec.host and one.type != spec.type]
        return spec.processor and any(not one.processor for one in others)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
