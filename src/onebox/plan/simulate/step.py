"""The simulator: the duration of a schedule's step, the timeline of each device, and its memory.

It models the engine. Each device executes its row strictly in order; an action starts when the device is free and its
inputs are there, and sends its outputs when it ends. A link carries one message
at a time, in the order in which its source sends, while computing goes on; so does an uplink that several links share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from onebox.errors import UsageError
from onebox.plan.model.schedule import Action, Routes, Schedule
from onebox.plan.model.work import PlanWork
from onebox.plan.simulate.event_loop import ExecutedRows, execute_rows
from onebox.plan.simulate.instance import SchedulingInstance, SumQueue, instance_of
from onebox.plan.simulate.memory import peak, state_bytes


class ActionSpan(NamedTuple):
    """An action on a device.

    Args:
        device: The device.
        action: The action.
        start_s: Seconds from the start of the step.
        end_s: The same, of its end.
    """

    device: int
    action: Action
    start_s: float
    end_s: float


class Transfer(NamedTuple):
    """A message between two devices.

    Args:
        source: The device that sends.
        target: The device that receives.
        source_stage: The stage that made the value or gradient.
        target_stage: The stage that uses it.
        micro_batch: The micro-batch.
        forward: Whether it is a value of forward; if not, a gradient.
        start_s: When the link begins to carry it, in seconds from the start of the step.
        end_s: When it has arrived.
    """

    source: int
    target: int
    source_stage: int
    target_stage: int
    micro_batch: int
    forward: bool
    start_s: float
    end_s: float


class UpdateSpan(NamedTuple):
    """Work of a device at the end of a step: a sum of gradients or an optimizer step.

    Args:
        device: The device.
        stage: The stage; ``None`` for the optimizer step, which is one for all of the device's stages.
        start_s: Seconds from the start of the step.
        end_s: The same, of its end.
    """

    device: int
    stage: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The simulated step of a schedule.

    Args:
        step_s: Seconds of the step.
        spans: Every action, ordered by device and time; empty without details.
        transfers: Every message between devices; empty without details.
        updates: Sums of gradients over the replicas, and optimizer steps.
        busy_s: Seconds in which each device computes, optimizer step included.
        bubble: Idle part of the devices' time, from 0 to 1.
        peak_bytes: Peak memory of each device.
        over_bytes: Missing bytes of each device that lacks memory.
    """

    step_s: float
    spans: tuple[ActionSpan, ...]
    transfers: tuple[Transfer, ...]
    updates: tuple[UpdateSpan, ...]
    busy_s: Mapping[int, float]
    bubble: float
    peak_bytes: Mapping[int, int]
    over_bytes: Mapping[int, int]


def simulate(
    schedule: Schedule, routes: Routes, work: PlanWork, sizes: Sequence[float] | None = None, *, detail: bool = True
) -> Simulation:
    """Time a schedule.

    A value goes along each edge from the device that computes a micro-batch in one stage to the device that computes it
    in the other; a gradient goes back after ``I`` or ``B``. A message occupies its directed link for bytes / bandwidth
    and arrives the link's latency later; within a device it takes no time. Messages of several devices that share an
    uplink take turns on it. A stage without outgoing edges begins its
    backward with its own loss. A replica of several devices starts an action when all of them are free, and sends and
    receives through the first one.

    After the last gradient of a stage its replicas sum their gradients in a ring, one stage at a time on each device,
    beside other actions; then the optimizer step runs.

    Memory of a device: the state of its stages always; a stage's saved bytes, which include the values that it
    received, from the start of ``F`` to the end of ``I`` or ``B``; its late bytes from the start of ``I`` to the end of
    ``W``; and the work memory of the running action. Saved and late bytes grow with the micro-batch's size. Offloaded
    bytes are like saved ones, but in the host's memory in between: they are copied beside other actions, one after the
    other in each direction; the device waits for the copy out before the action after the next, and for the copy back
    before the backward that reads them.

    Args:
        schedule: One that :func:`~onebox.plan.simulate.validate` accepts for these routes and edges.
        routes: Routes of the micro-batches.
        work: Times, bytes, edges, links.
        sizes: Size of each micro-batch, as a fraction of the plan's; ``None`` stands for 1 each.
        detail: Whether to return each action and message.

    Returns:
        Times and memory.

    Raises:
        UsageError: The schedule deadlocks, names a device without a part, or routes and work do not fit together.
    """
    return simulate_instance(instance_of(routes, work, sizes), schedule.rows, detail=detail)


