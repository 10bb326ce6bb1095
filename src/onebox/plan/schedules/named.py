"""Named schedules: each is a rule of the list scheduler, on devices that are equally busy; and their ideal times."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from onebox.errors import UsageError
from onebox.plan.model.schedule import Action, Routes, Schedule
from onebox.plan.schedules.list_scheduler import UNLIMITED, DispatchRule, list_schedule
from onebox.plan.simulate.instance import SchedulingInstance, instance_of, unit_work
from onebox.plan_names import NAMED, SCHEDULE_TRAITS


def named_schedule(name: str, routes: Routes, *, edges: Sequence[tuple[int, int]] | None = None) -> Schedule:
    """Make a named schedule.

    It follows the rule of the name for any routes: stages with replicas, several stages on a device, few micro-batches,
    graphs. In the even case it is the table of the literature.

    - ``gpipe``: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).
    - ``1f1b``: a stage has as many micro-batches in flight as it takes for the first gradient to come back, then
      forward and backward in turn (Narayanan et al. 2019, PipeDream; Fan et al. 2021, DAPPLE, arXiv:2007.01045).
    - ``interleaved``: the same for several stages on a device, which go through rounds of micro-batches in turn
      (Narayanan et al. 2021, arXiv:2104.04473).
    - ``zb-h1``: ``1f1b`` with the backward split: the gradient of the inputs goes on at once, that of the parameters
      fills the gaps, in the memory of ``1f1b`` (Qi et al. 2024, arXiv:2401.10241).
    - ``zbv``: split likewise, for two stages on a device, so placed that the first device has the first and the last
      stage (Qi et al. 2024, arXiv:2405.15362).

    Args:
        name: One of :data:`NAMED`.
        routes: Routes of the micro-batches.
        edges: Pairs of source and target stage; ``None`` is a chain.

    Raises:
        UsageError: There is no such schedule, or an edge does not lead to a later stage.

    Example:
        >>> two_stages = (((0,), (0,)), ((1,), (1,)))
        >>> named_schedule("1f1b", two_stages).lines()
        ('0: 0F0 0F1 0B0 0B1', '1: 1F0 1B0 1F1 1B1')
    """
    if name not in NAMED:
        raise UsageError(f"no schedule {name!r} is made of routes alone; allowed are {', '.join(NAMED)}")
    instance = instance_of(routes, unit_work(routes, edges))
    rows = list_schedule(instance, dispatch_rule_of(name, instance))
    return as_schedule(instance, rows)


def as_schedule(instance: SchedulingInstance, rows: Sequence[Sequence[Action]]) -> Schedule:
    """Return rows as a schedule, with the devices' own numbers."""
    return Schedule(rows={device: tuple(row) for device, row in zip(instance.devices, rows, strict=True)})


def dispatch_rule_of(
    name: str, instance: SchedulingInstance, *, more: float = 1.0, capacity: Sequence[int] | None = None
) -> DispatchRule:
    """Return the policy of a named schedule.

    Args:
        name: One of :data:`NAMED`.
        instance: The scheduling problem.
        more: Factor on its numbers of micro-batches in flight, for slow links.
        capacity: Memory limit of each device; ``None`` for no limits.
    """
    slots, devices = len(instance.slots), len(instance.devices)
    in_flight = [UNLIMITED] * slots
    unfinished = [UNLIMITED] * slots
    device_in_flight = [UNLIMITED] * devices
    device_unfinished = [UNLIMITED] * devices
    if name in ("1f1b", "zb-h1"):
        in_flight = [ceil(limit * more) for limit in warm_up(instance)]
    if name == "zb-h1":
        unfinished = [max(in_flight)] * slots
    if SCHEDULE_TRAITS[name].chunks:
        limits = [ceil(limit * more) for limit in _device_warm_up(instance, name)]
        if name == "interleaved":
            device_in_flight = limits
        else:
            device_unfinished = limits
    return DispatchRule(
        priority=_priority(name, instance),
        split=[SCHEDULE_TRAITS[name].halves] * slots,
        in_flight=in_flight,
        unfinished=unfinished,
        device_in_flight=device_in_flight,
        device_unfinished=device_unfinished,
        forwards_first=name == "gpipe",
        capacity=capacity,
    )


def warm_up(instance: SchedulingInstance) -> list[int]:
    """Return the micro-batches in flight of each slot under ``1f1b``.

    It is the number of replicas of the stage and of those after it, on the path where they are most, over the stage's
    own: the slot starts that many during a micro-batch's round trip.
    """
    replicas = [0] * instance.stages
    for slot in instance.slots:
        replicas[slot.stage] += 1
    path = _heaviest_path(instance, replicas)
    share = [0] * len(instance.slots)
    for slot_number in instance.slot_of:
        share[slot_number] += 1
    found = []
    for slot, turns in zip(instance.slots, share, strict=True):
        even = ceil(path[slot.stage] / replicas[slot.stage])
        found.append(max(even, ceil(path[slot.stage] * turns / instance.count)))
    return found


