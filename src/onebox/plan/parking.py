"""What is offloaded along a row of a schedule: when it leaves the device, and when it is back. Private to the folder.

A stage's values begin to go to the host when its forward is through, and are gone one action later; they begin to come
back one action before the backward that reads them. Where no action lies between, they stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onebox.plan.instance import Instance
from onebox.plan.schedule import Action


class Stay(NamedTuple):
    """What one forward makes, in the host's memory.

    Args:
        forward: The place of the forward in the row.
        backward: The place of the backward that needs it.
        size_bytes: How much it is.
        node: The backward's number.
    """

    forward: int
    backward: int
    size_bytes: float
    node: int

    @property
    def gone(self) -> int:
        """The place before which it has left the device."""
        return self.forward + 2

    @property
    def back(self) -> int:
        """The place before which it begins to come back."""
        return self.backward - 1


def stays(instance: Instance, row: Sequence[Action]) -> list[Stay]:
    """Return what leaves a device along its row, in the order of its forwards."""
    stages = instance.work.stages
    if not any(stage.parked_bytes for stage in stages):
        return []
    found = []
    began: dict[tuple[int, int], int] = {}
    for place, action in enumerate(row):
        kind, stage, micro_batch = action
        if not stages[stage].parked_bytes:
            continue
        if kind == "F":
            began[stage, micro_batch] = place
        elif kind != "W" and (stage, micro_batch) in began:
            size = stages[stage].parked_bytes * instance.scale[micro_batch]
            stay = Stay(began[stage, micro_batch], place, size, instance.node(action))
            if stay.gone < stay.back:
                found.append(stay)
    return sorted(found)


class Channels:
    """The ways between a device and its host's memory, one in each direction, along the device's row.

    Args:
        instance: What it is about.
        device: The device, renumbered.
        row: Its actions.
    """

    def __init__(self, instance: Instance, device: int, row: Sequence[Action]) -> None:
        found = stays(instance, row)
        bps = instance.work.host_bps.get(instance.devices[device])
        self._byte_s = 1 / bps if bps else 0.0
        self._leave = {stay.forward + 1: stay for stay in found}
        self._gone = {stay.gone: stay for stay in found}
        self._back: dict[int, list[Stay]] = {}
        for stay in found:
            self._back.setdefault(stay.back, []).append(stay)
        self._there: dict[int, float] = {}
        self._free = [0.0, 0.0]

    def before(self, place: int, now: float, ready: list[float]) -> float:
        """Do what is due before an action; return when the device goes on.

        Args:
            place: The action's place in the row.
            now: When the action before was through.
            ready: When each node can begin, by :meth:`Instance.node`; put off where what it needs is not back.
        """
        leaving = self._leave.get(place)
        if leaving is not None:
            self._free[0] = max(self._free[0], now) + leaving.size_bytes * self._byte_s
            self._there[leaving.forward] = self._free[0]
        gone = self._gone.get(place)
        if gone is not None:
            now = max(now, self._there[gone.forward])
        for stay in self._back.get(place, ()):
            self._free[1] = max(self._free[1], now) + stay.size_bytes * self._byte_s
            ready[stay.node] = max(ready[stay.node], self._free[1])
        return now


def channels(instance: Instance, rows: Sequence[Sequence[Action]]) -> list[Channels] | None:
    """Return the channels of each device; nothing where no stage is offloaded."""
    if not any(stage.parked_bytes for stage in instance.work.stages):
        return None
    return [Channels(instance, device, row) for device, row in enumerate(rows)]
