"""Planning: measurement of the model, the devices and the links, and a search for the best plan."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch import nn

from onebox.cost import DeviceGroups, PoolProfile
from onebox.cost.model_profile import ModelProfile
from onebox.drawing import notebook, save, step_figure
from onebox.engine.config import check_objects, chosen_recovery
from onebox.engine.entry import entry_of_model
from onebox.engine.islands.division import Islands, check_shares, chosen_islands
from onebox.engine.memory.forecast import MemoryForecast, TrainingJob
from onebox.engine.partition.elementwise import by_element
from onebox.engine.planning.profile import profile_model
from onebox.engine.planning.training_modes import IslandsPlanning, plan_islands, training_modes
from onebox.engine.problem.corrections import (
    AppliedCorrection,
    correction_key,
    described_devices,
    kept_correction,
)
from onebox.engine.problem.memory_search import search_sharing, search_within, short_of_memory, with_peaks
from onebox.engine.problem.planner_problem import allowed_sizes, make_problem, measured_sizes
from onebox.engine.problem.split_costs import MOST_OPERATORS, split_costs, worthwhile_ranks
from onebox.engine.problem.stage_formats import with_formats
from onebox.engine.workload.batch import Batch, as_batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.delay_compensation import delays_of, extra_copies
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.errors import UsageError
from onebox.graph import Loss, Precision
from onebox.plan import Links, Plan, UpdateAt, predict, simulated_chart
from onebox.plan.evaluate.lossy import best_of
from onebox.plan.evaluate.modes import TrainingMode
from onebox.plan.model.problem import DeviceSpec, Problem
from onebox.plan.search.result import PlanCandidate, SearchResult
from onebox.plan_names import ACTIVATION_POLICIES, ChainPolicy, GradientCodec, LossyPart, searchable_schedules
from onebox.pool import DeviceInfo, Pool
from onebox.pool.devices import check_kinds, host_uplinks
from onebox.sizes import Memory, parse_budgets
from onebox.stop_signals import InterruptibleClock
from onebox.trainer_options import Numerics, Outer, StaleGradients, checked_lossy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class PlanningResult:
    """A plan and its basis.

    Args:
        plan: The best plan, with its predictions.
        result: The search result.
        problem: The planner's problem.
        profile: The model's profile.
        islands: The plans of islands, if they were asked for.
        modes: Exact, compressed and island training beside each other, as far as they were asked for.
        captures: The captured model, with which a trainer that has asked for the plan begins.
        correction: The correction of the profile by earlier runs; ``None`` if it is not known.
        interrupted: Whether Ctrl-C has ended the search.
    """

    plan: Plan
    result: SearchResult
    problem: Problem
    profile: ModelProfile
    islands: IslandsPlanning | None = None
    modes: tuple[TrainingMode, ...] = ()
    captures: Captures | None = field(default=None, repr=False)
    correction: AppliedCorrection | None = field(default=None, repr=False)
    interrupted: bool = False

    def figure(self, path: str | Path | None = None) -> Figure:
        """Return a figure of the predicted step: computation, transfers and sums of each device over time.

        Args:
            path: A file for it, a ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            UsageError: The file cannot be written.
            MissingExtra: Matplotlib is not installed.
        """
        chart = simulated_chart(predict(self.problem, self.plan)[1])
        found = step_figure([chart], title=self.plan.describe())
        if path is not None:
            save(found, path)
        return found

    def _repr_html_(self) -> str:
        """Return the plan as a notebook shows it, with its step over time."""
        svg = notebook.step_svg(simulated_chart(predict(self.problem, self.plan)[1]))
        return notebook.card("Planned", notebook.text(self.plan.describe()), self.plan.stages_html(), svg)


@entry_of_model
def make_plan(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizers,
    inputs: Any,
    targets: Any = None,
    *,
    pool: Pool,
    micro_batches: Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    policies: Sequence[ChainPolicy] = ACTIVATION_POLICIES,
    update: Sequence[UpdateAt] = ("device",),
    memory: Memory | None = None,
    preparing: float = 0.0,
    precision: Precision = "fp32",
    fuse: bool = False,
    numerics: Numerics = Numerics(),
    budget_s: float = 5.0,
    profiling_s: float = math.inf,
    fresh: bool = False,
    stale: StaleGradients | None = None,
    shard_optimizer: bool = True,
    split_layers: bool = True,
    among: Sequence[int] | None = None,
    lossy: Collection[LossyPart] = (),
    islands: Islands | None = None,
    outer: Outer | None = None,
    interruptible: bool = False,
) -> PlanningResult:
    """Find the best plan for a model, a batch and a pool.

    Args:
        model: The model.
        loss: Maps (outputs, targets) to a scalar, a mean over samples.
        optimizer: Of ``torch.optim``, over the model's parameters, or several.
        inputs: A batch, as for :meth:`Trainer.step`.
        targets: Likewise; ``None`` for a loss that needs none.
        pool: The devices; each is measured.
        micro_batches: Allowed samples of a micro-batch; halvings of the batch when ``None``. The loss curve depends on
            the micro-batch if the model does, as batch norm does.
        schedules: Allowed schedules; all when ``None``.
        policies: Allowed activation policies for devices short of memory: ``keep``, ``recompute``, ``offload``,
            ``swap``, and ``cpu`` for parts of a device's stage on a CPU worker beside it.
        update: Allowed places of the optimizer's state: ``device``, ``host``, or both.
        memory: Memory limit of each device, as for :func:`onebox.open`, besides the budgets of the pool itself. It is
            stored in the plan, and a trainer refuses steps that need more.
        preparing: Cores of this machine that are busy reading and preparing batches during training: if workers and
            preparation need more cores than there are, they slow each other down.
        precision: As for :class:`Trainer`.
        fuse: Likewise.
        numerics: As for :class:`Engine`.
        budget_s: Time limit in seconds for everything after measuring. It is counted in simulated steps, with a margin,
            so that the same input gives the same plan; on a busy machine the clock ends the search, with the best plan
            so far.
        profiling_s: Time limit in seconds for measuring the model, not counting captures: what is not measured by then
            is estimated from what is. ``plan="auto"`` of a trainer allows 5 s.
        fresh: Whether to repeat earlier measurements.
        stale: As for :class:`Trainer`: asynchronous plans are considered, too, whose schedule is ``async-1f1b``; if
            none of them fits or is faster, the plan is exact. The correction affects memory.
        shard_optimizer: Whether replicas may shard the optimizer's state, considered where a device lacks the memory
            for the whole model.
        split_layers: Whether alike devices of a host may split the layers of a stage. That is considered where an ideal
            split would gain time, or one device does not hold the model, for optimizers that treat each element of a
            parameter by itself; the splits are searched for within ``budget_s`` beside the plan, at least those over
            two devices.
        among: The devices that the plan may use; all of the pool without it.
        lossy: As for :class:`Trainer`: stages whose gradients, or activations, take much of a step get a lossy codec if
            the step is predicted to gain a tenth by it.
        islands: As for :class:`Trainer`: plans for islands are searched for, too, each of which fits its devices.
        outer: As for :class:`Trainer`.
        interruptible: Whether the first Ctrl-C during the search ends it with the best plan so far. While nothing that
            fits is known, the search goes on; a second Ctrl-C raises ``KeyboardInterrupt`` as usual.

    Raises:
        UsageError: The batch cannot be divided as asked, the optimizer does not support the correction, the budgets
            do not match the devices, some of these are emulated (``sim``) and others are not, a time limit is negative,
            or islands overlap, leave a device out, or do not go with another argument.
        PlanError: Nothing fits.
        CaptureError: The model cannot be captured.

    Example:
        >>> import torch, onebox
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> with onebox.open("cpu*2") as pool:
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     loss, x, y = torch.nn.functional.mse_loss, torch.ones(8, 4), torch.zeros(8, 1)
        ...     planned = onebox.make_plan(model, loss, optimizer, x, y, pool=pool)
        ...     with onebox.Trainer(model, loss, optimizer, pool=pool, plan=planned.plan) as trainer:
        ...         assert trainer.step(x, y).item() >= 0
    """
    check_objects(model, loss, pool, None, None)
    for name, limit_s in (("budget_s", budget_s), ("profiling_s", profiling_s)):
        if not limit_s >= 0:
            raise UsageError(f"{name} is {limit_s}; allowed are seconds from 0 up")
    lossy, batch = checked_lossy(lossy), as_batch(inputs, targets)
    groups = _checked_islands(islands, outer, pool, alone=among is None and stale is None)
    chosen = tuple(range(len(pool)) if among is None else among)
    check_kinds([pool.devices[device] for device in chosen], "a plan")
    allowed = allowed_sizes(batch.size, micro_batches)
    budgets = parse_budgets("memory", memory).of(len(pool))
    late = delays_of(optimizer, stale.correction if stale else "auto")
    names = tuple(schedules) if schedules is not None else searchable_schedules(int(stale is not None))
    links = pool_links(pool, chosen, fresh=fresh)  # first, as estimates of the model's times use the devices' speeds
    profile, captures = profile_model(
        model,
        loss,
        optimizer,
        inputs,
        targets,
        pool=pool,
        sizes=measured_sizes(batch.size, allowed),
        precision=precision,
        fuse=fuse,
        numerics=numerics,
        fresh=fresh,
        within_s=profiling_s,
    )
    problem = make_problem(
        profile,
        [_within(pool.devices, budgets)[device] for device in chosen],
        links,
        batch=batch.size,
        micro_batches=allowed,
        schedules=names,
        policies=policies,
        updates=update,
        preparing=preparing,
        staleness=int(stale is not None),
        versions=2 + extra_copies(late),
    )
    key = correction_key(profile, pool.devices)
    correction = AppliedCorrection(key=key, factors=kept_correction(key), devices=described_devices(pool.devices))
    problem = correction.factors.applied(problem)
    if short_of_memory(problem):
        problem = with_host_speeds(problem, pool, fresh=fresh)
    if split_layers and by_element(optimizer):
        problem = _with_splits(problem, captures, batch, profile, budget_s)

    job = TrainingJob(
        captures=captures,
        optimizer=optimizer,
        batch=batch,
        devices=pool.devices,
        links=pool.links,
        plain_links=pool.plain_links,
        delay=late,
    )

    def exact(plan: Plan) -> MemoryForecast:
        return job.count(formatted(plan, profile, pool.devices))

    with InterruptibleClock(interruptible) as clock:
        if shard_optimizer and len(chosen) > 1 and short_of_memory(problem):
            result, plan, problem = search_sharing(problem, exact, budget_s, clock)
        else:
            result, plan = search_within(problem, exact, budget_s, clock)
    if lossy and len(pool) > 1:
        problem = with_coding_speeds(problem, pool, fresh=fresh)
        result, plan = _with_codecs(problem, plan, result, exact, lossy)
    joined = None
    if groups is not None:
        with clock:
            joined = plan_islands(
                replace(problem, splits={}),  # all islands would have to split layers alike
                job,
                groups,
                outer or Outer(),
                micro_batches=micro_batches,
                finish=lambda found: _limited(formatted(found, profile, pool.devices), budgets),
                budget_s=budget_s,
                confirmed=chosen_recovery(pool, "auto") is not None,
                clock=clock,
            )
    plan = _limited(formatted(plan, profile, pool.devices), budgets)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    modes = training_modes(problem, plan, result, lossy=lossy, islands=joined, parameters=parameters)
    return PlanningResult(
        plan=plan,
        result=result,
        problem=problem,
        profile=profile,
        islands=joined,
        modes=modes,
        captures=captures,
        correction=correction,
        interrupted=clock.interrupted,
    )


def _checked_islands(islands: Islands | None, outer: Outer | None, pool: Pool, *, alone: bool) -> DeviceGroups | None:
    """Return the devices of each island; ``None`` without islands.

    Raises:
        UsageError: They overlap, leave a device out, or do not go with the other arguments.
    """
    if islands is None:
        if outer is not None:
            raise UsageError(f"outer={outer}: it is the outer optimizer of islands; give islands= too, or leave it out")
        return None
    if not alone:
        raise UsageError("islands= do not go together with stale= or among=; leave one of them out")
    found = chosen_islands(pool, islands)
    check_shares((outer or Outer()).shares, found)
    return found


def _within(devices: Sequence[DeviceInfo], budgets: Sequence[int]) -> list[DeviceInfo]:
    """Return devices with their memory limited to their budgets; a budget of 0 means no limit."""
    return [
        replace(device, memory_bytes=min(device.memory_bytes, budget or device.memory_bytes))
        for device, budget in zip(devices, budgets, strict=True)
    ]


def _limited(plan: Plan, budgets: Sequence[int]) -> Plan:
    """Return a plan with the budgets of its devices, if there are any."""
    if not any(budgets):
        return plan
    return msgspec.structs.replace(plan, memory_bytes=tuple(budgets[device] for device in plan.devices))


def formatted(plan: Plan, profile: ModelProfile, devices: Sequence[DeviceInfo]) -> Plan:
    """Return a plan with the fastest measured formats; versions of weights have the run's precision."""
    found = with_formats(plan, profile, devices)
    if not found.late:
        return found
    stages = tuple(msgspec.structs.replace(stage, precision=None) for stage in found.stages)
    return msgspec.structs.replace(found, stages=stages)


