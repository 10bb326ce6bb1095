"""Steps of plans, simulated and as if they had been measured, for tests of reports."""

from __future__ import annotations

import msgspec

from onebox.engine import TraceEvent
from onebox.plan import (
    ComputeTime,
    DeviceSpec,
    Links,
    Plan,
    PlanCandidate,
    Problem,
    Segment,
    SegmentValue,
    Simulation,
    Stage,
    predict,
)

SEGMENTS = 6


def problem(devices: int = 3, capacity_bytes: int | None = 1 << 20) -> Problem:
    """Return six segments in a chain, on devices whose forward takes 1 ms a sample, and each gradient as long."""
    time = {"cpu": ComputeTime(sample_s=1e-3)}
    numbers = range(devices)
    return Problem(
        segments=tuple(
            Segment(
                name=f"model.{n}",
                forward_s=time,
                input_s=time,
                weight_s=time,
                update_s={"cpu": 1e-3},
                state_bytes=1000,
                saved_bytes=100,
                parameter_bytes=300,
            )
            for n in range(SEGMENTS)
        ),
        devices=tuple(DeviceSpec(number=n, type="cpu", capacity_bytes=capacity_bytes) for n in numbers),
        links=Links(
            latency_s={a: dict.fromkeys(numbers, 1e-4) for a in numbers},
            bandwidth_bps={a: dict.fromkeys(numbers, 1e6) for a in numbers},
        ),
        batch=8,
        micro_batches=(2,),
        values=tuple(
            SegmentValue(source=n, consumers=(n + 1,), forward_bytes=500, backward_bytes=500)
            for n in range(SEGMENTS - 1)
        ),
    )


def plan(schedule: str = "zb-h1", *, replicas: int = 1) -> Plan:
    """Return three stages; the first has as many replicas as asked for, on the devices 0 and 3 up."""
    first = (0, *range(3, 2 + replicas))
    homes = [tuple((device,) for device in first), ((1,),), ((2,),)]
    return Plan(
        stages=tuple(
            Stage(
                segments=(f"model.{2 * n}", f"model.{2 * n + 1}"),
                replicas=home,
                shares=(1.0,) * len(home),
            )
            for n, home in enumerate(homes)
        ),
        micro_batch=2,
        schedule=schedule,
    )


def foreseen(which: Plan, given: Problem | None = None) -> tuple[Plan, Simulation]:
    """Return a plan with its prediction, and its step."""
    prediction, simulation = predict(given or problem(max(which.devices) + 1), which)
    return msgspec.structs.replace(which, predicted=prediction), simulation


def as_measured(
    simulation: Simulation,
    step: int,
    *,
    factor: float = 1.0,
    start_ns: int = 1_000_000,
    peak_bytes: tuple[int, ...] = (0,) * 4,
) -> list[TraceEvent]:
    """Return the events of a run that did what was simulated, but slower by a factor, with the peaks of its devices."""

    def at(seconds: float) -> int:
        return start_ns + round(seconds * factor * 1e9)

    events = [
        TraceEvent(
            worker=span.device,
            track="compute",
            name=str(span.action),
            step=step,
            start_ns=at(span.start_s),
            end_ns=at(span.end_s),
            action=span.action,
            peak_bytes=peak_bytes[span.device],
        )
        for span in simulation.spans
    ]
    for one in simulation.transfers:
        letter = "F" if one.forward else "B"
        name = f"receive for {one.target_stage}{letter}{one.micro_batch} from device {one.source}"
        times = {"start_ns": at(one.start_s), "end_ns": at(one.end_s)}
        events.append(TraceEvent(worker=one.target, track="transfer", name=name, step=step, **times))
        events.append(TraceEvent(worker=one.source, track="transfer", name=f"send to {one.target}", step=step, **times))
    for update in simulation.updates:
        track, name = ("compute", "optimizer") if update.stage is None else ("transfer", "reduce")
        times = {"start_ns": at(update.start_s), "end_ns": at(update.end_s)}
        events.append(TraceEvent(worker=update.device, track=track, name=name, step=step, **times))
    return events


def candidate(label: str, which: Plan, **options: object) -> PlanCandidate:
    """Return a candidate with its prediction."""
    return PlanCandidate(label=label, plan=foreseen(which)[0], **options)  # type: ignore[arg-type]
