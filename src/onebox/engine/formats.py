"""Memory formats of stages: channels last where that was measured to be faster."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from msgspec.structs import replace

from onebox.cost.model import ModelProfile, SegmentTimes
from onebox.engine.problem import device_type
from onebox.graph import ModelPrograms
from onebox.plan import Plan, Stage
from onebox.pool import DeviceInfo
from onebox.wire import Program, Slot, specs_by_slot

LEAST_WORK = 50_000_000
"""Multiplications of a micro-batch's convolutions, some milliseconds in all, below which nothing is measured: what can
be gained is less than what measuring takes, and the models of tests are smaller."""

LEAST_GAIN = 0.03
"""The least part of a stage's time that channels last are to gain: what is less may be noise."""

_FAST = ("float32", "bfloat16")
"""Types that oneDNN convolves."""


def convolution_work(programs: ModelPrograms) -> int:
    """Return the multiplications of the convolutions of forward of all stages, of types that oneDNN convolves."""
    return sum(_work(named.program) for phase, named in programs.phases.items() if phase.kind == "F")


def _work(program: Program) -> int:
    specs = specs_by_slot(program)
    total = 0
    for operator in program.operators:
        made = operator.specs[0]
        if operator.name != "aten.convolution.default" or made is None or made.dtype not in _FAST:
            continue
        weight = operator.args[1]
        assert isinstance(weight, Slot)
        if len(made.shape) == 4:
            total += prod(made.shape) * prod(specs[weight.index].shape[1:])
    return total


def compared(plain: SegmentTimes, last: SegmentTimes) -> SegmentTimes:
    """Return the times of segments, each in its faster format, with what channels last gain.

    Args:
        plain: Measured as captured.
        last: Measured with channels last.
    """
    gains = tuple(sum(a) - sum(b) for a, b in zip(plain.seconds, last.seconds, strict=True))
    faster = tuple(b if gain > 0 else a for a, b, gain in zip(plain.seconds, last.seconds, gains, strict=True))
    return replace(plain, seconds=faster, last_gain_s=gains)


def with_formats(plan: Plan, profile: ModelProfile, devices: Sequence[DeviceInfo]) -> Plan:
    """Return a plan whose stages on CPUs have channels last where their segments gain by that.

    Args:
        plan: The plan.
        profile: The model's profile.
        devices: Those of the pool.
    """
    return replace(plan, stages=tuple(_with_format(stage, plan.micro_batch, profile, devices) for stage in plan.stages))


def _with_format(stage: Stage, micro_batch: int | None, profile: ModelProfile, devices: Sequence[DeviceInfo]) -> Stage:
    kinds = {device_type(devices[device]) for replica in stage.replicas for device in replica}
    times = profile.times.get("cpu", ())
    if kinds != {"cpu"} or stage.ranks > 1 or not times or not all(each.last_gain_s for each in times):
        return replace(stage, channels_last=False)
    nearest = min(times, key=lambda each: abs(each.size - (micro_batch or each.size)))
    own = [
        (gain, sum(seconds))
        for segment, gain, seconds in zip(profile.bytes.segments, nearest.last_gain_s, nearest.seconds, strict=True)
        if segment.name in stage.segments or not stage.segments
    ]
    gain_s = sum(gain for gain, _ in own)
    plain_s = sum(seconds + max(0.0, gain) for gain, seconds in own)
    return replace(stage, channels_last=gain_s > LEAST_GAIN * plain_s)
