"""The planner's problem for a model and a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from msgspec import Struct

from onebox.cost import ACCELERATOR_BPS, key_of
from onebox.cost.model_profile import ModelBytes, ModelProfile, SegmentTimes, Slowdown, SlowdownWindow
from onebox.engine.config import numeric_instructions
from onebox.engine.problem.corrections import AppliedCorrection
from onebox.engine.problem.segment_bytes import model_bytes
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.named_state import footprints, named_state, update_bytes
from onebox.engine.workload.parameter_groups import Optimizers, elements_of
from onebox.errors import UsageError
from onebox.graph import ModelPrograms, Precision
from onebox.plan import SCHEDULES, Links, Plan, UpdateAt
from onebox.plan.model.problem import HOST_BPS, ComputeTime, DeviceSpec, Problem, Segment, SegmentValue, StepSpread, Tie
from onebox.plan_names import ACTIVATION_POLICIES, ChainPolicy
from onebox.pool import DeviceInfo
from onebox.pool.core_usage import busy_threads
from onebox.pool.discovery import LOCAL_HOST
from onebox.trainer_options import Numerics

_SENSIBLE = 32
"""Smaller micro-batches are not measured but extrapolated from larger ones."""

_MOST = 256
"""Most micro-batches per batch that are considered."""


@dataclass(frozen=True, kw_only=True)
class ResolvedPlan:
    """A plan, and the problem that it solves.

    Args:
        plan: The plan.
        problem: The planner's problem; ``None`` if the plan does not come from the planner.
        correction: The correction of the profile that it was made with; ``None`` where no run is to go on with it.
    """

    plan: Plan
    problem: Problem | None = None
    correction: AppliedCorrection | None = None


class CachedTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """Cached times of a model's segments, by type of device."""

    times: dict[str, SegmentTimes]


def times_key(
    graph: str,
    devices: Sequence[DeviceInfo],
    optimizer: Optimizers,
    size: int,
    precision: Precision,
    numerics: Numerics = Numerics(),
) -> str:
    """Return the cache key of a model's times, with everything that they depend on.

    Args:
        graph: A hash of the model's programs.
        devices: Devices of the pool.
        optimizer: The optimizer.
        size: Samples of a micro-batch.
        precision: Precision of the run: with ``auto`` more is measured.
        numerics: Precision and determinism of operators.
    """
    found = sorted(
        (d.kind, d.name, d.host, d.threads, d.speed, d.instructions.aten, d.instructions.onednn) for d in devices
    )
    more = (precision == "auto", *map(str, numeric_instructions(numerics)))
    return key_of("segments in all ways", graph, found, str(torch.__version__), elements_of(optimizer), size, *more)


def divided_bytes(
    captures: Captures, batch: Batch, size: int, optimizer: Optimizers
) -> tuple[ModelPrograms, ModelBytes]:
    """Return the programs of a model with each segment as a stage, and their sizes.

    Args:
        captures: The captured model.
        batch: A batch.
        size: Samples of a micro-batch.
        optimizer: The optimizer.
    """
    traced = captures.traced(batch, size, train=True, halves=True)
    programs = traced.divide([[name] for name in traced.segments])
    named = named_state(captures.recipe.model, captures.recipe.loss, lambda: 0)
    return programs, model_bytes(
        programs,
        traced.segments,
        size,
        state=captures.state_specs(),
        trained=captures.trained,
        factors={name: found.factor for name, found in footprints(optimizer, named).items()},
        updates=update_bytes(optimizer, named),
    )


def device_type(device: DeviceInfo) -> str:
    """Return the name under which a device's times are cached; an emulated device has the name of the real one."""
    if device.kind == "sim":
        return "cpu"
    return device.kind if device.kind == "cpu" else device.name


