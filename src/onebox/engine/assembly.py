"""What a trainer is made of, from the arguments that its user gave."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from torch import nn

from onebox.engine.adaptive.controller import AdaptiveController
from onebox.engine.adaptive.problem_source import problem_maker
from onebox.engine.config import PlanRequest
from onebox.engine.session import TrainingSession
from onebox.engine.state.remote import RemoteState
from onebox.engine.steps.launch import StepSettings
from onebox.engine.steps.overlap_scheduler import check_overlap, choose_compensation
from onebox.engine.workload.captures import CaptureSpec
from onebox.engine.workload.delay_compensation import WARM_UP
from onebox.engine.workload.emulated_costs import SegmentCosts, check_costs
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.graph import Loss, Metrics, Precision
from onebox.graph.capture.on_device_transform import OnDevice
from onebox.plan import Plan, Sync, UpdateAt
from onebox.plan.model.problem import Problem
from onebox.pool import Pool

_LOG = logging.getLogger("onebox")


def requested(
    pool: Pool, plan: Plan | None, shares: Any, micro_batch: int | None, sync: Sync, update: UpdateAt, *, shard: bool
) -> PlanRequest:
    """Return what is to be computed where; see :class:`~onebox.engine.config.PlanRequest`.

    Raises:
        UsageError: It cannot be.
    """
    request = PlanRequest(
        plan=plan,
        shares=shares,
        micro_batch=micro_batch,
        sync=sync,
        update=update,
        optimizer="sharded" if shard else "replicated",
    )
    request.check(pool)
    return request


def exact_settings(
    seed: int, check_every: int, in_flight: int, clip_grad_norm: float | None, *, trace: bool
) -> StepSettings:
    """Return what is the same for all steps, those steps being exact and none overlapping."""
    return StepSettings(
        seed=seed, trace=trace, check_every=check_every, in_flight=in_flight, max_norm=clip_grad_norm or 0.0
    )


def with_lateness(
    settings: StepSettings,
    optimizer: Optimizers,
    request: PlanRequest,
    staleness: int,
    delay: str,
    warm_up: int | None,
    *,
    overlap: bool,
) -> StepSettings:
    """Return the settings of steps that overlap as the user wants them to, and log what was left open.

    Args:
        settings: Of exact steps.
        optimizer: The user's.
        request: What is to be computed where.
        staleness: How many steps old the weights may be that a step is computed with.
        delay: What is done about gradients that are late because of it; ``auto`` leaves it open.
        warm_up: So many steps are exact before; ``None`` leaves it open.
        overlap: Whether exact steps overlap.

    Raises:
        UsageError: They cannot be so.
    """
    exact = warm_up if warm_up is not None else WARM_UP if staleness else 0
    found = dataclasses.replace(settings, staleness=staleness, warm_up=exact, overlap=overlap)
    check_overlap(found, delay, request.plan or request.sample())
    if not staleness:
        return found
    if warm_up is None:
        _LOG.info("warm_up=%d: so many steps are exact first, as weights move fastest at the beginning", exact)
    return dataclasses.replace(found, delay=choose_compensation(optimizer, delay))


def recipe_of(
    pool: Pool,
    remote: RemoteState,
    model: nn.Module,
    loss: Loss,
    metrics: Metrics,
    precision: Precision,
    on_device: OnDevice | None,
    costs: SegmentCosts | None,
    *,
    fuse: bool,
) -> CaptureSpec:
    """Return what the model is captured with; see :class:`~onebox.engine.compile.compiler.Recipe`.

    Raises:
        UsageError: The costs are none.
    """
    check_costs(costs or {})
    kinds = {device.kind for device in pool.devices}
    return CaptureSpec(
        model=model,
        loss=loss,
        metrics=metrics,
        precision=precision,
        device_type="cuda" if "cuda" in kinds else "cpu",
        trained=frozenset(remote.wanted),
        on_device=on_device,
        fuse=fuse,
        costs=costs,
    )


def follow(run: TrainingSession, adaptive: bool | Problem, pool: Pool, optimizer: Optimizers) -> None:
    """Let a run follow its devices if that is wanted, from the problem that its plan was made for if it is known."""
    if adaptive:
        known = adaptive if isinstance(adaptive, Problem) else None
        make = problem_maker(pool, lambda: run.captures, optimizer, lambda: run.examples.largest, known)
        run.adaptive = AdaptiveController(run, make, lambda: run.examples.samples)
