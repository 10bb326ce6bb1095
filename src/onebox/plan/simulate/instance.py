"""A scheduling problem as flat arrays, for the simulator, the list scheduler and validation; and the
once-a-step work of its steady state: sums of gradients, and updates. Private to the folder.

Devices are renumbered from 0, and a stage's micro-batch has one number, its key: ``stage * count + micro_batch``. The
replica that computes it is a slot: a stage and its devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from onebox.errors import UsageError
from onebox.plan.model.schedule import Routes
from onebox.plan.model.work import Edge, Links, PlanWork, StageWork


class StageReplica(NamedTuple):
    """A replica of a stage.

    Args:
        stage: The stage.
        members: Its devices, renumbered; the first one sends and receives.
    """

    stage: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingInstance:
    """Routes and work, as flat lists.

    Args:
        routes: Routes of the micro-batches.
        work: Costs of the stages.
        devices: The number of each device, ascending.
        count: Micro-batches.
        scale: Size of each micro-batch, as a fraction of the plan's.
        slots: Every replica of every stage.
        slot_of: The slot of each key.
        first: The device that sends and receives for each key.
        grouped: Whether some replica has several devices.
        seconds: For each kind of action and each slot, its seconds at full size.
        out: For each stage, the edges that leave it: the first key of the target, bytes of a value.
        into: For each stage, the edges that reach it: the first key of the source, bytes of a gradient.
        latency_s: Of each used link, by ``source * len(devices) + target``.
        per_byte_s: Seconds per byte on each of those links.
        crossed: Of those that share uplinks with others, the uplinks that a message leaves and enters.
    """

    routes: Routes
    work: PlanWork
    devices: tuple[int, ...]
    count: int
    scale: list[float]
    slots: tuple[StageReplica, ...]
    slot_of: list[int]
    first: list[int]
    grouped: bool
    seconds: dict[str, list[float]]
    out: list[tuple[tuple[int, int], ...]]
    into: list[tuple[tuple[int, int], ...]]
    latency_s: list[float]
    per_byte_s: list[float]
    crossed: dict[int, tuple[str, str]]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.routes)

    @property
    def keys(self) -> int:
        """Number of pairs of stage and micro-batch."""
        return len(self.slot_of)

    def node(self, action: tuple[str, int, int]) -> int:
        """Return an action's number: forwards, then input gradients and whole backwards, then weight gradients."""
        kind, stage, micro_batch = action
        side = {"F": 0, "I": 1, "B": 1, "W": 2}[kind]
        return side * len(self.slot_of) + stage * self.count + micro_batch


def instance_of(routes: Routes, work: PlanWork, sizes: Sequence[float] | None = None) -> SchedulingInstance:
    """Convert routes and work to flat lists.

    Args:
        routes: Routes of the micro-batches.
        work: Costs of the stages.
        sizes: Size of each micro-batch, as a fraction of the plan's; ``None`` stands for 1 each.

    Raises:
        UsageError: Their numbers of stages or micro-batches differ, or a device that holds a stage has no time for it.
    """
    count = _check_routes(routes, len(work.stages))
    scale = [1.0] * count if sizes is None else [float(size) for size in sizes]
    if len(scale) != count:
        raise UsageError(f"{len(scale)} sizes for {count} micro-batches: one for each is needed")
    devices = tuple(sorted({device for row in routes for replica in set(row) for device in replica}))
    index = {device: number for number, device in enumerate(devices)}
    slots: list[StageReplica] = []
    slot_of: list[int] = []
    for stage, row in enumerate(routes):
        numbers = {replica: len(slots) + turn for turn, replica in enumerate(dict.fromkeys(row))}
        slots += [StageReplica(stage, tuple(index[device] for device in replica)) for replica in numbers]
        slot_of += [numbers[replica] for replica in row]
    heads = [slot.members[0] for slot in slots]
    first = [heads[slot] for slot in slot_of]
    seconds = _seconds(work, devices, slots)
    latency_s, per_byte_s, crossed = _links(work, devices, first, count)
    return SchedulingInstance(
        routes=routes,
        work=work,
        devices=devices,
        count=count,
        scale=scale,
        slots=tuple(slots),
        slot_of=slot_of,
        first=first,
        grouped=any(len(slot.members) > 1 for slot in slots),
        seconds=seconds,
        out=_ends(work.edges, len(routes), count, outward=True),
        into=_ends(work.edges, len(routes), count, outward=False),
        latency_s=latency_s,
        per_byte_s=per_byte_s,
        crossed=crossed,
    )


_UNIT = 55440
"""A whole number divisible by 1 to 12, so that sums of times are exact and simultaneous ends are equal."""


def unit_work(routes: Routes, edges: Sequence[tuple[int, int]] | None = None) -> PlanWork:
    """Return the work of equal devices with instantaneous links, for schedules that depend on routes alone.

    A plan gives slow devices fewer micro-batches of a stage, so that all are about equally busy: a device with `k` of a
    stage's `n` micro-batches and `v` stages takes `n / (k v)` units for a forward, and as long for each half of the
    backward.

    Args:
        routes: Routes of the micro-batches.
        edges: Pairs of source and target stage; ``None`` is a chain.

    Raises:
        UsageError: The stages have no micro-batches, or not the same ones, or an edge does not go to a later stage.
    """
    count = _check_routes(routes, len(routes))
    if edges is None:
        edges = [(stage, stage + 1) for stage in range(len(routes) - 1)]
    turns: list[dict[int, int]] = []
    held: dict[int, int] = {}
    for row in routes:
        turns.append({})
        for replica in row:
            for device in replica:
                turns[-1][device] = turns[-1].get(device, 0) + 1
        for device in turns[-1]:
            held[device] = held.get(device, 0) + 1
    stages = []
    for turn in turns:
        times = {device: float(round(_UNIT * count / (often * held[device]))) for device, often in turn.items()}
        stages.append(StageWork(forward_s=times, input_s=times, weight_s=times, update_s=dict.fromkeys(times, 0.0)))
    nothing, infinite = dict.fromkeys(held, 0.0), dict.fromkeys(held, float("inf"))
    return PlanWork(
        stages=tuple(stages),
        edges=tuple(Edge(source=a, target=b, forward_bytes=0, backward_bytes=0) for a, b in edges),
        links=Links(latency_s=dict.fromkeys(held, nothing), bandwidth_bps=dict.fromkeys(held, infinite)),
        capacity_bytes={},
    )


