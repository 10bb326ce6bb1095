"""The plan of a trainer: given, data parallel with shares and formats as its devices are measured, or the planner's."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from onebox.engine.planning.device_shares import resolve_device_shares
from onebox.engine.planning.make_plan import PlanningResult, make_plan
from onebox.engine.planning.partial_profile import PROFILING_S
from onebox.engine.planning.profile import profile_model
from onebox.engine.problem.corrections import AppliedCorrection, described_devices
from onebox.engine.problem.planner_problem import ResolvedPlan
from onebox.engine.problem.stage_formats import with_formats
from onebox.engine.state.remote import RemoteState
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.errors import CaptureError, DeviceMemoryError, PlanError, UsageError
from onebox.graph.capture.on_device_transform import OnDeviceTransform
from onebox.plan import ASYNC, Plan
from onebox.plan.model.problem import Problem
from onebox.plan.model.stage import OFFLOADING_POLICIES
from onebox.plan.search.baselines import DATA_PARALLEL
from onebox.plan.search.result import rated_s
from onebox.plan_names import ACTIVATION_POLICIES, LossyPart
from onebox.pool import DeviceInfo, Pool
from onebox.pool.devices import distinct_hosts
from onebox.sizes import bit_rate_text
from onebox.trainer_options import DataParallel, StaleGradients

_LOG = logging.getLogger("onebox")

_BUDGET_S, _DEFAULT_BUDGET_S = 5.0, 2.0
"""Seconds of a search that was requested, and of one that begins a run by default."""

_WORTH_LINKS = 0.9
"""Most of the best single host's time that a step over several may be predicted to take, unless it was asked for."""

ALLOWED_PLANS = "allowed are a Plan, the path of a plan file, 'auto', and onebox.DataParallel(...)"
"""Advice for a wrong ``plan`` argument."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A request for a plan, resolved with the first batch.

    Args:
        plan: A plan; data parallel training over all devices; or ``auto`` for the planner's best plan.
        stale: Stale gradients of the run, if any.
        lossy: Parts of the traffic that may be compressed with a loss.
        overlap: Whether exact steps overlap.
        split_layers: For ``auto``, whether devices may split layers.
        micro_batch: For ``auto``, the samples of a micro-batch; without it the planner's default sizes.
        problem: The problem that a given plan was made for, if it is known.
        correction: The correction of the profile that a given plan was made with; ``None`` if it is not known.
        by_default: Whether ``auto`` was chosen for want of a request: the choice is then logged with its reason, and
            the plan is data parallel where none can be found.
    """

    plan: Plan | DataParallel | Literal["auto"]
    stale: StaleGradients | None = None
    lossy: Collection[LossyPart] = ()
    overlap: bool = False
    split_layers: bool = True
    micro_batch: int | None = None
    problem: Problem | None = None
    correction: AppliedCorrection | None = None
    by_default: bool = False

    def check(self, pool: Pool) -> None:
        """Refuse a request that the pool cannot meet.

        Raises:
            UsageError: The reason.
        """
        if isinstance(self.plan, Plan):
            missing = [device for device in self.plan.devices if device >= len(pool)]
            if missing:
                raise UsageError(f"the plan uses device {missing[0]}, but the pool has {len(pool)}, numbered from 0")
            for part, codecs in self.plan.lossy.items():
                if part not in self.lossy:
                    raise UsageError(
                        f"the plan sends {part} as {codecs[0]}, which changes the result: allow it with "
                        f"lossy=({part!r},), or take {part}='none' in the plan's stages"
                    )
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

    def provisional(self, pool: Pool, among: Sequence[int] | None = None) -> Plan:
        """Return a plan for evaluations before the first step, whose batches say nothing about those of steps.

        Args:
            pool: The pool.
            among: The devices; all that are present if not given.
        """
        devices = pool.present if among is None else among
        return plan_of(DataParallel(micro_batch=self.micro_batch), devices, [1.0] * len(devices))

    def resolve(
        self, pool: Pool, remote: RemoteState, captures: Captures, batch: Batch, among: Sequence[int] | None = None
    ) -> ResolvedPlan:
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
            return ResolvedPlan(plan=self.plan, problem=self.problem, correction=_correctable(pool, self.correction))
        asked = self.plan if isinstance(self.plan, DataParallel) else DataParallel(micro_batch=self.micro_batch)
        if self.plan == "auto" and not pool.gone:
            try:
                return self._searched(pool, remote, captures, batch, among)
            except (PlanError, CaptureError, DeviceMemoryError, UsageError) as error:
                if not self.by_default:
                    raise
                hosts, reason = len(distinct_hosts(pool.devices)), str(error).splitlines()[0]
                _LOG.warning("%d hosts: data parallel, as no plan could be made for them: %s", hosts, reason)
        devices = pool.present if among is None else tuple(among)
        if pool.gone:
            shares: Sequence[float] = [1.0] * len(devices)
        else:
            shares = resolve_device_shares(asked.shares, pool, captures, batch, remote, among)
        plan = plan_of(asked, devices, shares)
        if captures.recipe.precision == "auto" and not pool.gone:
            plan = _with_measured_formats(plan, pool, captures, remote, batch)
        return ResolvedPlan(plan=plan)

    def _searched(
        self, pool: Pool, remote: RemoteState, captures: Captures, batch: Batch, among: Sequence[int] | None
    ) -> ResolvedPlan:
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
            budget_s=_DEFAULT_BUDGET_S if self.by_default else _BUDGET_S,
            profiling_s=PROFILING_S,
            split_layers=self.split_layers,
            among=among,
            lossy=self.lossy,
        )
        if self.by_default:
            found = cautious(found, pool.devices)
            _LOG.warning("%s", explain_choice(found, pool.devices))
        else:
            _LOG.info("plan='auto': %s", found.plan.describe())
        if found.captures is not None:
            largest = max(part.size for part in found.plan.micro_batches(batch.size))
            captures.adopt(found.captures, batch, 2 * largest)  # twice, for the check of the loss
        return ResolvedPlan(plan=found.plan, problem=found.problem, correction=_correctable(pool, found.correction))


