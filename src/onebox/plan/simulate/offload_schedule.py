"""What is offloaded along a row of a schedule: when it leaves the device, and when it is back. Private to the folder.

Values begin to go to the host when the last forward that reads them is through, and are gone one action later; they
begin to come back one action before the first backward that reads them. Those that the device waits for are gone at
once, and begin to come back when they are read. Where no action lies between, values stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onebox.plan.simulate.gradient_sums import UPDATE, Turn
from onebox.plan.simulate.instance import SchedulingInstance


class OffloadWindow(NamedTuple):
    """Some of what a forward makes, in the host's memory.

    Args:
        forward: The place in the row of the last forward that reads it.
        backward: The place of the backward that needs it.
        size_bytes: How much it is.
        node: The backward's number.
        waited: Whether the device waits for it.
    """

    forward: int
    backward: int
    size_bytes: float
    node: int
    waited: bool

    @property
    def gone(self) -> int:
        """The place before which it has left the device."""
        return self.forward + (1 if self.waited else 2)

    @property
    def back(self) -> int:
        """The place before which it begins to come back."""
        return self.backward - (0 if self.waited else 1)


def offload_intervals(instance: SchedulingInstance, row: Sequence[Turn]) -> list[OffloadWindow]:
    """Return what leaves a device along its row, in the order of its forwards."""
    stages = instance.work.stages
    if not any(stage.offloaded_bytes for stage in stages):
        return []
    places: dict[tuple[str, int, int], int] = {}
    for place, (kind, stage, micro_batch) in enumerate(row):
        if kind == UPDATE:
            continue
        places["F" if kind == "F" else "W" if kind == "W" else "B", stage, micro_batch] = place
    found = []
    for kind, stage, micro_batch in row:
        for reader, size_bytes, waited in stages[stage].offloaded if kind == "F" else ():
            ahead, behind = places.get(("F", reader, micro_batch)), places.get(("B", reader, micro_batch))
            if ahead is None or behind is None:
                continue
            stay = OffloadWindow(
                ahead, behind, size_bytes * instance.scale[micro_batch], instance.node(row[behind]), waited
            )
            if stay.gone < stay.back:
                found.append(stay)
    return sorted(found)


class HostCopyChannels:
    """The ways between a device and its host's memory, one in each direction, along the device's row.

    Args:
        instance: What it is about.
        device: The device, renumbered.
        row: Its actions.
    """

    def __init__(self, instance: SchedulingInstance, device: int, row: Sequence[Turn]) -> None:
        found = offload_intervals(instance, row)
        bps = instance.work.host_bps.get(instance.devices[device])
        self._byte_s = 1 / bps if bps else 0.0
        self._leave: dict[int, list[OffloadWindow]] = {}
        self._gone: dict[int, list[OffloadWindow]] = {}
        self._back: dict[int, list[OffloadWindow]] = {}
        for stay in found:
            self._leave.setdefault(stay.forward + 1, []).append(stay)
            if not stay.waited:
                self._gone.setdefault(stay.gone, []).append(stay)
            self._back.setdefault(stay.back, []).append(stay)
        self._there: dict[int, float] = {}
        self._free = [0.0, 0.0]

    def before(self, place: int, now: float, ready: list[float]) -> float:
        """Do what is due before an action; return when the device goes on.

        Args:
            place: The action's place in the row.
            now: When the action before was through.
            ready: When each node can begin, by :meth:`SchedulingInstance.node`; put off where what it needs is not
                back.
        """
        for stay in self._gone.get(place, ()):
            now = max(now, self._there[stay.forward])
        for stay in self._leave.get(place, ()):
            self._free[0] = max(self._free[0], now) + stay.size_bytes * self._byte_s
            self._there[stay.forward] = self._free[0]
            if stay.waited:
                now = self._free[0]
        for stay in self._back.get(place, ()):
            self._free[1] = max(self._free[1], now) + stay.size_bytes * self._byte_s
            ready[stay.node] = max(ready[stay.node], self._free[1])
        return now


def channels(instance: SchedulingInstance, rows: Sequence[Sequence[Turn]]) -> list[HostCopyChannels] | None:
    """Return the channels of each device; nothing where no stage is offloaded."""
    if not any(stage.offloaded_bytes for stage in instance.work.stages):
        return None
    return [HostCopyChannels(instance, device, row) for device, row in enumerate(rows)]
