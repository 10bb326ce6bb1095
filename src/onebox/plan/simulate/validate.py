"""Validation of schedules: every action once, in an order free of deadlocks, within the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onebox.errors import UsageError
from onebox.plan.model.schedule import Action, Routes, Schedule
from onebox.plan.model.work import PlanWork
from onebox.plan.simulate.event_loop import execute_rows
from onebox.plan.simulate.instance import SchedulingInstance, instance_of, unit_work
from onebox.plan.simulate.memory import peak, state_bytes
from onebox.sizes import enough_text, size_text


def validate(
    schedule: Schedule,
    routes: Routes,
    edges: Sequence[tuple[int, int]] | None = None,
    work: PlanWork | None = None,
    sizes: Sequence[float] | None = None,
) -> None:
    """Check a schedule before anything runs.

    Args:
        schedule: The table.
        routes: Routes of the micro-batches.
        edges: Pairs of source and target stage; ``None`` is a chain, or the edges of ``work``.
        work: Costs of the stages, for the check of memory; ``None`` skips it.
        sizes: For the memory, size of each micro-batch as a fraction of the plan's; ``None`` stands for 1 each.

    Raises:
        UsageError: An action is missing, repeated, unknown or on a wrong device; forwards of a stage do not ascend on a
            device, or its gradients come before what they need; the schedule deadlocks; a device needs more memory than
            it has.

    Example:
        >>> validate(Schedule.parse(["0: 0F0 0B0"]), (((0,),),), ())
    """
    if edges is None and work is not None:
        edges = [(edge.source, edge.target) for edge in work.edges]
    instance = instance_of(routes, unit_work(routes, edges))
    strangers = sorted(set(schedule.rows) - set(instance.devices))
    if strangers:
        allowed = ", ".join(map(str, instance.devices))
        raise UsageError(f"the schedule has a row for device {strangers[0]}; the plan's devices are {allowed}")
    rows = [tuple(schedule.rows.get(device, ())) for device in instance.devices]
    for device, row in zip(instance.devices, rows, strict=True):
        _check_row(instance, device, row)
    _check_complete(instance, rows)
    _check_ends(instance, rows)
    if work is not None:
        _check_memory(instance_of(routes, work, sizes), rows)


def _check_row(instance: SchedulingInstance, device: int, row: Sequence[Action]) -> None:
    """Check that a row's actions belong there, are not repeated, ascend, and follow F, I, W or F, B."""
    seen: set[Action] = set()
    latest: dict[int, int] = {}
    for action in row:
        kind, stage, micro_batch = action
        if kind not in ("F", "I", "W", "B") or not (0 <= stage < instance.stages and 0 <= micro_batch < instance.count):
            raise UsageError(
                f"{action} on device {device}: allowed are F, I, W and B of the stages 0 to {instance.stages - 1} and "
                f"the micro-batches 0 to {instance.count - 1}"
            )
        replica = instance.routes[stage][micro_batch]
        if device not in replica:
            where = "+".join(map(str, replica))
            raise UsageError(f"{action} is on device {device}; stage {stage} has micro-batch {micro_batch} on {where}")
        if action in seen:
            raise UsageError(f"{action} is on device {device} twice; each action is there once")
        _check_before(action, device, seen)
        if kind == "F":
            if latest.get(stage, -1) > micro_batch:
                raise UsageError(
                    f"{action} comes after {stage}F{latest[stage]} on device {device}; forwards of a stage ascend, "
                    "because running statistics depend on their order"
                )
            latest[stage] = micro_batch
        seen.add(action)


def _check_before(action: Action, device: int, seen: set[Action]) -> None:
    kind, stage, micro_batch = action
    if kind == "F":
        return
    if kind in ("I", "B") and Action("I" if kind == "B" else "B", stage, micro_batch) in seen:
        raise UsageError(f"device {device} has both {stage}I{micro_batch} and {stage}B{micro_batch}; one is allowed")
    needed = Action("I" if kind == "W" else "F", stage, micro_batch)
    if needed not in seen:
        raise UsageError(f"{action} on device {device} comes before {needed}, which it needs")