def _correctable(pool: Pool, correction: AppliedCorrection | None) -> AppliedCorrection | None:
    """Return the correction of a profile if a run may go on with it.

    It may not if the profile is of another pool, nor on emulated devices, which take what is predicted.
    """
    if correction is None or correction.devices != described_devices(pool.devices):
        return None
    return None if any(device.kind == "sim" for device in pool.devices) else correction


def default_plan(pool: Pool) -> DataParallel | Literal["auto"]:
    """Return the plan of a trainer without a request: data parallel on one host, the planner's over several."""
    return "auto" if len(distinct_hosts(pool.devices)) > 1 else DataParallel()


def cautious(found: PlanningResult, devices: Sequence[DeviceInfo]) -> PlanningResult:
    """Return a result whose plan uses one host if no plan over several is predicted to shorten a step by a tenth.

    Links between hosts carry the traffic of others, too, and cost processor time at both ends; predictions include
    neither.

    Args:
        found: The plan, with the candidates that it was compared with.
        devices: The devices of the pool.
    """
    hosts = {device: host for host, own in distinct_hosts(devices).items() for device in own}

    def is_near(plan: Plan) -> bool:
        return len({hosts[device] for device in plan.devices}) == 1

    if is_near(found.plan):
        return found
    near = [one for one in found.result.candidates if is_near(one.plan)]
    fitting = [one for one in near if not one.refused and not one.shortfalls]
    best = min(fitting, key=lambda one: rated_s(one.plan), default=None)
    assert found.plan.predicted is not None
    if best is None or found.plan.predicted.step_s <= _WORTH_LINKS * best.step_s:
        return found
    return replace(found, plan=best.plan)


def explain_choice(found: PlanningResult, devices: Sequence[DeviceInfo]) -> str:
    """Return a line about a plan that was chosen by default: the hosts, their slowest link, and data parallel's time.

    Args:
        found: The plan, with the candidates that it was compared with.
        devices: The devices of the pool.
    """
    hosts = distinct_hosts(devices)
    links = found.problem.links.bandwidth_bps
    ends = itertools.permutations(hosts.values(), 2)
    rates = [links[a][b] for source, target in ends for a in source for b in target]
    joined = f" joined at {bit_rate_text(min(rates))}" if rates else ""
    everywhere = {device.number for device in devices}
    assert found.plan.predicted is not None
    if found.plan.whole and set(found.plan.devices) == everywhere:
        compared = ", which is data parallel"
    else:
        parallel = [one for one in found.result.candidates if one.label.startswith(DATA_PARALLEL)]
        fitting = [one.step_s for one in parallel if not one.refused and not one.shortfalls]
        times = min(fitting, default=0.0) / found.plan.predicted.step_s
        compared = f"; data parallel {f'would take {times:.1f} times as long' if fitting else 'does not fit'}"
    return f"{len(hosts)} hosts{joined}: plan auto, {found.plan.describe()}{compared}"


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
