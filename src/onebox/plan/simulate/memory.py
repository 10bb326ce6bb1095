"""Memory of a device along its row of a schedule. Pure; private to the folder.

A device's actions follow one another, and everything is taken and given back at their starts and ends, so that memory
depends on the order alone and not on times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onebox.plan.model.schedule import Action
from onebox.plan.simulate.instance import SchedulingInstance
from onebox.plan.simulate.offload_schedule import offload_intervals


class RowPeak(NamedTuple):
    """Where a device needs most memory.

    Args:
        size_bytes: How much.
        action: During which action; ``None`` if it does nothing.
    """

    size_bytes: int
    action: Action | None


def state_bytes(instance: SchedulingInstance) -> list[int]:
    """Return what each device holds always: parameters, buffers, optimizer state and gradients of its stages."""
    held = [0] * len(instance.devices)
    for slot in instance.slots:
        for member in slot.members:
            held[member] += instance.work.stages[slot.stage].state_bytes
    return held


def peak(instance: SchedulingInstance, state: int, row: Sequence[Action]) -> RowPeak:
    """Return where a row needs most memory.

    Args:
        instance: What it is about.
        state: Bytes that the device holds always.
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
