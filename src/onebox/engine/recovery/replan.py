"""A plan for the remaining devices: the old one in its shape if possible, else the result of a search.

The shape of a plan may be the user's choice: it is kept as long as there is a device for every stage
(:func:`~onebox.engine.recovery.reduced_plan.reduced_plan`) and the memory suffices. Otherwise the planner searches for
the best plan within the remaining memory, as ``plan="auto"`` does, but with the same micro-batches, because results
depend on them. It takes earlier measurements from the user's cache; without any, it counts operations and bytes of the
segments, because measuring would prolong the interruption of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from onebox.cost import PoolProfile, load
from onebox.cost.model_profile import ModelBytes, ModelProfile, SegmentTimes
from onebox.engine.memory.forecast import MemoryForecast, TrainingJob
from onebox.engine.problem.memory_search import search_within
from onebox.engine.problem.planner_problem import (
    CachedTimes,
    allowed_sizes,
    device_type,
    divided_bytes,
    make_problem,
    measured_sizes,
    times_key,
)
from onebox.engine.problem.stage_formats import with_precisions_of
from onebox.engine.recovery.reduced_plan import reduced_plan
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.delay_compensation import extra_copies
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.errors import CaptureError, PlanError, UsageError
from onebox.graph import ModelPrograms, PhaseKind
from onebox.graph.shard.spmd import product_flops
from onebox.plan import ACTIVATION_POLICIES, ASYNC, NAMED, SCHEDULES, Links, Plan
from onebox.plan.model.stage import OFFLOADING_POLICIES
from onebox.pool import Pool
from onebox.pool.devices import host_uplinks
from onebox.pool.network.profile import profile_key
from onebox.wire import Program, reads, specs_by_slot
from onebox.wire.protocol.instructions import GroupDelays

_BUDGET_S = 2.0
"""Time limit of a search: the run waits for it."""

_FLOPS = 2e10
_BYTES_PER_S = 1e10
_CALL_S = 1e-5
_LATENCY_S = 1e-4
_BANDWIDTH_BPS = 1e9
"""Assumed for unmeasured devices and links: a core of a laptop, and its loopback."""


@dataclass(frozen=True, kw_only=True)
class ReplanWorkload:
    """The training workload of a run.

    Args:
        captures: The captured model.
        optimizer: The user's optimizer.
        batch: A batch.
        max_norm: Gradient clipping norm; 0 for none.
        in_flight: Most steps in flight, whose batches lie on the devices.
        staleness: Age, in steps, of the weights that a step may be computed with.
        delay: Treatment of the gradients that are late as a result.
        overlap: Whether exact steps overlap.
    """

    captures: Captures
    optimizer: Optimizers
    batch: Batch
    max_norm: float
    in_flight: int
    staleness: int = 0
    delay: GroupDelays = "none"
    overlap: bool = False

    def peaks(self, plan: Plan, pool: Pool) -> Mapping[int, int]:
        """Return the peak bytes of each device of a plan."""
        job = TrainingJob(
            captures=self.captures,
            optimizer=self.optimizer,
            batch=self.batch,
            devices=pool.devices,
            links=pool.links,
            plain_links=pool.plain_links,
            max_norm=self.max_norm,
            ahead=self.in_flight - 1,
            delay=self.delay,
            staleness=self.staleness,
            overlap=self.overlap,
        )
        return job.peaks(plan)


def replan_devices(plan: Plan, work: ReplanWorkload, pool: Pool) -> Plan:
    """Return a plan without lost devices; the same one if it uses none.

    Args:
        plan: The plan.
        work: The workload.
        pool: The recovered pool.

    Raises:
        PlanError: No plan fits the remaining devices; the message states what is missing.
    """
    idle = [device for device in pool.present if device not in plan.devices]
    same = reduced_plan(plan, pool.gone, idle, work.batch.size)
    if same is plan:
        return plan
    if not pool.present:
        raise PlanError("every device of the pool has gone, and none could be started again")
    if same is not None and _fits(same, work, pool):
        return same
    size = plan.micro_batch or max(part.size for part in plan.micro_batches(work.batch.size))
    try:
        return _sought(size, plan, work, pool, replicable=True)
    except CaptureError:  # some models cannot be divided among replicas
        return _sought(size, plan, work, pool, replicable=False)


def enlarged_plan(plan: Plan, whole: Plan | None, work: ReplanWorkload, pool: Pool) -> Plan:
    """Return the plan for a run when devices are back.

    Args:
        plan: The plan in use.
        whole: The plan before any device was lost; ``None`` if there was none.
        work: The workload.
        pool: The pool, with the devices that are back.

    Raises:
        PlanError: No plan fits the devices.
    """
    if whole is None:
        return plan
    if whole.micro_batches(work.batch.size) != plan.micro_batches(work.batch.size):  # on which results depend
        schedule = "1f1b" if whole.schedule in ("table", "auto") else whole.schedule
        whole = structs.replace(whole, micro_batch=plan.micro_batch, schedule=schedule, table=(), predicted=None)
    return replan_devices(whole, work, pool)


def out_of_devices(error: PlanError, pool: Pool, saved: Path | None) -> PlanError:
    """Return the error for insufficient remaining devices.

    Args:
        error: The search's error.
        pool: The recovered pool.
        saved: The last checkpoint, if there is one.
    """
    lost = [pool.devices[number] for number in sorted(pool.gone)]
    gone = ", ".join(
        f"{device.number} ({device.device} on {device.host}: {pool.why_gone(device.number)})" for device in lost
    )
    where = f"the last checkpoint, {saved}," if saved else "a checkpoint (this trainer has saved none)"
    lacking = f"and what is left is not enough: {error}; open a pool with more devices or memory"
    return PlanError(
        f"the run cannot go on: device {gone} has gone, {lacking if pool.present else 'and none is left; open a pool'} "
        f"and resume from {where} with Trainer.resume",
        stage=error.stage,
        device=error.device,
        missing_bytes=error.missing_bytes,
    )


def _fits(plan: Plan, work: ReplanWorkload, pool: Pool) -> bool:
    """Return whether a plan fits the memory of its devices."""
    try:
        peaks = work.peaks(plan, pool)
    except UsageError:  # layers that cannot be split over so many ranks
        return False
    return all(peaks[device] <= pool.devices[device].memory_bytes for device in plan.devices)


def _sought(size: int, before: Plan, work: ReplanWorkload, pool: Pool, *, replicable: bool) -> Plan:
    """Return the best plan for the remaining devices of a pool, with a given micro-batch size.

    If memory is short, activations are recomputed or offloaded; the optimizer and its state stay where they are.
    Segments in bf16 keep their precision.
    """
    devices = [device for device in pool.devices if device.number in pool.present]
    programs, size_bytes = divided_bytes(work.captures, work.batch, size, work.optimizer)
    times = _known_times(size, size_bytes, work, pool)
    schedules = (ASYNC,) if work.staleness else SCHEDULES if times else NAMED
    kinds = {device_type(device) for device in devices}
    if times is None or not kinds <= set(times):
        times = dict.fromkeys(kinds, _counted_times(size, programs, len(size_bytes.segments)))
    problem = make_problem(
        ModelProfile(bytes=size_bytes, times={kind: (times[kind],) for kind in kinds}),
        devices,
        _known_links(pool),
        batch=work.batch.size,
        micro_batches=(size,),
        schedules=schedules,
        updates=(before.update,),
        sharded=before.optimizer == "sharded",
        policies=[policy for policy in ACTIVATION_POLICIES if policy not in OFFLOADING_POLICIES or not work.overlap],
        staleness=work.staleness,
        versions=2 + extra_copies(work.delay),
    )
    problem = replace(problem, replicable=replicable, free_shares=False)
    segments = [segment.name for segment in size_bytes.segments]

    def alike(plan: Plan) -> Plan:
        return with_precisions_of(plan, before, segments)

    return alike(search_within(problem, lambda plan: MemoryForecast(work.peaks(alike(plan), pool)), _BUDGET_S)[1])


def _known_times(
    size: int, size_bytes: ModelBytes, work: ReplanWorkload, pool: Pool
) -> Mapping[str, SegmentTimes] | None:
    """Return earlier measurements on such a pool, for this micro-batch size or else another."""
    batch, recipe = work.batch.size, work.captures.recipe
    precision, numerics = recipe.precision, recipe.numerics
    for other in dict.fromkeys((size, *measured_sizes(batch, allowed_sizes(batch)))):
        graph = size_bytes if other == size else divided_bytes(work.captures, work.batch, other, work.optimizer)[1]
        known = load(times_key(graph.graph, pool.devices, work.optimizer, other, precision, numerics), CachedTimes)
        if known is not None:
            return known.times
    return None


def _known_links(pool: Pool) -> Links:
    """Return the links as measured earlier; without measurements, all are assumed to be equal."""
    known = load(profile_key(pool.devices, pool.links, plain_links=pool.plain_links), PoolProfile)
    if known is not None:
        return Links(latency_s=known.latency_s, bandwidth_bps=known.bandwidth_bps, uplinks=host_uplinks(pool.devices))
    every = range(len(pool))
    return Links(
        latency_s={a: {b: 0.0 if a == b else _LATENCY_S for b in every} for a in every},
        bandwidth_bps={a: {b: math.inf if a == b else _BANDWIDTH_BPS for b in every} for a in every},
    )


def _counted_times(size: int, programs: ModelPrograms, segments: int) -> SegmentTimes:
    """Return estimated times of a model's segments from operations and bytes; only their ratios matter."""

    def seconds(index: int, kind: PhaseKind) -> float:
        return _program_s(programs.of(index, kind).program)

    return SegmentTimes(
        size=size,
        seconds=tuple((seconds(index, "F"), seconds(index, "I"), seconds(index, "W")) for index in range(segments)),
        update_s=0.0,
        call_s=_CALL_S,
    )


def _program_s(program: Program) -> float:
    specs = specs_by_slot(program)
    total = 0.0
    for operator in program.operators:
        moved = sum(specs[slot].size_bytes for slot in reads(operator) if slot in specs)
        moved += sum(spec.size_bytes for spec in operator.specs if spec is not None)
        flops = product_flops(operator.name, operator.args, operator.outs, specs.__getitem__)
        total += flops / _FLOPS + moved / _BYTES_PER_S
    return total