def _check_complete(instance: SchedulingInstance, rows: Sequence[Sequence[Action]]) -> None:
    """Check that no action is missing; repeated ones have been excluded before."""
    there = [set(row) for row in rows]
    for key in range(instance.keys):
        stage, micro_batch = divmod(key, instance.count)
        ways = set()
        for member in instance.slots[instance.slot_of[key]].members:
            forward, both = Action("F", stage, micro_batch), Action("B", stage, micro_batch)
            inputs, weight = Action("I", stage, micro_batch), Action("W", stage, micro_batch)
            split = inputs in there[member]
            needed = (forward, inputs, weight) if split else (forward, both)
            missing = [action for action in needed if action not in there[member]]
            if missing:
                hint = "" if split or missing[0] is forward else f" (or {inputs} and {weight})"
                raise UsageError(f"{missing[0]}{hint} is missing on device {instance.devices[member]}")
            ways.add(split)
        if len(ways) > 1:
            raise UsageError(
                f"the devices that share stage {stage} have {stage}B{micro_batch} and {stage}I{micro_batch}; "
                "all of them do the same"
            )


def _check_ends(instance: SchedulingInstance, rows: Sequence[Sequence[Action]]) -> None:
    """Check that the schedule ends; otherwise follow the missing inputs until they form a cycle."""
    done = execute_rows(instance, rows).done
    waiting = {device: row[done[device]] for device, row in enumerate(rows) if done[device] < len(row)}
    if not waiting:
        return
    place = {(device, action): turn for device, row in enumerate(rows) for turn, action in enumerate(row)}
    device = min(waiting)
    seen: list[int] = []
    story: list[str] = []
    while device not in seen:
        seen.append(device)
        action = waiting[device]
        blamed, needed = _blame(instance, device, action, place, done)
        text = f"{action} on device {instance.devices[device]} waits for {needed} on device {instance.devices[blamed]}"
        story.append(text + (f", which comes there after {waiting[blamed]}" if waiting[blamed] != needed else ""))
        device = blamed
    circle = story[seen.index(device) :]
    raise UsageError(f"the schedule would wait for ever: {'; '.join(circle)}")


def _blame(
    instance: SchedulingInstance,
    device: int,
    action: Action,
    place: Mapping[tuple[int, Action], int],
    done: Sequence[int],
) -> tuple[int, Action]:
    """Return the action that an action waits for, and its device: an input, or the same action on another member."""
    kind, stage, micro_batch = action
    ends = () if kind == "W" else instance.into[stage] if kind == "F" else instance.out[stage]
    for end, _ in ends:
        other = instance.first[end + micro_batch]
        for wanted in ("F",) if kind == "F" else ("I", "B"):
            needed = Action(wanted, end // instance.count, micro_batch)  # type: ignore[arg-type]
            if place.get((other, needed), -1) >= done[other]:
                return other, needed
    for member in instance.slots[instance.slot_of[stage * instance.count + micro_batch]].members:
        if place[member, action] > done[member]:
            return member, action
    raise AssertionError(f"{action} on device {device} waits for nothing")


def _check_memory(instance: SchedulingInstance, rows: Sequence[Sequence[Action]]) -> None:
    state = state_bytes(instance)
    for device, held, row in zip(instance.devices, state, rows, strict=True):
        capacity = instance.work.capacity_bytes.get(device)
        most = peak(instance, held, row)
        if capacity is not None and most.size_bytes > capacity:
            when = f"at {most.action}" if most.action is not None else "before it does anything"
            raise UsageError(
                f"device {device} lacks {enough_text(most.size_bytes - capacity)} {when}: the schedule needs "
                f"{enough_text(most.size_bytes)}, the device has {size_text(capacity)}; fewer "
                "micro-batches in flight, smaller ones or more stages need less"
            )
