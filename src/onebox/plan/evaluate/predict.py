"""Prediction of a plan's step time and memory by simulation; the order of actions and the simulation of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import log

from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.layout import layout_of
from onebox.plan.model.plan import Plan, Prediction
from onebox.plan.model.problem import Problem, StepSpread
from onebox.plan.model.schedule import Routes, Schedule
from onebox.plan.model.work import PlanWork, StageWork
from onebox.plan.schedules.async_window import steady_window
from onebox.plan.schedules.blocks import block_schedule
from onebox.plan.schedules.synthesis import auto_schedule
from onebox.plan.simulate.steady_state import simulate_steady_state
from onebox.plan.simulate.step import Simulation, simulate
from onebox.plan_names import SCHEDULE_TRAITS


def predict(problem: Problem, plan: Plan, *, overlap: bool = False) -> tuple[Prediction, Simulation]:
    """Time a plan and measure its memory, without running it.

    Args:
        problem: Segments, values, devices, links.
        plan: The plan; its own prediction is ignored. An asynchronous one is simulated in its steady state.
        overlap: Whether sums and updates of a step overlap with the next one; then the step is one of the steady state,
            too.

    Returns:
        The prediction to store in the plan, and the simulation with every action and message.

    Raises:
        UsageError: The plan does not match the problem.
    """
    problem = replace(problem, sharded=plan.optimizer == "sharded")
    work, sizes = CostModel(problem).work(layout_of(problem, plan), plan.micro_batches(problem.batch))
    routes = plan.routes(problem.batch)
    schedule = schedule_of(plan, routes, work, sizes)
    if overlap and not plan.late:
        simulation = simulate_steady_state(schedule, routes, work, sizes, updates="overlap")
    else:
        simulation = simulate_order(plan.schedule, schedule, routes, work, sizes, versions=problem.versions)
    return prediction_of(plan, problem, work, simulation), simulation


def schedule_of(plan: Plan, routes: Routes, work: PlanWork, sizes: Sequence[float]) -> Schedule:
    """Return the schedule that a plan names or contains; of an asynchronous one, its steady window.

    Args:
        plan: The plan.
        routes: Routes of the micro-batches.
        work: Costs of its stages; used by ``auto`` only.
        sizes: Micro-batches' sizes as fractions; used by ``auto`` only.
    """
    if plan.schedule == "table":
        return Schedule.parse(plan.table)
    if plan.schedule == "auto":
        return auto_schedule(routes, work, sizes)
    return order_of(plan.schedule, routes, [(edge.source, edge.target) for edge in work.edges], plan.in_flight)


def order_of(name: str, routes: Routes, edges: Sequence[tuple[int, int]], in_flight: Sequence[int] = ()) -> Schedule:
    """Return the order of actions of a schedule that depends on routes alone; of an asynchronous one, its window.

    Args:
        name: Name of the schedule.
        routes: Routes of the micro-batches.
        edges: Pairs of source and target stage.
        in_flight: Of an asynchronous one, the micro-batches in flight of each stage; see :func:`steady_window`.
    """
    if SCHEDULE_TRAITS[name].late:
        return steady_window(routes, edges, in_flight)
    return block_schedule(name, routes, edges=edges)


def simulate_order(
    name: str,
    order: Schedule,
    routes: Routes,
    work: PlanWork,
    sizes: Sequence[float],
    *,
    versions: int,
    detail: bool = True,
) -> Simulation:
    """Simulate a step of a schedule; of an asynchronous one, in its steady state.

    Args:
        name: Name of the schedule.
        order: Its order of actions.
        routes: Routes of the micro-batches.
        work: Costs of the stages.
        sizes: Micro-batches' sizes as fractions.
        versions: Versions of the weights that an asynchronous one holds.
        detail: Whether to return each action and message.
    """
    if SCHEDULE_TRAITS[name].late:
        return simulate_steady_state(order, routes, work, sizes, versions=versions, detail=detail)
    return simulate(order, routes, work, sizes, detail=detail)


def prediction_of(plan: Plan, problem: Problem, work: PlanWork, simulation: Simulation) -> Prediction:
    """Return a simulation as a plan's prediction; the times of a stage are those of its slowest replica.

    The interval is that of the machine's slowdown over times as long as the step, one factor common to all of its
    actions, on the type of device where it spreads most.
    """
    spreads = [problem.spread.get(problem.device[device].type) for device in plan.devices]
    known = [_ends(spread, simulation.step_s) for spread in spreads if spread]
    interval_s = (
        (simulation.step_s * min(low for low, _ in known), simulation.step_s * max(high for _, high in known))
        if known and len(known) == len(spreads)
        else None
    )
    return Prediction(
        batch=problem.batch,
        step_s=simulation.step_s,
        bubble=simulation.bubble,
        peak_bytes=tuple(simulation.peak_bytes.get(device, 0) for device in plan.devices),
        stages_s=tuple(
            (max(stage.forward_s.values()), max(stage.input_s.values()), max(stage.weight_s.values()))
            for stage in work.stages
        ),
        replicas_s=tuple(
            tuple(_slowest(work.stages[number], replica) for replica in stage.replicas)
            for number, stage in enumerate(plan.stages)
        ),
        interval_s=interval_s,
    )


def _ends(spread: Sequence[StepSpread], step_s: float) -> tuple[float, float]:
    """Return the ends of the interval of a step, relative to it, between those of the next shorter and longer steps."""
    for shorter, longer in pairwise(spread):
        if step_s < longer.seconds:
            part = (
                max(0.0, log(step_s / shorter.seconds) / log(longer.seconds / shorter.seconds)) if step_s > 0 else 0.0
            )
            return (
                shorter.low + part * (longer.low - shorter.low),
                shorter.high + part * (longer.high - shorter.high),
            )
    return spread[-1].low, spread[-1].high


def _slowest(stage: StageWork, replica: Sequence[int]) -> tuple[float, float, float]:
    """Return the times of a stage on the slowest device of a replica."""
    forward_s, input_s, weight_s = (
        max(times[device] for device in replica) for times in (stage.forward_s, stage.input_s, stage.weight_s)
    )
    return forward_s, input_s, weight_s
