"""The plan of a trainer to which none was given: data parallel, with shares and formats as its devices are measured."""

from __future__ import annotations

from collections.abc import Sequence

from onebox.engine.config import PlanRequest
from onebox.engine.planning.device_shares import resolve_device_shares
from onebox.engine.planning.profile import profile_model
from onebox.engine.problem.stage_formats import with_formats
from onebox.engine.state.remote import RemoteState
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.plan import Plan
from onebox.pool import Pool


def resolve_plan(request: PlanRequest, pool: Pool, remote: RemoteState, captures: Captures, batch: Batch) -> Plan:
    """Return the plan that a request asks for: the given one, or data parallel over all devices.

    Devices are measured where the request leaves shares or formats open, unless one of them has been lost.

    Args:
        request: What the user asked for.
        pool: The pool.
        remote: The state.
        captures: The captured model.
        batch: The first batch.

    Raises:
        UsageError: The shares are not such, or not one for each device.
        OneboxError: The model cannot be captured, does not fit, or a worker failed.
    """
    if request.plan is not None:
        return request.plan
    devices = pool.present
    if pool.gone:
        shares: Sequence[float] = [1.0] * len(devices)
    else:
        shares = resolve_device_shares(request.shares, pool, captures, batch, remote)
    plan = Plan.data_parallel(
        devices,
        shares,
        micro_batch=request.micro_batch,
        sync=request.sync,
        update=request.update,
        optimizer=request.optimizer,
    )
    if captures.recipe.precision == "auto" and not pool.gone:
        return _with_measured_formats(plan, pool, captures, remote, batch)
    return plan


def _with_measured_formats(plan: Plan, pool: Pool, captures: Captures, remote: RemoteState, batch: Batch) -> Plan:
    """Return a plan with each stage in the formats in which it is fastest on its devices, as they are measured."""
    inputs, targets = batch.structure.nest(batch.leaves)
    recipe = captures.recipe
    profile, _ = profile_model(
        recipe.model,
        recipe.loss,
        remote.optimizer,
        inputs,
        targets,
        pool=pool,
        sizes=[max(part.size for part in plan.micro_batches(batch.size))],
        precision=recipe.precision,
        fuse=recipe.fuse,
    )
    return with_formats(plan, profile, pool.devices)
