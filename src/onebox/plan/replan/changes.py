"""Changes of a plan: their description, and the plans that they lead to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from onebox.plan.evaluate.predict import prediction_of
from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.layout import StageLayout
from onebox.plan.model.plan import Plan
from onebox.plan.model.problem import Problem
from onebox.plan.model.schedule import Schedule
from onebox.plan.model.stage import Stage
from onebox.plan.replan.decisions import ReplanKind
from onebox.plan.simulate.step import Simulation

PlanEdit = tuple[str, int, int]
"""A single change of a decision: its kind, the object, and the new value; see :func:`edits_of`."""


class ProposedChange(NamedTuple):
    """A possible change.

    Args:
        layout: The stages after it.
        table: The order of actions; ``None`` where the schedule's name determines it.
        step_s: Expected seconds of a step.
        cost_s: One-time cost in seconds.
        moved: Bytes moved over each link.
        simulation: Simulation of a step.
        in_flight: Micro-batches in flight, where the plan is to set them.
    """

    layout: StageLayout
    table: Schedule | None
    step_s: float
    cost_s: float
    moved: Mapping[tuple[int, int], int]
    simulation: Simulation
    in_flight: tuple[int, ...] = ()


def replan_kind_of(before: StageLayout, after: StageLayout) -> ReplanKind:
    """Return the kind of decision that leads from one layout to another."""
    places = [[(part.segments, part.devices) for part in layout.parts] for layout in (before, after)]
    if places[0] != places[1]:
        return "recut"
    return "reshare" if [p.shares for p in before.parts] != [p.shares for p in after.parts] else "reorder"


def edits_of(before: StageLayout, after: StageLayout) -> frozenset[PlanEdit]:
    """Return the single changes of a decision: segments on devices or, where none joins one, segments that leave
    devices; shares of stages, the order of actions."""
    kind = replan_kind_of(before, after)
    if kind == "recut":
        had, has = holders(before), holders(after)
        every = range(len(has))
        joins = frozenset(("segment", i, device) for i in every for device in has[i] if device not in had[i])
        return joins or frozenset(("leave", i, device) for i in every for device in had[i] if device not in has[i])
    if kind == "reshare":
        pairs = enumerate(zip(before.parts, after.parts, strict=True))
        return frozenset(("shares", number, 0) for number, (one, other) in pairs if one.shares != other.shares)
    return frozenset({(f"schedule {after.schedule}", 0, 0)})


def changed_plan(plan: Plan, problem: Problem, proposal: ProposedChange) -> Plan:
    """Return the plan with a proposal applied; stages keep their formats, devices their memory limits.

    Its prediction of a step uses the present estimates; its predictions of stages are for the devices as they were when
    the problem was made, as in the plan before.

    Args:
        plan: The plan in force.
        problem: The problem that the first plan was made for.
        proposal: The proposal.
    """
    layout = proposal.layout
    stages = tuple(
        msgspec.structs.replace(
            stage,
            segments=tuple(problem.segments[index].name for index in sorted(part.segments)) if stage.segments else (),
            replicas=tuple((device,) for device in part.devices),
            shares=part.shares,
        )
        for stage, part in zip(_forms(plan, len(layout.parts)), layout.parts, strict=True)
    )
    table = proposal.table.lines() if proposal.table is not None else ()
    schedule = "table" if table else layout.schedule
    limits = dict(zip(plan.devices, plan.memory_bytes, strict=True)) if plan.memory_bytes else {}
    bare = msgspec.structs.replace(
        plan,
        stages=stages,
        micro_batch=layout.micro_batch,
        schedule=schedule,
        table=table,
        in_flight=proposal.in_flight,
        memory_bytes=(),
        predicted=None,
    )
    work, _ = CostModel(problem).work(layout, bare.micro_batches(problem.batch))
    return msgspec.structs.replace(
        bare,
        memory_bytes=tuple(limits.get(device, 0) for device in bare.devices) if limits else (),
        predicted=prediction_of(bare, problem, work, proposal.simulation),
    )


def _forms(plan: Plan, stages: int) -> tuple[Stage, ...]:
    """Return the stages whose formats a changed plan takes over; where their number changes, all are alike."""
    return plan.stages if len(plan.stages) == stages else plan.stages[:1] * stages


def holders(layout: StageLayout) -> list[tuple[int, ...]]:
    """Return the devices of each segment."""
    where = {index: part.devices for part in layout.parts for index in part.segments}
    return [where[index] for index in range(len(where))]