def _check_routes(routes: Routes, stages: int) -> int:
    if len(routes) != stages or not routes:
        raise UsageError(f"routes for {len(routes)} stages, work for {stages}: both are needed for each stage")
    count = len(routes[0])
    if any(len(row) != count for row in routes) or not count:
        counts = ", ".join(str(len(row)) for row in routes)
        raise UsageError(f"routes for {counts} micro-batches: every stage has the same ones, at least one")
    return count


def _seconds(work: PlanWork, devices: tuple[int, ...], slots: list[StageReplica]) -> dict[str, list[float]]:
    def slowest(slot: StageReplica, kind: str) -> float:
        times = getattr(work.stages[slot.stage], kind)
        try:
            return max(times[devices[member]] for member in slot.members)
        except KeyError as error:
            raise UsageError(f"work of stage {slot.stage} has no {kind} for device {error}, which holds it") from None

    forward, inputs, weight = ([slowest(slot, kind) for slot in slots] for kind in ("forward_s", "input_s", "weight_s"))
    both = [one + other for one, other in zip(inputs, weight, strict=True)]
    return {"F": forward, "I": inputs, "W": weight, "B": both}


def _ends(edges: tuple[Edge, ...], stages: int, count: int, *, outward: bool) -> list[tuple[tuple[int, int], ...]]:
    found: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
    for edge in edges:
        if not 0 <= edge.source < edge.target < stages:
            raise UsageError(f"an edge from stage {edge.source} to {edge.target}: it leads to a later one of {stages}")
        if outward:
            found[edge.source].append((edge.target * count, edge.forward_bytes))
        else:
            found[edge.target].append((edge.source * count, edge.backward_bytes))
    return [tuple(ends) for ends in found]


def _links(
    work: PlanWork, devices: tuple[int, ...], first: list[int], count: int
) -> tuple[list[float], list[float], dict[int, tuple[str, str]]]:
    size = len(devices)
    latency, per_byte = [0.0] * (size * size), [0.0] * (size * size)
    crossed: dict[int, tuple[str, str]] = {}
    used: set[tuple[int, int]] = set()
    for edge in work.edges:
        source, target = edge.source * count, edge.target * count
        used.update(zip(first[source : source + count], first[target : target + count], strict=True))
    for pair in used:
        for a, b in (pair, pair[::-1]):
            if a == b:
                continue
            try:
                bandwidth_bps = work.links.bandwidth_bps[devices[a]][devices[b]]
                latency[a * size + b] = work.links.latency_s[devices[a]][devices[b]]
            except KeyError:
                raise UsageError(f"the links say nothing of devices {devices[a]} to {devices[b]}; measure it") from None
            if not bandwidth_bps > 0:
                raise UsageError(f"{bandwidth_bps} bytes/s from device {devices[a]} to {devices[b]}: it is above 0")
            per_byte[a * size + b] = 1.0 / bandwidth_bps
            if (shared := work.links.crossed(devices[a], devices[b])) is not None:
                crossed[a * size + b] = shared
    return latency, per_byte, crossed


UPDATE = "U"
"""The kind of a turn that is a stage's optimizer step; its micro-batch is the first one of the step."""

Turn = tuple[str, int, int]
"""An entry of a device's row: an action, or an update of a stage."""


class SumQueue:
    """Sums over replicas, of which each device and each uplink carries one at a time.

    Args:
        instance: The scheduling problem.

    Attributes:
        free: The time at which each device's last sum ends.
    """

    def __init__(self, instance: SchedulingInstance) -> None:
        self._instance = instance
        self.free = [0.0] * len(instance.devices)
        self._uplink_free: dict[str, float] = {}

    def add(self, members: Sequence[int], ready_s: float, seconds: float) -> float:
        """Return the start of a sum.

        Args:
            members: The devices of all replicas, renumbered.
            ready_s: The time from which it can start.
            seconds: Its duration.
        """
        uplinks = self._instance.work.links.shared_by([self._instance.devices[member] for member in members])
        before = [self._uplink_free.get(uplink, 0.0) for uplink in uplinks]
        start = max([ready_s, *(self.free[member] for member in members), *before])
        for member in members:
            self.free[member] = start + seconds
        self._uplink_free |= dict.fromkeys(uplinks, start + seconds)
        return start


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

    Replicas sum their gradients in rings beside other actions, one stage at a time on each device and each uplink.

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
            ring_s = instance.work.links.sum_seconds(replicas[stage], work) if several else 0.0
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
        self._queue = SumQueue(instance)
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
            start = self._queue.add(members, self.ready[index], self._ring_s[stage])
            self.ready[index] = end = start + self._ring_s[stage]
            self.made.append(GradientSum(stage, micro_batch - micro_batch % self._count, start, end))
        return index, members