def with_host_speeds(problem: Problem, pool: Pool, *, fresh: bool = False) -> Problem:
    """Return a problem with the measured bandwidths between devices and their hosts' memory.

    A device with little free memory is not measured: the bandwidth of a copying core is assumed.
    """
    try:
        measured = pool.profile(fresh=fresh).devices
    except UsageError:
        return problem
    known = {device.number: device.speeds.host_copy_bps for device in measured}
    devices = (
        replace(device, host_bps=found) if (found := known.get(device.number)) else device for device in problem.devices
    )
    return replace(problem, devices=tuple(devices))


def _with_splits(problem: Problem, captures: Captures, batch: Batch, profile: ModelProfile, budget_s: float) -> Problem:
    """Return a problem with the costs of split layers, as far as these may pay and are found in time."""
    ranks, end_s = worthwhile_ranks(problem), time.monotonic() + budget_s
    if not ranks:
        return problem
    sizes = measured_sizes(batch.size, problem.micro_batches)
    found = split_costs(
        captures,
        batch,
        sizes,
        problem,
        ranks,
        profile.times,
        most_operators=MOST_OPERATORS,
        expired=lambda: time.monotonic() >= end_s,
    )
    return replace(problem, splits=found)


def with_coding_speeds(problem: Problem, pool: Pool, *, fresh: bool = False) -> Problem:
    """Return a problem with the measured speeds of encoding gradients on each device."""
    known = {device.number: device.speeds for device in pool.profile(fresh=fresh).devices}

    def coding(device: DeviceSpec) -> DeviceSpec:
        speeds = known[device.number]
        named: dict[GradientCodec, float | None] = {"bf16": speeds.bf16_coding_bps, "int8": speeds.int8_coding_bps}
        return replace(device, coding_bps={codec: bps for codec, bps in named.items() if bps is not None})

    return replace(problem, devices=tuple(map(coding, problem.devices)))


