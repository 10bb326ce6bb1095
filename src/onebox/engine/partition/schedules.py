"""The schedule of a batch: the plan's schedule for the batch's micro-batches. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from onebox.graph import ModelPrograms
from onebox.plan import (
    Action,
    Edge,
    Kind,
    Links,
    MicroBatch,
    Plan,
    PlanWork,
    Routes,
    Schedule,
    StageWork,
    auto_schedule,
    block_schedule,
    validate,
)
from onebox.plan.evaluate.predict import order_of
from onebox.plan.model.window import check_window, repeated_routes, unrolled

_STEPS = 4
"""Number of consecutive windows that are checked: one fill, one drain, and two that follow a steady one."""

_BOTH: tuple[Kind, ...] = ("F", "B")
_HALVES: tuple[Kind, ...] = ("I", "W")


def make_schedule(plan: Plan, micro_batches: Sequence[MicroBatch], routes: Routes, model: ModelPrograms) -> Schedule:
    """Return the schedule of a plan for a batch.

    An explicit table of a plan is for one number of micro-batches; for another number it is recomputed, as for
    ``auto``, from the times that the plan predicts. If stages have activation policies, which indicate a lack of
    memory, or all stages are on the same devices, so that no order is faster, the schedule is ``1f1b``, with few
    micro-batches in flight.
    In each of these, stages with split layers have their backward in halves, as in ``zb-h1``.

    Args:
        plan: The plan.
        micro_batches: The micro-batches.
        routes: The workers of each micro-batch.
        model: The programs of the stages.

    Raises:
        UsageError: The plan's table does not match these stages.
    """
    if len(plan.stages) == 1:
        return _one_stage(routes)
    edges = stage_edges(model)
    if plan.late:  # for steps that do not overlap
        return block_schedule("1f1b", routes, edges=edges)
    if plan.schedule in ("auto", "table"):
        return _in_halves(_free_schedule(plan, micro_batches, routes, edges), plan)
    return block_schedule(plan.schedule, routes, edges=edges)


def _free_schedule(
    plan: Plan, micro_batches: Sequence[MicroBatch], routes: Routes, edges: Sequence[tuple[int, int]]
) -> Schedule:
    """Return the schedule of a plan with an explicit table or with ``auto``."""
    if plan.schedule == "table":
        table = Schedule.parse(plan.table)
        count = 1 + max((action.micro_batch for row in table.rows.values() for action in row), default=-1)
        if count == len(micro_batches):
            validate(table, routes, edges)
            return table
    thrifty = any(stage.policy != "keep" for stage in plan.stages) or len(set(routes)) == 1
    if plan.predicted is None or thrifty:
        return block_schedule("1f1b", routes, edges=edges)
    full = plan.micro_batch or micro_batches[0].size
    sizes = [part.size / full for part in micro_batches]
    return auto_schedule(routes, _expected_work(plan, edges), sizes)


def _in_halves(schedule: Schedule, plan: Plan) -> Schedule:
    """Return a schedule with the backward of split stages in halves: there are no split programs for a whole one."""
    split = {number for number, stage in enumerate(plan.stages) if stage.ranks > 1}
    rows: dict[int, tuple[Action, ...]] = {}
    for device, row in schedule.rows.items():
        parts = (_HALVES if action.kind == "B" and action.stage in split else (action.kind,) for action in row)
        pairs = zip(row, parts, strict=True)
        rows[device] = tuple(action._replace(kind=kind) for action, kinds in pairs for kind in kinds)
    return Schedule(rows=rows)


def plain_schedule(routes: Routes, model: ModelPrograms) -> Schedule:
    """Return the ``1f1b`` schedule of a step with undivided backward, whatever the plan's schedule.

    Args:
        routes: The workers of each micro-batch.
        model: The programs of the stages.
    """
    return _one_stage(routes) if len(routes) == 1 else block_schedule("1f1b", routes, edges=stage_edges(model))


def make_window(plan: Plan, micro_batches: Sequence[MicroBatch], routes: Routes, model: ModelPrograms) -> Schedule:
    """Return the table of a steady-state window of a plan for a batch: a step that overlaps with its neighbours.

    Args:
        plan: The plan.
        micro_batches: The micro-batches.
        routes: The workers of each micro-batch.
        model: The programs of the stages.

    Raises:
        UsageError: The plan's schedule does not overlap steps.
    """
    if not plan.late:
        return make_schedule(plan, micro_batches, routes, model)
    if len(plan.stages) == 1:
        return _one_stage(routes)
    edges, count = stage_edges(model), len(micro_batches)
    window = order_of(plan.schedule, routes, edges, plan.in_flight)
    check_window(window, count)
    validate(unrolled(window, count, _STEPS), repeated_routes(routes, _STEPS), edges)
    return window


def _expected_work(plan: Plan, edges: Sequence[tuple[int, int]]) -> PlanWork:
    """Return the work that a plan expects of its stages; transfers are left out."""
    assert plan.predicted is not None
    stages = []
    for stage, (forward_s, input_s, weight_s) in zip(plan.stages, plan.predicted.stages_s, strict=True):
        devices = [device for replica in stage.replicas for device in replica]
        stages.append(
            StageWork(
                forward_s=dict.fromkeys(devices, forward_s),
                input_s=dict.fromkeys(devices, input_s),
                weight_s=dict.fromkeys(devices, weight_s),
                update_s=dict.fromkeys(devices, 0.0),
            )
        )
    near = {a: dict.fromkeys(plan.devices, 0.0) for a in plan.devices}
    wide = {a: dict.fromkeys(plan.devices, float("inf")) for a in plan.devices}
    between = tuple(Edge(source=a, target=b, forward_bytes=0, backward_bytes=0) for a, b in edges)
    return PlanWork(
        stages=tuple(stages), edges=between, links=Links(latency_s=near, bandwidth_bps=wide), capacity_bytes={}
    )


def _one_stage(routes: Routes) -> Schedule:
    """Return the schedule of replicas of the whole model: backward directly follows forward."""
    rows: dict[int, list[Action]] = {}
    for micro_batch, replica in enumerate(routes[0]):
        for device in replica:
            rows.setdefault(device, []).extend(Action(kind, 0, micro_batch) for kind in _BOTH)
    return Schedule(rows={device: tuple(row) for device, row in rows.items()})


def forward_only(routes: Routes) -> Schedule:
    """Return the schedule of an evaluation."""
    rows: dict[int, list[Action]] = {}
    for micro_batch in range(len(routes[0])):
        for stage, route in enumerate(routes):
            for device in route[micro_batch]:
                rows.setdefault(device, []).append(Action("F", stage, micro_batch))
    return Schedule(rows={device: tuple(row) for device, row in rows.items()})


def stage_edges(model: ModelPrograms) -> list[tuple[int, int]]:
    """Return the pairs of stages connected by forward values or gradients."""
    maker = {port: phase.stage for phase, part in model.phases.items() for port in part.outputs if port.kind == "value"}
    found = set()
    for phase, part in model.phases.items():
        for port in part.inputs:
            if port.kind == "value" and maker[port] != phase.stage:
                found.add((min(maker[port], phase.stage), max(maker[port], phase.stage)))
    return sorted(found)
