"""Planning: measure the model, the devices and the links, and search for the best plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch import nn

from onebox.cost.model_profile import ModelProfile
from onebox.engine.memory.forecast import MemoryForecast, count_memory
from onebox.engine.planning.profile import profile_model
from onebox.engine.problem.memory_search import search_sharing, search_within, short_of_memory
from onebox.engine.problem.planner_problem import allowed_sizes, make_problem, measured_sizes
from onebox.engine.problem.stage_formats import with_formats
from onebox.engine.workload.batch import as_batch
from onebox.engine.workload.delay_compensation import delays_of, extra_copies
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.errors import UsageError
from onebox.graph import Loss, Precision
from onebox.plan import ASYNC, SCHEDULES, Links, Plan, UpdateAt
from onebox.plan.model.problem import Problem
from onebox.plan.search.result import SearchResult
from onebox.plan_names import ACTIVATION_POLICIES, ChainPolicy
from onebox.pool import DeviceInfo, Pool
from onebox.sizes import Memory, parse_budgets


@dataclass(frozen=True, kw_only=True)
class PlanningResult:
    """A plan and what it was made from.

    Args:
        plan: The best plan, with what is predicted of it.
        result: What the search considered.
        problem: What it was given.
        profile: The model's profile.
    """

    plan: Plan
    result: SearchResult
    problem: Problem
    profile: ModelProfile


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
    budget_s: float = 5.0,
    fresh: bool = False,
    staleness: int = 0,
    delay: str = "auto",
    shard_optimizer: bool = True,
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
            the micro-batch where a model looks at it as a whole, as batch norm does.
        schedules: Allowed schedules; all when ``None``.
        policies: What may become of activations that a device has no room for: ``keep``, ``recompute``, ``offload``,
            ``swap``, and ``cpu`` for parts of a device's stage on a CPU worker beside it.
        update: Where the optimizer's state may be: ``device``, ``host``, or both to choose from.
        memory: The most bytes that the plan may take of each device, as for :func:`onebox.open`, beside the budgets of
            the pool itself. The plan carries them, and a trainer refuses steps that need more.
        preparing: Cores of this machine that reading and preparing batches keeps busy while devices compute: where
            workers of it and that need more cores than there are, they slow each other down.
        precision: As for :class:`Trainer`.
        fuse: Likewise.
        budget_s: How many seconds everything after measuring may take. It is counted in what is simulated, with some to
            spare, so that the same input gives the same plan; on a busy machine the clock ends it, with the best plan
            until then.
        fresh: Measure anew what is known from an earlier time.
        staleness: How many steps late gradients may be applied. With 1 there are asynchronous plans, too, whose
            schedule is ``async-1f1b`` and that a trainer takes with ``staleness=1``; where none of them fits or gains
            anything, the plan is exact.
        delay: With staleness 1, what is done about late gradients, as for :class:`Trainer`; it matters to the memory.
        shard_optimizer: Whether replicas may share out what the optimizer remembers, which is looked at where a device
            has not the memory for the whole model.

    Raises:
        UsageError: The batch cannot be divided as asked, the optimizer cannot have what ``delay`` asks for, or the
            budgets are none of these devices.
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
    batch = as_batch(inputs, targets)
    allowed = allowed_sizes(batch.size, micro_batches)
    budgets = parse_budgets("memory", memory).of(len(pool))
    late = delays_of(optimizer, delay)
    names = tuple(schedules) if schedules is not None else (*SCHEDULES, ASYNC) if staleness else SCHEDULES
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
        fresh=fresh,
    )
    problem = make_problem(
        profile,
        _within(pool.devices, budgets),
        pool_links(pool, fresh=fresh),
        batch=batch.size,
        micro_batches=allowed,
        schedules=names,
        policies=policies,
        updates=update,
        preparing=preparing,
        staleness=staleness,
        versions=2 + extra_copies(late),
    )
    if short_of_memory(problem):
        problem = with_host_speeds(problem, pool, fresh=fresh)

    def exact(plan: Plan) -> MemoryForecast:
        made = formatted(plan, profile, pool.devices)
        given = made, model, loss, optimizer, batch
        return count_memory(*given, devices=pool.devices, captures=captures, delay=late, links=pool.links)

    if shard_optimizer and len(pool) > 1 and short_of_memory(problem):
        result, plan, problem = search_sharing(problem, exact, budget_s)
    else:
        result, plan = search_within(problem, exact, budget_s)
    plan = _limited(formatted(plan, profile, pool.devices), budgets)
    return PlanningResult(plan=plan, result=result, problem=problem, profile=profile)


def _within(devices: Sequence[DeviceInfo], budgets: Sequence[int]) -> list[DeviceInfo]:
    """Return devices that have no more memory than they may take; a budget of 0 is none."""
    return [
        replace(device, memory_bytes=min(device.memory_bytes, budget or device.memory_bytes))
        for device, budget in zip(devices, budgets, strict=True)
    ]


def _limited(plan: Plan, budgets: Sequence[int]) -> Plan:
    """Return a plan that carries the budgets of its devices, if there are any."""
    if not any(budgets):
        return plan
    return msgspec.structs.replace(plan, memory_bytes=tuple(budgets[device] for device in plan.devices))


def formatted(plan: Plan, profile: ModelProfile, devices: Sequence[DeviceInfo]) -> Plan:
    """Return a plan with the formats that were measured to be best; versions of weights have the run's precision."""
    found = with_formats(plan, profile, devices)
    if found.schedule != ASYNC:
        return found
    stages = tuple(msgspec.structs.replace(stage, precision=None) for stage in found.stages)
    return msgspec.structs.replace(found, stages=stages)


def with_host_speeds(problem: Problem, pool: Pool, *, fresh: bool = False) -> Problem:
    """Return a problem with the speeds of the ways between devices and their hosts' memory, as they are measured.

    A device with hardly any memory left is not measured: its way is taken for that of a core that copies.
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


def pool_links(pool: Pool, *, fresh: bool = False) -> Links:
    """Return the links of a pool, as they are measured or known from an earlier time."""
    if len(pool) == 1:
        only = pool.devices[0].number
        return Links(latency_s={only: {only: 0.0}}, bandwidth_bps={only: {only: float("inf")}})
    measured = pool.profile(fresh=fresh)
    return Links(latency_s=measured.latency_s, bandwidth_bps=measured.bandwidth_bps)