def _with_codecs(
    problem: Problem,
    plan: Plan,
    result: SearchResult,
    exact: Callable[[Plan], MemoryForecast],
    lossy: Sequence[LossyPart],
) -> tuple[SearchResult, Plan]:
    """Return a plan, or one that it was compared with, with lossy codecs if that is clearly faster and fits.

    Args:
        problem: The problem, with the devices' speeds of encoding.
        plan: The best exact plan, with its exact memory.
        result: The search result.
        exact: Returns the exact memory of a plan.
        lossy: Parts of the traffic that may be compressed.
    """
    others = [one.plan for one in result.candidates if not one.refused and not one.shortfalls]
    found = best_of(problem, (plan, *others), lossy)
    if found is plan:
        return result, plan
    peaks, lack = exact(found)
    room = problem.capacity_bytes
    if lack or any(peak > room[device] for device, peak in peaks.items() if device in room):
        return result, plan
    found = with_peaks(found, peaks)
    candidates = (PlanCandidate(label="with lossy messages", plan=found), *result.candidates)
    _, simulation = predict(problem, found)
    return replace(result, plan=found, simulation=simulation, candidates=candidates), found


def pool_links(pool: Pool, among: Sequence[int] | None = None, *, fresh: bool = False) -> Links:
    """Return the links among some devices of a pool, or all: those of hosts as they are, others as measured before."""
    among = range(len(pool)) if among is None else among
    if len(among) == 1:
        (only,) = among
        return Links(latency_s={only: {only: 0.0}}, bandwidth_bps={only: {only: float("inf")}})
    return known_pool_links(pool.profile(fresh=fresh, probe=among), pool.devices).among(among)


def known_pool_links(measured: PoolProfile, devices: Sequence[DeviceInfo]) -> Links:
    """Return the links between all devices of a pool as they are in its profile."""
    return Links(latency_s=measured.latency_s, bandwidth_bps=measured.bandwidth_bps, uplinks=host_uplinks(devices))
