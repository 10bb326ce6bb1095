"""What a trainer is made of, from the arguments that its user gave."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from torch import nn

from onebox.engine.adaptive import Adaptive
from onebox.engine.captures import Recipe
from onebox.engine.delays import WARM_UP
from onebox.engine.emulated import SegmentCosts, check_costs
from onebox.engine.following import problem_maker
from onebox.engine.launch import Settings
from onebox.engine.optimizers import Optimizers
from onebox.engine.overlap import check_overlap, treatment
from onebox.engine.remote import RemoteState
from onebox.engine.run import TrainingRun
from onebox.engine.settings import Request
from onebox.graph import Loss, Metrics, Precision
from onebox.graph.front import OnDevice
from onebox.plan import Plan, Sync, UpdateAt
from onebox.plan.inputs import Problem
from onebox.pool import Pool

_LOG = logging.getLogger("onebox")


def requested(
    pool: Pool, plan: Plan | None, shares: Any, micro_batch: int | None, sync: Sync, update: UpdateAt, *, shard: bool
) -> Request:
    """Return what is to be computed where; see :class:`~onebox.engine.settings.Request`.

    Raises:
        UsageError: It cannot be.
    """
    request = Request(
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
) -> Settings:
    """Return what is the same for all steps, those steps being exact and none overlapping."""
    return Settings(
        seed=seed, trace=trace, check_every=check_every, in_flight=in_flight, max_norm=clip_grad_norm or 0.0
    )


def with_lateness(
    settings: Settings,
    optimizer: Optimizers,
    request: Request,
    staleness: int,
    delay: str,
    warm_up: int | None,
    *,
    overlap: bool,
) -> Settings:
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
    return dataclasses.replace(found, delay=treatment(optimizer, delay))


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
) -> Recipe:
    """Return what the model is captured with; see :class:`~onebox.engine.compiler.Recipe`.

    Raises:
        UsageError: The costs are none.
    """
    check_costs(costs or {})
    kinds = {device.kind for device in pool.devices}
    return Recipe(
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


def follow(run: TrainingRun, adaptive: bool | Problem, pool: Pool, optimizer: Optimizers) -> None:
    """Let a run follow its devices if that is wanted, from the problem that its plan was made for if it is known."""
    if adaptive:
        known = adaptive if isinstance(adaptive, Problem) else None
        make = problem_maker(pool, lambda: run.captures, optimizer, lambda: run.examples.largest, known)
        run.adaptive = Adaptive(run, make, lambda: run.examples.samples)
