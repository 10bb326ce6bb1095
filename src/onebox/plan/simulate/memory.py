"""Memory of a device along its row of a schedule. Pure; private to the folder.

A device's actions follow one another, and all memory is allocated at their starts and freed at their ends, so that
memory depends on the order alone and not on times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onebox.plan.model.schedule import Action
from onebox.plan.simulate.instance import SchedulingInstance
from onebox.plan.simulate.offload_schedule import offload_intervals


class RowPeak(NamedTuple):
    """The memory peak of a device.

    Args:
        size_bytes: Bytes.
        action: The action at the peak; ``None`` for an idle device.
    """

    size_bytes: int
    action: Action | None


def state_bytes(instance: SchedulingInstance) -> list[int]:
    """Return each device's permanent bytes: parameters, buffers, optimizer state and gradients of its stages."""
    held = [0] * len(instance.devices)
    for slot in instance.slots:
        for member in slot.members:
            held[member] += instance.work.stages[slot.stage].state_bytes
    return held


def peak(instance: SchedulingInstance, state: int, row: Sequence[Action]) -> RowPeak:
    """Return the memory peak of a row.

    Args:
        instance: The scheduling problem.
        state: Permanent bytes of the device.
        row: The device's actions.
    """
    scale = instance.scale
    stages = [
        (work.saved_bytes + work.offloaded_bytes, work.late_bytes, work.forward_work_bytes, work.backward_work_bytes)
        for work in instance.work.stages
    ]
    level = highest = float(state)
    where = None
    away: dict[int, float] = {}
    for stay in offload_intervals(instance, row):
        away[stay.gone] = away.get(stay.gone, 0.0) - stay.size_bytes
        away[stay.back] = away.get(stay.back, 0.0) + stay.size_bytes
    for place, action in enumerate(row):
        kind, stage, micro_batch = action
        level += away.get(place, 0.0)
        saved, late, forward, backward = stages[stage]
        size = scale[micro_batch]
        if kind == "F":
            level += saved * size
            used = level + forward
        else:
            if kind == "I":
                level += late * size
            used = level + backward
            level -= late * size if kind == "W" else saved * size
        if used > highest:
            highest, where = used, action
    return RowPeak(round(highest), where)