def allowed_sizes(batch: int, asked: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the allowed samples of a micro-batch: the requested ones, else the halvings of the batch.

    Raises:
        UsageError: The requested sizes are invalid.
    """
    if asked is not None:
        sizes = sorted(set(asked))
        if not sizes or not 1 <= sizes[0] <= sizes[-1] <= batch:
            raise UsageError(f"micro-batches of {list(asked)} samples: allowed are 1 to {batch}, the batch")
        return tuple(sizes)
    found = {batch}
    while min(found) > 1 and -(-batch // min(found)) < _MOST:
        found.add(-(-min(found) // 2))
    return tuple(sorted(found))


def measured_sizes(batch: int, allowed: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes to measure: the smallest and the largest sensible ones, between which times are linear."""
    sensible = [size for size in allowed if -(-batch // size) <= _SENSIBLE] or list(allowed)
    return tuple(sorted({sensible[0], sensible[-1]}))


def make_problem(
    profile: ModelProfile,
    devices: Sequence[DeviceInfo],
    links: Links,
    *,
    batch: int,
    micro_batches: Sequence[int],
    schedules: Sequence[str] = SCHEDULES,
    policies: Sequence[ChainPolicy] = ACTIVATION_POLICIES,
    updates: Sequence[UpdateAt] = ("device",),
    preparing: float = 0.0,
    staleness: int = 0,
    versions: int = 2,
    sharded: bool = False,
) -> Problem:
    """Return the planner's problem.

    Args:
        profile: The model's profile.
        devices: The available devices.
        links: Links between them.
        batch: Samples of a step.
        micro_batches: Allowed samples of a micro-batch.
        schedules: Allowed schedules.
        policies: Allowed activation policies.
        updates: Allowed places of the optimizer's state.
        preparing: Cores of this host that the preparation of batches keeps busy.
        staleness: Number of steps by which gradients may be late.
        versions: Number of versions of its weights on a device, with staleness.
        sharded: Whether the replicas of a stage shard the optimizer's state.

    Raises:
        UsageError: The model has not been measured on a type of device.
    """
    size = profile.bytes.size
    times = {kind: found for kind, found in profile.times.items() if found}
    real = {device_type(device) for device in devices if device.kind != "sim"}  # emulated steps do not vary
    return Problem(
        segments=tuple(_segment(profile, index, size) for index in range(len(profile.bytes.segments))),
        devices=tuple(map(_device, devices)),
        links=links,
        batch=batch,
        micro_batches=tuple(micro_batches),
        values=_values(profile),
        ties=_ties(profile),
        call_s=max(found.call_s for measured in times.values() for found in measured),
        schedules=tuple(schedules),
        policies=tuple(policies),
        cores={device.host: device.cores for device in devices if device.cores},
        preparing={LOCAL_HOST: preparing},
        load=_load(devices, {kind: found[-1].slowdown for kind, found in times.items()}),
        spread={
            kind: _spread(slowdown)
            for kind, found in times.items()
            if (slowdown := found[-1].slowdown) is not None and kind in real
        },
        updates=tuple(updates),
        staleness=staleness,
        versions=versions,
        sharded=sharded,
    )


def _spread(slowdown: Slowdown) -> tuple[StepSpread, ...]:
    """Return the spread of steps by their length; as that of slices in profiles without other lengths."""
    windows = slowdown.windows or (SlowdownWindow(seconds=1.0, low=slowdown.low, high=slowdown.high),)
    return tuple(StepSpread(one.seconds, one.low / slowdown.median, one.high / slowdown.median) for one in windows)


def _load(devices: Sequence[DeviceInfo], slowdowns: Mapping[str, Slowdown | None]) -> dict[str, float]:
    """Return by host the cores that other programs wanted while a model was measured.

    They share the cores fairly with the workers, so that `t` busy threads of these were `(t + load) / t` times slower
    than alone. Only workers that leave no core free show that: with free cores a slowdown has other causes, which using
    fewer devices does not remove.
    """
    found = {}
    for host in dict.fromkeys(device.host for device in devices if device.cores):
        own = [device for device in devices if device.host == host and device.cores]
        threads = sum(_device(device).threads for device in own)
        slowdown = slowdowns.get("cpu")
        if slowdown is not None and threads >= max(device.cores for device in own):
            found[host] = threads * max(0.0, slowdown.median - 1)
    return found


def _device(device: DeviceInfo) -> DeviceSpec:
    kind = device_type(device)
    return DeviceSpec(
        number=device.number,
        type=kind,
        host=device.host,
        capacity_bytes=device.memory_bytes,
        speed=device.speed,
        host_bps=HOST_BPS if kind == "cpu" else ACCELERATOR_BPS,
        processor=device.kind == "cpu",
        threads=busy_threads(device) * min(1.0, device.speed),
    )


def _values(profile: ModelProfile) -> tuple[SegmentValue, ...]:
    """Return the values between segments, with their bytes per sample."""
    size = profile.bytes.size
    return tuple(
        SegmentValue(
            source=value.source,
            consumers=value.consumers,
            forward_bytes=-(-value.forward_bytes // size),
            backward_bytes=-(-value.backward_bytes // size),
            kept=value.kept,
        )
        for value in profile.bytes.values
    )


def _ties(profile: ModelProfile) -> tuple[Tie, ...]:
    return tuple(
        Tie(
            segments=tie.segments,
            parameter_bytes=tie.parameter_bytes,
            state_bytes=tie.state_bytes,
            optimizer_bytes=tie.optimizer_bytes,
        )
        for tie in profile.bytes.ties
    )


def _segment(profile: ModelProfile, index: int, size: int) -> Segment:
    memory = profile.bytes.segments[index]
    everything = sum(segment.update_bytes for segment in profile.bytes.segments)
    part = memory.update_bytes / everything if everything else 0.0

    def fitted(place: int) -> Mapping[str, ComputeTime]:
        return {
            kind: ComputeTime.fit({found.size: max(found.seconds[index][place], 1e-9) for found in measured})
            for kind, measured in profile.times.items()
        }

    return Segment(
        name=memory.name,
        forward_s=fitted(0),
        input_s=fitted(1),
        weight_s=fitted(2),
        update_s={kind: part * measured[-1].update_s for kind, measured in profile.times.items()},
        parameter_bytes=memory.parameter_bytes,
        state_bytes=memory.state_bytes,
        optimizer_bytes=memory.optimizer_bytes,
        saved_bytes=-(-memory.saved_bytes // size),
        late_bytes=-(-memory.late_bytes // size),
        forward_work_bytes=-(-memory.forward_work_bytes // size),
        backward_work_bytes=-(-memory.backward_work_bytes // size),
    )