def simulate_instance(
    instance: SchedulingInstance, table: Mapping[int, Sequence[Action]], *, detail: bool
) -> Simulation:
    """Simulate rows: :func:`simulate` for a given instance."""
    devices = instance.devices
    strangers = sorted(set(table) - set(devices))
    if strangers:
        raise UsageError(f"the schedule has a row for device {strangers[0]}, which has no part in the plan")
    rows = [table.get(device, ()) for device in devices]
    played = execute_rows(instance, rows)
    stuck = [number for number, row in enumerate(rows) if played.done[number] < len(row)]
    if stuck:
        action = rows[stuck[0]][played.done[stuck[0]]]
        raise UsageError(f"the schedule never ends: {action} on device {devices[stuck[0]]} can never start")
    updates, busy = finish(instance, played)
    step = max([*played.free, *(update.end_s for update in updates)])
    state = state_bytes(instance)
    peaks = {
        device: peak(instance, held, row).size_bytes for device, held, row in zip(devices, state, rows, strict=True)
    }
    return simulation_of(
        instance.work,
        step,
        dict(zip(devices, busy, strict=True)),
        peaks,
        spans=_spans(instance, rows, played) if detail else (),
        transfers=_transfers(instance, rows, played) if detail else (),
        updates=tuple(updates),
    )


def simulation_of(
    work: PlanWork,
    step_s: float,
    busy_s: Mapping[int, float],
    peak_bytes: Mapping[int, int],
    *,
    spans: tuple[ActionSpan, ...],
    transfers: tuple[Transfer, ...],
    updates: tuple[UpdateSpan, ...],
) -> Simulation:
    """Return a simulation with its idle part and with the memory that devices lack; see :class:`Simulation`."""
    caps = work.capacity_bytes
    return Simulation(
        step_s=step_s,
        spans=spans,
        transfers=transfers,
        updates=updates,
        busy_s=busy_s,
        bubble=max(0.0, 1 - math.fsum(busy_s.values()) / (len(busy_s) * step_s)) if step_s > 0 else 0.0,
        peak_bytes=peak_bytes,
        over_bytes={
            device: most - caps[device] for device, most in peak_bytes.items() if device in caps and most > caps[device]
        },
    )


def finish(instance: SchedulingInstance, played: ExecutedRows) -> tuple[list[UpdateSpan], list[float]]:
    """Sum the gradients over replicas, in the order in which they are complete, and run the optimizers."""
    stages, devices = instance.work.stages, instance.devices
    held: list[list[int]] = [[] for _ in stages]
    for number, slot in enumerate(instance.slots):
        held[slot.stage].append(number)
    ready = sorted((max(played.last[slot] for slot in held[stage]), stage) for stage in range(len(stages)))
    updates: list[UpdateSpan] = []
    through = list(played.free)
    queue = SumQueue(instance)
    for when, stage in ready:
        replicas = [instance.slots[slot].members for slot in held[stage]]
        members = [member for replica in replicas for member in replica]
        if len(replicas) > 1:
            named = [[devices[member] for member in replica] for replica in replicas]
            seconds = instance.work.links.sum_seconds(named, stages[stage])
            start = queue.add(members, when, seconds)
            updates += [UpdateSpan(devices[member], stage, start, start + seconds) for member in members]
    busy = list(played.busy)
    for number, device in enumerate(devices):
        mine = [slot.stage for slot in instance.slots if number in slot.members]
        spent = math.fsum(stages[stage].update_s.get(device, 0.0) for stage in mine)
        through[number] = max(through[number], queue.free[number])
        busy[number] += spent
        updates.append(UpdateSpan(device, None, through[number], through[number] + spent))
    return updates, busy


def _spans(
    instance: SchedulingInstance, rows: Sequence[Sequence[Action]], played: ExecutedRows
) -> tuple[ActionSpan, ...]:
    found = []
    for device, row in zip(instance.devices, rows, strict=True):
        for action in row:
            node = instance.node(action)
            found.append(ActionSpan(device, action, played.start[node], played.end[node]))
    return tuple(found)


def _transfers(
    instance: SchedulingInstance, rows: Sequence[Sequence[Action]], played: ExecutedRows
) -> tuple[Transfer, ...]:
    found = (message for _, message in transfers_of(instance, rows, played))
    return tuple(sorted(found, key=lambda message: (message.start_s, message[:6])))


def transfers_of(
    instance: SchedulingInstance, rows: Sequence[Sequence[Action]], played: ExecutedRows
) -> Iterator[tuple[Action, Transfer]]:
    """Queue every device's messages on its links once more, as :func:`~onebox.plan.simulate.event_loop.execute_rows`
    did; those on shared uplinks have been.

    Yields:
        Each message, and the action that it comes from.
    """
    size, count, devices = len(instance.devices), instance.count, instance.devices
    free = [0.0] * (size * size)
    for device, row in enumerate(rows):
        for action in row:
            kind, stage, micro_batch = action
            forward = kind == "F"
            ends = instance.out[stage] if forward else () if kind == "W" else instance.into[stage]
            if instance.first[stage * count + micro_batch] != device:
                continue
            for end, size_bytes in ends:
                target = instance.first[end + micro_batch]
                if target == device:
                    continue
                link = device * size + target
                node = instance.node(action)
                transfer_s = size_bytes * instance.scale[micro_batch] * instance.per_byte_s[link]
                start = played.queued.get((node, end), max(free[link], played.end[node]))
                free[link] = start + transfer_s
                places = (devices[device], devices[target], stage, end // count, micro_batch, forward)
                yield action, Transfer(*places, start, free[link] + instance.latency_s[link])
