"""Memory of devices while a schedule is being made, and the actions that it allows. Private to the folder."""

from __future__ import annotations

from collections.abc import Sequence

from onebox.plan.model.schedule import Kind
from onebox.plan.simulate.instance import SchedulingInstance
from onebox.plan.simulate.memory import state_bytes


class MemoryReserve:
    """Bytes that each device holds, and those reserved for its oldest micro-batch.

    A forward may start only if, afterwards, the device could still take every other forward of its oldest micro-batch
    and its whole backward, so that younger micro-batches never block the oldest one.

    Args:
        instance: Routes and work.
        capacity: Bytes of each device.
        split: For each slot, whether its backward is split.
        held: For each device, its slots.
        mine: For each slot, its micro-batches in order.
        forward: For each slot, how many forwards have been started; updated by the scheduler.
        inputs: The same, of input gradients.
    """

    def __init__(
        self,
        instance: SchedulingInstance,
        capacity: Sequence[int],
        split: Sequence[bool],
        *,
        held: Sequence[Sequence[int]],
        mine: Sequence[Sequence[int]],
        forward: Sequence[int],
        inputs: Sequence[int],
    ) -> None:
        self._slots, self._scale = instance.slots, instance.scale
        self._work = [instance.work.stages[slot.stage] for slot in instance.slots]
        self._level = [float(state) for state in state_bytes(instance)]
        self._capacity, self._split = capacity, split
        self._held, self._mine, self._forward, self._inputs = held, mine, forward, inputs
        largest = max(instance.scale)
        self._back = [
            max(
                self._work[slot].backward_work_bytes + split[slot] * self._work[slot].late_bytes * largest
                for slot in slots
            )
            for slots in held
        ]

    def may_start(self, slot: int, micro_batch: int) -> bool:
        """Return whether the memory allows a forward to start."""
        work = self._work[slot]
        saved = work.saved_bytes * self._scale[micro_batch]
        for member in self._slots[slot].members:
            after = self._level[member] + saved
            if after + work.forward_work_bytes > self._capacity[member]:
                return False
            if after + self._kept(member, slot, micro_batch) + self._back[member] > self._capacity[member]:
                return False
        return True

    def _kept(self, device: int, slot: int, micro_batch: int) -> float:
        """Return the bytes that the forwards of the device's oldest micro-batch still need, beside the given one."""
        mine, forward, inputs = self._mine, self._forward, self._inputs
        held = self._held[device]
        oldest = min(
            (mine[other][inputs[other]] for other in held if inputs[other] < len(mine[other])), default=micro_batch
        )
        return sum(
            self._work[other].saved_bytes * self._scale[oldest]
            for other in held
            if forward[other] < len(mine[other])
            and mine[other][forward[other]] <= oldest
            and not (other == slot and oldest == micro_batch)
        )

    def may_go_back(self, slot: int, micro_batch: int) -> bool:
        """Return whether the memory allows an input gradient (or a whole backward) to start."""
        work = self._work[slot]
        need = float(work.backward_work_bytes)
        if self._split[slot]:
            need += work.late_bytes * self._scale[micro_batch]
        return all(self._level[member] + need <= self._capacity[member] for member in self._slots[slot].members)

    def start(self, kind: Kind, slot: int, micro_batch: int) -> None:
        """Record an action; the memory that it frees at its end is available to the device's next action."""
        work, size = self._work[slot], self._scale[micro_batch]
        change = {
            "F": work.saved_bytes,
            "I": work.late_bytes - work.saved_bytes,
            "B": -work.saved_bytes,
            "W": -work.late_bytes,
        }[kind]
        for member in self._slots[slot].members:
            self._level[member] += change * size