def _heaviest_path(instance: SchedulingInstance, weight: Sequence[int]) -> list[int]:
    """Return for each stage the sum of weights from it on, along the heaviest path."""
    path = list(weight)
    for stage in range(instance.stages - 1, -1, -1):
        path[stage] += max((path[end // instance.count] for end, _ in instance.out[stage]), default=0)
    return path


def _device_warm_up(instance: SchedulingInstance, name: str) -> list[int]:
    """Return the micro-batches in flight of each device, over all its stages.

    For ``zbv`` they are as many as there are stages. For ``interleaved`` it is the path from the device's first stage
    to the end and back to its last one: of a device with `v` stages, the first at position `d` of `D`, with rounds of
    `r` micro-batches, `2 (D - d - 1) + (v - 1) r + 1`.
    """
    path = _heaviest_path(instance, [1] * instance.stages)
    longest, in_round = max(path), ceil(instance.count / _rounds(instance))
    found = []
    for device in range(len(instance.devices)):
        mine = [path[slot.stage] for slot in instance.slots if device in slot.members]
        if name == "zbv":
            found.append(max(longest, len(mine)))
        else:
            longer = (len(mine) - 1) * max(0, in_round - ceil(longest / len(mine)))
            found.append(max(mine) + min(mine) - 1 + longer)
    return found


def _rounds(instance: SchedulingInstance) -> int:
    """Return the number of rounds in which micro-batches go through the stages of a device.

    A round has at least as many micro-batches as there are devices in a row, so that the first one is back when the
    last has been sent; rounds are as even as can be.
    """
    held: dict[int, int] = {}
    for slot in instance.slots:
        for member in slot.members:
            held[member] = held.get(member, 0) + 1
    in_row = ceil(max(_heaviest_path(instance, [1] * instance.stages)) / max(held.values()))
    return max(1, instance.count // in_row)


def _priority(name: str, instance: SchedulingInstance) -> list[float]:
    """Return each node's place in a device's order of preference: forwards, gradients of inputs, those of weights.

    Forwards come first because only the limits in flight restrain them, which are thus fully used. Of each kind the
    oldest micro-batch, or round, goes first.
    """
    count, stages = instance.count, instance.stages
    rounds = _rounds(instance) if name == "interleaved" else count
    forward: list[float] = []
    inputs: list[float] = []
    weight: list[float] = []
    for stage in range(stages):
        for micro_batch in range(count):
            turn = micro_batch * rounds // count
            forward.append((turn * stages + stage) * count + micro_batch)
            inputs.append((turn * stages + stages - stage) * count + micro_batch)
            weight.append(micro_batch * stages + stages - stage)
    most = 2 * (rounds + 1) * (stages + 1) * count
    return [*forward, *(place + most for place in inputs), *(place + 2 * most for place in weight)]


def ideal_step_time(
    name: str,
    devices: int,
    micro_batches: int,
    forward_s: float,
    input_s: float,
    weight_s: float,
    stages_per_device: int = 1,
) -> float:
    """Return the ideal time of a step, from the first forward to the end of the last gradient.

    Each device computes for `M (F + I + W)`; on top of that comes, for `D` devices with `v` stages each:

    - ``gpipe``, ``1f1b``: `(D - 1) (F + I + W)` (Huang et al. 2019, arXiv:1811.06965; Narayanan et al. 2019);
    - ``interleaved``: `(D - 1) (F + I + W) / v` (Narayanan et al. 2021, arXiv:2104.04473, section 2.2);
    - ``zb-h1``: `(D - 1) (F + I - W)` (Qi et al. 2024, arXiv:2401.10241), but no less than the `(D - 1) F` before the
      last device starts, which that paper leaves out of its bubbles;
    - ``zbv``: that time alone, `(D - 1) F / 2`, since stages are half as long (Qi et al. 2024, arXiv:2405.15362); for
      `F = I = W` and all but them a little more.

    Args:
        name: One of the named schedules.
        devices: Number of devices; all are equal, and so are the stages.
        micro_batches: Number of micro-batches; for ``interleaved`` a multiple of ``devices``.
        forward_s: Seconds of forward of one micro-batch in all stages of a device together, `F`.
        input_s: The same, of the gradients of inputs, `I`.
        weight_s: The same, of the gradients of parameters, `W`.
        stages_per_device: Stages of each device; ``zbv`` has two.

    Raises:
        UsageError: The formula does not hold for these numbers.

    Example:
        >>> ideal_step_time("1f1b", 4, 8, 1.0, 1.0, 1.0)
        33.0
    """
    if name not in NAMED:
        raise UsageError(f"no theory of a schedule {name!r}; allowed are {', '.join(NAMED)}")
    if devices < 1 or micro_batches < 1 or stages_per_device < 1:
        numbers = f"{devices} devices, {micro_batches} micro-batches, {stages_per_device} stages a device"
        raise UsageError(f"{numbers}: allowed are 1 or more of each")
    wanted = {"interleaved": stages_per_device, "zbv": 2}.get(name, 1)
    if stages_per_device != wanted:
        raise UsageError(f"{name} has {wanted} stages on a device, not {stages_per_device}")
    if name in ("interleaved", "zb-h1", "zbv") and micro_batches < devices:
        raise UsageError(f"{micro_batches} micro-batches: the formula of {name} holds from {devices} up, one a device")
    compute_s = forward_s + input_s + weight_s
    if name in ("gpipe", "1f1b", "interleaved"):
        idle_s = compute_s / stages_per_device
    elif name == "zb-h1":
        idle_s = forward_s + max(0.0, input_s - weight_s)
    else:
        idle_s = forward_s / 2
    return micro_batches * compute_s + (devices - 1) * idle_s
