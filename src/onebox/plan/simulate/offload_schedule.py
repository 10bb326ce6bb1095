"""Schedule of offloaded values along a row: when they leave the device, and when they are back. Private to the folder.

The copy to the host begins after the last forward that reads the values, and has to end within one action; the copy
back begins one action before the first backward that reads them. Values that the device waits for leave at once, and
begin to come back when they are read. Where no action lies in between, values stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onebox.plan.simulate.instance import UPDATE, SchedulingInstance, Turn


class OffloadWindow(NamedTuple):
    """Offloaded values of one forward.

    Args:
        forward: The place in the row of the last forward that reads them.
        backward: The place of the backward that needs them.
        size_bytes: Their bytes.
        node: The backward's number.
        waited: Whether the device waits for the copies.
    """

    forward: int
    backward: int
    size_bytes: float
    node: int
    waited: bool

    @property
    def gone(self) -> int:
        """The place before which they have left the device."""
        return self.forward + (1 if self.waited else 2)

    @property
    def back(self) -> int:
        """The place before which they begin to come back."""
        return self.backward - (0 if self.waited else 1)


def offload_intervals(instance: SchedulingInstance, row: Sequence[Turn]) -> list[OffloadWindow]:
    """Return the values that a row offloads, in the order of its forwards."""
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
    """The copy channels between a device and its host's memory, one in each direction, along the device's row.

    Args:
        instance: The scheduling problem.
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
        """Process the copies due before an action; return when the device goes on.

        Args:
            place: The action's place in the row.
            now: The end of the action before.
            ready: The earliest start of each node, by :meth:`SchedulingInstance.node`; delayed where its values are not
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
    """Return the channels of each device; ``None`` where no stage is offloaded."""
    if not any(stage.offloaded_bytes for stage in instance.work.stages):
        return None
    return [HostCopyChannels(instance, device, row) for device, row in enumerate(rows)]
