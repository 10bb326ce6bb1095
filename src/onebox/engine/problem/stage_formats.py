"""Measured formats of stages: memory layout of feature maps, and element type of products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from msgspec.structs import replace

from onebox.cost.model_profile import AS_CAPTURED, ModelProfile, SegmentTimes, SegmentVariant
from onebox.engine.problem.planner_problem import device_type
from onebox.graph import ModelPrograms, Precision
from onebox.plan import Plan, Stage
from onebox.plan.model.stage import OFFLOADING_POLICIES
from onebox.pool import DeviceInfo
from onebox.wire import Program, SlotArgument, specs_by_slot

LEAST_WORK = 50_000_000
"""Multiplications of a micro-batch, some milliseconds in all, below which nothing is measured: the possible gain is
smaller than the cost of measuring, and the models of tests are smaller."""

LEAST_GAIN = 0.03
"""Least fraction of a stage's time that another format must gain; less may be noise."""

_FAST = ("float32", "bfloat16")
"""Element types with fast oneDNN convolutions."""

_MATRICES = {"aten.mm.default": 0, "aten.bmm.default": 0, "aten.addmm.default": 1, "aten.baddbmm.default": 1}
"""Matrix products, and the position of the first matrix among their arguments."""


def convolution_work(programs: ModelPrograms) -> int:
    """Return the multiplications of forward convolutions of all stages with element types that oneDNN convolves."""
    forward = [named.program for phase, named in programs.phases.items() if phase.kind == "F"]
    return sum(_convolutions(program, _FAST) for program in forward)


def product_work(programs: ModelPrograms) -> int:
    """Return the forward multiplications of all stages that could use bfloat16."""
    forward = [named.program for phase, named in programs.phases.items() if phase.kind == "F"]
    return sum(_convolutions(program, _FAST[:1]) + _matrices(program) for program in forward)


def _convolutions(program: Program, types: Sequence[str]) -> int:
    specs = specs_by_slot(program)
    total = 0
    for operator in program.operators:
        made = operator.specs[0]
        if operator.name != "aten.convolution.default" or made is None or made.dtype not in types:
            continue
        weight = operator.args[1]
        assert isinstance(weight, SlotArgument)
        if len(made.shape) == 4:
            total += prod(made.shape) * prod(specs[weight.index].shape[1:])
    return total


def _matrices(program: Program) -> int:
    specs = specs_by_slot(program)
    total = 0
    for operator in program.operators:
        made = operator.specs[0]
        if operator.name in _MATRICES and made is not None and made.dtype == "float32":
            left = operator.args[_MATRICES[operator.name]]
            assert isinstance(left, SlotArgument)
            total += prod(made.shape) * specs[left.index].shape[-1]
    return total


def ways_of(
    kind: str, devices: Sequence[DeviceInfo], programs: ModelPrograms, precision: Precision
) -> tuple[SegmentVariant, ...]:
    """Return the formats of a model that are worth measuring on a device type, the usual one first.

    Args:
        kind: ``cpu`` or ``cuda``.
        devices: All devices of that type.
        programs: The model.
        precision: Precision of the run: bf16 is measured with ``auto`` only, and only if all devices have instructions
            for it.
    """
    last = kind == "cpu" and convolution_work(programs) >= LEAST_WORK
    narrow = precision == "auto" and all(d.has_bf16 for d in devices) and product_work(programs) >= LEAST_WORK
    formats, types = (False, True)[: 1 + last], (False, True)[: 1 + narrow]
    return tuple(SegmentVariant(channels_last=there, bf16=rounded) for rounded in types for there in formats)


def compared(found: Mapping[SegmentVariant, SegmentTimes]) -> SegmentTimes:
    """Return the times of segments, each in its fastest measured format, including the usual one.

    Args:
        found: Times by format.
    """
    seconds = tuple(min(each, key=sum) for each in zip(*(times.seconds for times in found.values()), strict=True))
    if len(found) == 1:
        return found[AS_CAPTURED]
    ways = tuple((way, times.seconds) for way, times in found.items())
    return replace(found[AS_CAPTURED], seconds=seconds, ways=ways)


def with_formats(plan: Plan, profile: ModelProfile, devices: Sequence[DeviceInfo]) -> Plan:
    """Return a plan with each stage in the format in which its segments are fastest.

    bf16 changes results: it must be faster than the best format without it.

    Args:
        plan: The plan.
        profile: The model's profile.
        devices: Devices of the pool.
    """
    return replace(plan, stages=tuple(_with_format(stage, plan.micro_batch, profile, devices) for stage in plan.stages))


def with_precisions_of(plan: Plan, other: Plan, segments: Sequence[str]) -> Plan:
    """Return a plan with the bf16 and the lossy codecs that all segments of a stage have in another plan.

    Activations have no codec where the plan offloads or swaps those of any stage.

    Args:
        plan: A plan for the same model.
        other: The other plan.
        segments: All segments of the model.
    """
    narrow = {name for stage in other.narrow for name in other.stages[stage].segments or segments}
    codecs = {
        name: (stage.gradients, stage.activations) for stage in other.stages for name in stage.segments or segments
    }

    offloads = any(stage.policy in OFFLOADING_POLICIES for stage in plan.stages)

    def like_other(stage: Stage) -> Stage:
        own = stage.segments or segments
        chosen = {codecs[name] for name in own if name in codecs}
        gradients, activations = chosen.pop() if len(chosen) == 1 else ("none", "none")
        return replace(
            stage,
            precision="bf16" if stage.ranks == 1 and narrow.issuperset(own) else None,
            gradients=gradients,
            activations="none" if offloads else activations,
        )

    return replace(plan, stages=tuple(map(like_other, plan.stages))) if narrow or other.lossy else plan


def _with_format(stage: Stage, micro_batch: int | None, profile: ModelProfile, devices: Sequence[DeviceInfo]) -> Stage:
    kinds = {device_type(devices[device]) for replica in stage.replicas for device in replica}
    ways = {_fastest(stage, micro_batch, profile, kind) for kind in kinds}
    (way,) = ways if len(ways) == 1 and stage.ranks == 1 else {AS_CAPTURED}
    return replace(stage, channels_last=way.channels_last, precision="bf16" if way.bf16 else None)


def _fastest(stage: Stage, micro_batch: int | None, profile: ModelProfile, kind: str) -> SegmentVariant:
    """Return the fastest format of a stage on a type of device."""
    times = profile.times.get(kind, ())
    nearest = min(times, key=lambda each: abs(each.size - (micro_batch or each.size)), default=None)
    if nearest is None or not nearest.ways:
        return AS_CAPTURED
    own = [not stage.segments or segment.name in stage.segments for segment in profile.bytes.segments]
    taken = {
        way: sum(sum(each) for each, there in zip(seconds, own, strict=True) if there) for way, seconds in nearest.ways
    }
    best = AS_CAPTURED
    for narrow in (False, True):
        way = min((way for way in taken if way.bf16 == narrow), key=taken.__getitem__, default=best)
        if taken[way] < (1 - LEAST_GAIN) * taken[best]:
            best = way
    return best
