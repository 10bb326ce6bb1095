"""Model profile for devices that are not used: times from an earlier measurement, or estimated. Pure except for reading
the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onebox.cost import PoolProfile, Speeds, load
from onebox.cost.estimate import TYPICAL_RATES, DeviceRates, program_s, slowest_operator
from onebox.cost.model_profile import ModelBytes, ModelProfile, SegmentTimes
from onebox.engine.problem.planner_problem import CachedTimes, device_type, divided_bytes, times_key
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.named_state import PASSES
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.graph import ModelPrograms, PhaseKind
from onebox.plan import Links
from onebox.pool import DeviceInfo
from onebox.pool.devices import host_uplinks
from onebox.pool.network.profile import profile_key

_ACCELERATOR = DeviceRates(flops=2e13, bandwidth_bps=5e11, operator_s=1e-5)
"""Rates of a 2018 GPU, such as a T4 or an RTX 2080, with or without TensorFloat-32."""

_CALL_S = 1e-4
"""Default cost of an action besides its operators."""

_LATENCY_S, _BANDWIDTH_BPS = 1e-4, 1e9
"""Defaults for unknown links."""


@dataclass(frozen=True, kw_only=True)
class EstimatedTimes:
    """Estimated times of segments for one size of a micro-batch on one type of device.

    Args:
        times: The times; 0 for a phase without operators.
        operators: For each segment and phase, the operator that takes longest; empty without operators.
    """

    times: SegmentTimes
    operators: tuple[tuple[str, str, str], ...]


def estimate_profile(
    captures: Captures,
    batch: Batch,
    sizes: Sequence[int],
    optimizer: Optimizers,
    devices: Sequence[DeviceInfo],
    rates: DeviceRates | None = None,
) -> tuple[ModelProfile, str]:
    """Return the profile of a model without running it.

    Args:
        captures: The captured model.
        batch: A batch.
        sizes: Micro-batch sizes in samples, one or more.
        optimizer: The optimizer.
        devices: The devices.
        rates: Rates of each device, for an estimate; ``None`` for an earlier measurement of this model on such devices
            or, failing that, of such devices.

    Returns:
        The profile, and a description of the source of its times.

    Raises:
        CaptureError: The model cannot be captured.
    """
    known: dict[str, list[SegmentTimes]] = {}
    divided: list[tuple[ModelPrograms, ModelBytes]] = []
    for size in sorted(set(sizes)):
        divided.append(divided_bytes(captures, batch, size, optimizer))
        key = times_key(
            divided[-1][1].graph, devices, optimizer, size, captures.recipe.precision, captures.recipe.numerics
        )
        found = load(key, CachedTimes) if rates is None else None
        for kind, times in (found.times if found else {}).items():
            known.setdefault(kind, []).append(times)
    largest = divided[-1][1]
    types = {device_type(device): device for device in devices}
    if set(types) <= set(known) and all(len(known[kind]) == len(divided) for kind in types):
        return ModelProfile(bytes=largest, times={k: tuple(v) for k, v in known.items()}), "measured earlier"
    each, where = _rates(types, devices, rates)
    estimated = {kind: tuple(_times(*one, each[kind]) for one in divided) for kind in types}
    return ModelProfile(bytes=largest, times=estimated), where


def estimate_times(
    divided: Sequence[tuple[ModelPrograms, ModelBytes]], devices: Sequence[DeviceInfo]
) -> dict[str, tuple[EstimatedTimes, ...]]:
    """Return estimated times of a model's segments, by type of device.

    Args:
        divided: For each size, the programs with each segment as a stage, and their bytes.
        devices: The devices, by whose speeds it is estimated if they have been measured.
    """
    types = {device_type(device): device for device in devices}
    each, _ = _rates(types, devices, None)
    return {
        kind: tuple(
            EstimatedTimes(times=_times(programs, sizes, rates), operators=_operators(programs, sizes, rates))
            for programs, sizes in divided
        )
        for kind, rates in each.items()
    }


def estimate_links(devices: Sequence[DeviceInfo]) -> Links:
    """Return the links between devices as measured earlier, or with the speed of fast Ethernet."""
    numbers = [device.number for device in devices]
    measured = _measured(devices)
    if measured is not None and all(set(row) >= set(numbers) - {a} for a, row in measured.bandwidth_bps.items()):
        return Links(latency_s=measured.latency_s, bandwidth_bps=measured.bandwidth_bps, uplinks=host_uplinks(devices))
    return Links(
        latency_s={a: dict.fromkeys(numbers, _LATENCY_S) for a in numbers},
        bandwidth_bps={a: dict.fromkeys(numbers, _BANDWIDTH_BPS) for a in numbers},
    )


def _measured(devices: Sequence[DeviceInfo]) -> PoolProfile | None:
    return load(profile_key(devices, {}), PoolProfile)


def _rates(
    types: Mapping[str, DeviceInfo], devices: Sequence[DeviceInfo], rates: DeviceRates | None
) -> tuple[dict[str, DeviceRates], str]:
    """Return the rates of each device type at full speed, and a description of their source."""
    if rates is not None:
        return dict.fromkeys(types, rates), f"estimated for {_text(rates)}, as was said"
    measured = _measured(devices)
    speeds = {device_type(d): (d, measured.devices[d.number].speeds) for d in devices} if measured else {}
    found, words = {}, []
    for kind, device in types.items():
        seen = speeds.get(kind)
        if seen is not None and seen[1].operator_s is not None:
            found[kind] = _seen(seen[1], seen[0].speed)
            words.append(f"{_text(found[kind])}, as it was measured, for {kind}")
        else:
            threads = max(1, device.threads)
            found[kind] = _ACCELERATOR if device.kind == "cuda" else _share(TYPICAL_RATES, threads)
            words.append(f"{_text(found[kind])}, which is a guess, for {kind}")
    return found, f"estimated for {'; '.join(words)}"


def _seen(speeds: Speeds, speed: float) -> DeviceRates:
    """Return the rates of a device that was measured at a reduced speed."""
    flops = [value for value in (speeds.matmul_flops, speeds.convolution_flops) if value is not None]
    bandwidth = [value for value in (speeds.pointwise_bps, speeds.norm_bps) if value is not None]
    assert flops
    assert bandwidth
    assert speeds.operator_s is not None
    return DeviceRates(
        flops=min(flops) / speed, bandwidth_bps=min(bandwidth) / speed, operator_s=speeds.operator_s * speed
    )


def _share(rates: DeviceRates, threads: int) -> DeviceRates:
    return DeviceRates(flops=rates.flops * threads, bandwidth_bps=rates.bandwidth_bps, operator_s=rates.operator_s)


def _text(rates: DeviceRates) -> str:
    return f"{rates.flops / 1e9:.3g} GFLOP/s and {rates.bandwidth_bps / 1e9:.3g} GB/s"


def _times(programs: ModelPrograms, sizes: ModelBytes, rates: DeviceRates) -> SegmentTimes:
    """Return approximate times of a model's segments for one micro-batch size."""

    def taken(segment: int, kind: PhaseKind) -> float:
        return program_s(programs.of(segment, kind).program, rates)

    state = sum(segment.update_bytes for segment in sizes.segments) + sum(tie.state_bytes for tie in sizes.ties)
    return SegmentTimes(
        size=sizes.size,
        seconds=tuple((taken(n, "F"), taken(n, "I"), taken(n, "W")) for n in range(len(sizes.segments))),
        update_s=PASSES * state / rates.bandwidth_bps,
        call_s=_CALL_S,
        measured=0.0,
    )


def _operators(programs: ModelPrograms, sizes: ModelBytes, rates: DeviceRates) -> tuple[tuple[str, str, str], ...]:
    """Return the operator that takes longest in each phase of each segment."""

    def slowest(segment: int, kind: PhaseKind) -> str:
        return slowest_operator(programs.of(segment, kind).program, rates)

    return tuple((slowest(n, "F"), slowest(n, "I"), slowest(n, "W")) for n in range(len(sizes.segments)))
