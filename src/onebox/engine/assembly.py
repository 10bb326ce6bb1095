"""Construction of a trainer's parts from its user's arguments."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from torch import nn

from onebox.engine.config import PlanRequest
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
from onebox.pool import Pool

_LOG = logging.getLogger("onebox")


def requested(
    pool: Pool, plan: Plan | None, shares: Any, micro_batch: int | None, sync: Sync, update: UpdateAt, *, shard: bool
) -> PlanRequest:
    """Return the requested computation and its placement; see :class:`~onebox.engine.config.PlanRequest`.

    Raises:
        UsageError: The request cannot be met.
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
    """Return the settings shared by all steps, for exact steps that do not overlap."""
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
    """Return the settings for overlapping steps as requested, and log the defaults that were chosen.

    Args:
        settings: Settings of exact steps.
        optimizer: The user's optimizer or optimizers.
        request: The requested computation and its placement.
        staleness: Age, in steps, of the weights that a step may be computed with.
        delay: Treatment of the gradients that are late as a result; ``auto`` chooses one.
        warm_up: Number of exact steps before; ``None`` chooses it.
        overlap: Whether exact steps overlap.

    Raises:
        UsageError: These settings cannot be combined.
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
    """Return the capture recipe of a model; see :class:`~onebox.engine.compile.compiler.Recipe`.

    Raises:
        UsageError: The costs are invalid.
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
