"""Choice of formats for a plan that was not searched for, by measuring the model on the devices that will train it."""

from __future__ import annotations

from onebox.engine.problem.stage_formats import with_formats
from onebox.engine.state.remote import RemoteState
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.plan import Plan
from onebox.pool import Pool


def measure_formats(plan: Plan, pool: Pool, captures: Captures, remote: RemoteState, batch: Batch) -> Plan:
    """Return a plan with each stage in its fastest measured formats.

    Args:
        plan: The plan.
        pool: The pool.
        captures: The captured model.
        remote: The remote state.
        batch: A batch.

    Raises:
        OneboxError: The model does not fit, or a worker failed.
    """
    from onebox.engine.planning.profile import profile_model  # it trains with trainers, which import this module

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
