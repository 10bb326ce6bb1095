"""The plan of a trainer: given, data parallel with shares and formats as its devices are measured, or the planner's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from onebox.engine.planning.device_shares import resolve_device_shares
from onebox.engine.planning.make_plan import make_plan
from onebox.engine.planning.profile import profile_model
from onebox.engine.problem.stage_formats import with_formats
from onebox.engine.state.remote import RemoteState
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.errors import UsageError
from onebox.graph.capture.on_device_transform import OnDeviceTransform
from onebox.plan import ASYNC, Plan
from onebox.plan.model.stage import OFFLOADING_POLICIES
from onebox.plan_names import ACTIVATION_POLICIES
from onebox.pool import Pool
from onebox.trainer_options import DataParallel, StaleGradients

_LOG = logging.getLogger("onebox")

ALLOWED_PLANS = "allowed are a Plan, the path of a plan file, 'auto', and onebox.DataParallel(...)"
"""Advice for a wrong ``plan`` argument."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A request for a plan, resolved with the first batch.

    Args:
        plan: A plan; data parallel training over all devices; or ``auto`` for the planner's best plan.
        stale: Stale gradients of the run, if any.
        overlap: Whether exact steps overlap.
        micro_batch: For ``auto``, the samples of a micro-batch; without it the planner's default sizes.
    """

    plan: Plan | DataParallel | Literal["auto"]
    stale: StaleGradients | None = None
    overlap: bool = False
    micro_batch: int | None = None

    def check(self, pool: Pool) -> None:
        """Refuse a request that the pool cannot meet.

        Raises:
            UsageError: The reason.
        """
        if isinstance(self.plan, Plan):
            missing = [device for device in self.plan.devices if device >= len(pool)]
            if missing:
                raise UsageError(f"the plan uses device {missing[0]}, but the pool has {len(pool)}, numbered from 0")
        elif not isinstance(self.plan, DataParallel) and self.plan != "auto":
            raise UsageError(f"plan={self.plan!r}: {ALLOWED_PLANS}")

    def sample(self, devices: int) -> Plan | None:
        """Return the plan, or for data parallel training one with given or equal shares; ``None`` for ``auto``."""
        if isinstance(self.plan, DataParallel):
            shares = self.plan.shares
            if isinstance(shares, str) or len(shares) != devices:
                shares = [1.0] * devices
            return plan_of(self.plan, range(devices), shares)
        return self.plan if isinstance(self.plan, Plan) else None

    def resolve(
        self, pool: Pool, remote: RemoteState, captures: Captures, batch: Batch, among: Sequence[int] | None = None
    ) -> Plan:
        """Return the requested plan.

        Devices are measured where the request leaves shares, formats or the plan open, unless one of them has been
        lost: the plan is then data parallel over the others.

        Args:
            pool: The pool.
            remote: The state.
            captures: The captured model.
            batch: The first batch.
            among: The devices; all of the pool if not given.

        Raises:
            UsageError: The shares are not one for each device.
            PlanError: No plan fits.
            OneboxError: The model cannot be captured, does not fit, or a worker failed.
        """
        if isinstance(self.plan, Plan):
            return self.plan
        if isinstance(self.plan, DataParallel):
            asked = self.plan
        elif not pool.gone:
            return self._searched(pool, remote, captures, batch, among)
        else:
            asked = DataParallel(micro_batch=self.micro_batch)
        devices = pool.present if among is None else tuple(among)
        if pool.gone:
            shares: Sequence[float] = [1.0] * len(devices)
        else:
            shares = resolve_device_shares(asked.shares, pool, captures, batch, remote, among)
        plan = plan_of(asked, devices, shares)
        if captures.recipe.precision == "auto" and not pool.gone:
            return _with_measured_formats(plan, pool, captures, remote, batch)
        return plan

    def _searched(
        self, pool: Pool, remote: RemoteState, captures: Captures, batch: Batch, among: Sequence[int] | None
    ) -> Plan:
        """Return the best plan for the first batch whose steps may overlap as the run's do."""
        recipe = captures.recipe
        late = self.stale is not None
        # Transfers to a host's memory at the end of a step cannot continue in the next one.
        barred = OFFLOADING_POLICIES if late or self.overlap else frozenset()
        found = make_plan(
            recipe.model,
            recipe.loss,
            remote.optimizer,
            *_model_batch(captures, batch),
            pool=pool,
            micro_batches=None if self.micro_batch is None else [self.micro_batch],
            schedules=[ASYNC] if late else None,
            policies=[policy for policy in ACTIVATION_POLICIES if policy not in barred],
            precision=recipe.precision,
            fuse=recipe.fuse,
            numerics=recipe.numerics,
            stale=self.stale,
            among=among,
        )
        _LOG.info("plan='auto': %s", found.plan.describe())
        return found.plan


def plan_of(asked: DataParallel, devices: Sequence[int], shares: Sequence[float]) -> Plan:
    """Return the plan of data parallel training with resolved shares."""
    return Plan.data_parallel(
        devices,
        shares,
        micro_batch=asked.micro_batch,
        sync=asked.sync,
        update=asked.update,
        optimizer="sharded" if asked.shard_optimizer else "replicated",
    )


def _with_measured_formats(plan: Plan, pool: Pool, captures: Captures, remote: RemoteState, batch: Batch) -> Plan:
    """Return a plan with each stage in the formats in which it is fastest on its devices, as they are measured."""
    recipe = captures.recipe
    profile, _ = profile_model(
        recipe.model,
        recipe.loss,
        remote.optimizer,
        *_model_batch(captures, batch),
        pool=pool,
        sizes=[max(part.size for part in plan.micro_batches(batch.size))],
        precision=recipe.precision,
        fuse=recipe.fuse,
        numerics=recipe.numerics,
    )
    return with_formats(plan, profile, pool.devices)


def _model_batch(captures: Captures, batch: Batch) -> tuple[Any, Any]:
    """Return the inputs of the model itself, after ``on_device``, and the targets."""
    inputs, targets = batch.structure.nest(batch.leaves)
    transform = captures.recipe.on_device
    if transform is not None:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            inputs = OnDeviceTransform(transform).run(inputs, training=captures.recipe.model.training)
    return inputs, targets
