"""Plans of islands from a planner's problem, and exact, compressed and island training beside each other."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from onebox.cost import DeviceGroups
from onebox.engine.islands.division import are_alike, divided, island_sizes
from onebox.engine.islands.outer_optimizer import outer_state_bytes
from onebox.engine.islands.prediction import outer_schedule, predict_islands
from onebox.engine.memory.forecast import MemoryForecast, TrainingJob
from onebox.engine.problem.memory_search import search_within, with_peaks
from onebox.engine.problem.planner_problem import allowed_sizes
from onebox.errors import UsageError
from onebox.plan import Plan, SearchResult, predict, shares_from_speeds
from onebox.plan.evaluate.islands import IslandsPrediction
from onebox.plan.evaluate.modes import TrainingMode, published_codecs, published_islands
from onebox.plan.evaluate.traffic import between_groups, step_traffic
from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.device_groups import near
from onebox.plan.model.problem import Problem
from onebox.plan_names import LossyPart
from onebox.trainer_options import Outer


@dataclass(frozen=True, kw_only=True)
class IslandsPlanning:
    """Plans of islands, for the arguments ``islands``, ``plan`` and ``outer`` of a trainer.

    Args:
        islands: Devices of each island.
        plans: The plan of each island, with its prediction, whose memory includes the global values.
        outer: The outer optimizer, with the islands' shares of the batch.
        predicted: The prediction of the run.
    """

    islands: DeviceGroups
    plans: tuple[Plan, ...]
    outer: Outer
    predicted: IslandsPrediction


def plan_islands(
    problem: Problem,
    job: TrainingJob,
    islands: DeviceGroups,
    outer: Outer,
    *,
    micro_batches: Sequence[int] | None,
    finish: Callable[[Plan], Plan],
    budget_s: float,
    confirmed: bool,
    clock: Callable[[], float] = time.monotonic,
) -> IslandsPlanning:
    """Search for the best plan of each island, for its share of the batch.

    Args:
        problem: The problem of all devices. They were measured while all of them worked, as those of islands do.
        job: The job of all devices.
        islands: Devices of each island.
        outer: The outer optimizer. Shares that it leaves open are equal for islands of alike devices, else those of
            the islands' predicted speeds.
        micro_batches: Allowed samples of a micro-batch, as for :func:`onebox.make_plan`.
        finish: Returns a plan with its formats.
        budget_s: Time limit of all searches in seconds.
        confirmed: Whether sums are applied only once all islands have them, as with recovery.
        clock: Returns the time in seconds.

    Raises:
        UsageError: An island gets no sample.
        PlanError: Nothing fits some island.
    """
    shares = outer.shares
    if shares == "auto" and are_alike(islands, job.devices):
        shares = "equal"
    open_ = shares == "auto"
    if isinstance(shares, str):
        model, largest = CostModel(problem), max(problem.micro_batches)
        speeds = [sum(model.power(device, largest) for device in devices) for devices in islands]
        shares = shares_from_speeds(speeds) if shares != "equal" else [1.0] * len(islands)
    each_s, plans = budget_s / len(islands), list[Plan]()
    for own, exact in _parts(problem, job, islands, outer, shares, micro_batches, finish, confirmed):
        plans.append(finish(search_within(own, exact, each_s, clock)[1]))
    if open_:
        predictions = [plan.predicted for plan in plans if plan.predicted is not None]
        shares = shares_from_speeds([each.batch / each.step_s for each in predictions])
        parts = _parts(problem, job, islands, outer, shares, micro_batches, finish, confirmed)
        plans = [
            with_peaks(msgspec.structs.replace(plan, predicted=predict(own, plan)[0]), exact(plan).peaks)
            for plan, (own, exact) in zip(plans, parts, strict=True)
        ]
    steps = outer_schedule([job.compiler(plan) for plan in plans], outer)
    predicted = predict_islands(plans, steps, problem.links)
    return IslandsPlanning(
        islands=islands, plans=tuple(plans), outer=replace(outer, shares=tuple(shares)), predicted=predicted
    )


def _parts(
    problem: Problem,
    job: TrainingJob,
    islands: DeviceGroups,
    outer: Outer,
    shares: Sequence[float],
    micro_batches: Sequence[int] | None,
    finish: Callable[[Plan], Plan],
    confirmed: bool,
) -> list[tuple[Problem, Callable[[Plan], MemoryForecast]]]:
    """Return the problem of each island, and what counts the exact memory of its plans."""
    sizes = island_sizes(problem.batch, shares)
    if not all(sizes):
        raise UsageError(
            f"a batch of {problem.batch} samples gives the islands {', '.join(map(str, sizes))} of them, and each "
            "needs one at least; plan larger batches, or give shares"
        )
    beside = functools.partial(outer_state_bytes, outer=outer, islands=len(islands), confirmed=confirmed)
    found = list[tuple[Problem, Callable[[Plan], MemoryForecast]]]()
    for devices, size, part in zip(islands, sizes, divided(job.batch, shares), strict=True):
        assert part is not None, "each island has a sample"
        asked = None if micro_batches is None else [min(each, size) for each in micro_batches]
        own = replace(
            problem,
            devices=tuple(problem.device[device] for device in devices),
            links=problem.links.among(devices),
            batch=size,
            micro_batches=allowed_sizes(size, asked),
            cores={},
        )
        found.append((own, functools.partial(_count, replace(job, batch=part, beside=beside), finish)))
    return found


def _count(job: TrainingJob, finish: Callable[[Plan], Plan], plan: Plan) -> MemoryForecast:
    """Return the exact memory of a plan of an island with its formats."""
    return job.count(finish(plan))


def training_modes(
    problem: Problem,
    plan: Plan,
    result: SearchResult,
    *,
    lossy: Sequence[LossyPart],
    islands: IslandsPlanning | None,
    parameters: int,
) -> tuple[TrainingMode, ...]:
    """Return exact, compressed and island training as far as they were asked for; nothing for exact training alone.

    Args:
        problem: The problem.
        plan: The best plan, which may be lossy.
        result: The search result, with the best exact plan.
        lossy: Parts of the traffic that may be compressed with a loss.
        islands: The plans of islands, if any.
        parameters: Parameters of the model.
    """
    if not lossy and islands is None:
        return ()
    groups = _distant_groups(problem) if islands is None else islands.islands
    fitting = (one.plan for one in result.candidates if not one.refused and not one.shortfalls)
    exact = plan if not plan.lossy else next(found for found in fitting if not found.lossy)
    modes = [_mode("synchronous", problem, exact, groups)]
    if lossy and plan.lossy:
        modes.append(replace(_mode("compressed", problem, plan, groups), accuracy=published_codecs(plan.lossy)))
    elif lossy:
        text = "no codec shortens a step by a tenth"
        modes.append(TrainingMode(name="compressed", text=text, groups=groups, traffic={}, peak_bytes={}))
    if islands is not None:
        modes.append(
            TrainingMode(
                name="islands",
                text="; ".join(own.describe() for own in islands.plans),
                plans=islands.plans,
                batch=islands.predicted.batch,
                step_s=islands.predicted.step_s,
                groups=groups,
                traffic=between_groups(islands.predicted.traffic, groups),
                peak_bytes={device: peak for own in islands.plans for device, peak in _peaks(own).items()},
                accuracy=published_islands(parameters, len(groups)),
            )
        )
    return tuple(modes)


def _distant_groups(problem: Problem) -> DeviceGroups:
    """Return the groups of devices whose traffic with each other matters: by host, or as far as links show them."""
    hosts: dict[str, tuple[int, ...]] = {}
    for device in (device.number for device in problem.devices if device.number in problem.links.uplinks):
        uplink = problem.links.uplinks[device]
        hosts[uplink] = (*hosts.get(uplink, ()), device)
    if len(hosts) > 1:
        return tuple(hosts.values())
    return tuple((device.number,) for device in problem.devices) if len(problem.devices) == 2 else near(problem)[0]


def _mode(name: str, problem: Problem, plan: Plan, groups: DeviceGroups) -> TrainingMode:
    assert plan.predicted is not None, "a plan that a search has found"
    return TrainingMode(
        name=name,  # type: ignore[arg-type]
        text=plan.describe(),
        plans=(plan,),
        batch=plan.predicted.batch,
        step_s=plan.predicted.step_s,
        groups=groups,
        traffic=between_groups(step_traffic(problem, plan), groups),
        peak_bytes=_peaks(plan),
    )


def _peaks(plan: Plan) -> dict[int, int]:
    """Return the predicted memory of each device of a plan."""
    return dict(zip(plan.devices, plan.predicted.peak_bytes, strict=True)) if plan.predicted is not None else {}
