"""Once-a-step work in the steady state: sums of gradients, and updates. Private to the folder."""

from __future__ import annotations

from typing import NamedTuple

from onebox.plan.simulate.instance import SchedulingInstance

UPDATE = "U"
"""The kind of a turn that is a stage's optimizer step; its micro-batch is the first one of the step."""

Turn = tuple[str, int, int]
"""An entry of a device's row: an action, or an update of a stage."""


class GradientSum(NamedTuple):
    """A sum of a stage's gradients over its replicas.

    Args:
        stage: The stage.
        micro_batch: The first micro-batch of the step of the gradients.
        start_s: Its start.
        end_s: Its end.
    """

    stage: int
    micro_batch: int
    start_s: float
    end_s: float


class GradientSums:
    """Gradients of steps whose micro-batches are numbered consecutively: when all of a stage's are there, and summed.

    Replicas sum their gradients in rings beside other actions, one stage at a time on each device.

    Args:
        instance: The scheduling problem of all steps.
        count: Micro-batches of a step.

    Attributes:
        ready: The time of each complete sum of a stage in a step, by ``stage * steps + step``.
        missing: Number of its missing gradients.
        made: The sums over replicas.
        updates: Of each update the device, the stage, the first micro-batch of its step, start and end.
    """

    def __init__(self, instance: SchedulingInstance, count: int) -> None:
        self._instance, self._count = instance, count
        self._steps = instance.count // count
        self._members: list[list[int]] = [[] for _ in instance.work.stages]
        self._ring_s: list[float] = []
        replicas: list[list[tuple[int, ...]]] = [[] for _ in instance.work.stages]
        for slot in instance.slots:
            self._members[slot.stage] += slot.members
            replicas[slot.stage].append(tuple(instance.devices[member] for member in slot.members))
        for stage, work in enumerate(instance.work.stages):
            several = len(replicas[stage]) > 1
            ring_s = instance.work.links.ring_seconds(replicas[stage], work.gradient_bytes) if several else 0.0
            self._ring_s.append(ring_s)
        self.replicated = [len(each) > 1 for each in replicas]
        self.update_s = [
            [work.update_s.get(device, 0.0) for device in instance.devices] for work in instance.work.stages
        ]
        self.ready = [0.0] * (len(instance.work.stages) * self._steps)
        self.missing = [0] * len(self.ready)
        for key, slot_number in enumerate(instance.slot_of):
            stage, micro_batch = divmod(key, instance.count)
            self.missing[self.index(stage, micro_batch)] += len(instance.slots[slot_number].members)
        self._free = [0.0] * len(instance.devices)
        self.made: list[GradientSum] = []
        self.updates: list[tuple[int, int, int, float, float]] = []

    def index(self, stage: int, micro_batch: int) -> int:
        """Return the index of a stage in the step of a micro-batch."""
        return stage * self._steps + micro_batch // self._count

    def gradient(self, stage: int, micro_batch: int, now: float) -> tuple[int, list[int]] | None:
        """Record a device's gradients of a micro-batch; return the completed sum, if any, and its devices."""
        index = self.index(stage, micro_batch)
        self.missing[index] -= 1
        self.ready[index] = max(self.ready[index], now)
        if self.missing[index]:
            return None
        members = self._members[stage]
        if self.replicated[stage]:
            start = max([self.ready[index], *(self._free[member] for member in members)])
            self.ready[index] = end = start + self._ring_s[stage]
            for member in members:
                self._free[member] = end
            self.made.append(GradientSum(stage, micro_batch - micro_batch % self._count, start, end))
        return index, members
