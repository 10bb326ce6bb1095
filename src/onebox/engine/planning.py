"""Planning: measure the model, the devices and the links, and search for the best plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import nn

from onebox.cost.model import ModelProfile
from onebox.engine.batch import as_batch
from onebox.engine.forecast import forecast_memory
from onebox.engine.profiling import device_type, profile_model
from onebox.errors import PlanError, UsageError
from onebox.graph import Loss, Precision
from onebox.plan import SCHEDULES, Links, Plan, Prediction
from onebox.plan.inputs import DeviceSpec, Problem, Segment, Tie, Time, Value
from onebox.plan.search import SearchResult, search
from onebox.pool import DeviceInfo, Pool

_CORRECTIONS = 5
"""So many times at most a search is repeated because the exact memory is more than estimated."""

_MARGIN = 0.97

_SENSIBLE = 32
"""Sizes that cut a batch into more micro-batches are not measured, but followed from larger ones."""

_MOST = 256
"""At most so many micro-batches of a batch are considered."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan and what it was made from.

    Args:
        plan: The best plan, with what is predicted of it.
        result: What the search considered.
        problem: What it was given.
        profile: The model's profile.
    """

    plan: Plan
    result: SearchResult
    problem: Problem
    profile: ModelProfile


def make_plan(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    inputs: Any,
    targets: Any,
    *,
    pool: Pool,
    micro_batches: Sequence[int] | None = None,
    schedules: Sequence[str] = SCHEDULES,
    precision: Precision = "fp32",
    budget_s: float = 5.0,
    fresh: bool = False,
) -> Planned:
    """Find the best plan for a model, a batch and a pool.

    Args:
        model: The model.
        loss: Maps (outputs, targets) to a scalar, a mean over samples.
        optimizer: Of ``torch.optim``, over the model's parameters.
        inputs: A batch, as for :meth:`Trainer.step`.
        targets: Likewise.
        pool: The devices; each is measured.
        micro_batches: Allowed samples of a micro-batch; halvings of the batch when ``None``. The loss curve depends on
            the micro-batch where a model looks at it as a whole, as batch norm does.
        schedules: Allowed schedules.
        precision: As for :class:`Trainer`.
        budget_s: The most seconds that the search may take.
        fresh: Measure anew what is known from an earlier time.

    Raises:
        UsageError: The batch cannot be divided as asked.
        PlanError: Nothing fits.
        CaptureError: The model cannot be captured.

    Example:
        >>> import torch, onebox
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> with onebox.open("cpu*2") as pool:
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     loss, x, y = torch.nn.functional.mse_loss, torch.ones(8, 4), torch.zeros(8, 1)
        ...     planned = onebox.make_plan(model, loss, optimizer, x, y, pool=pool)
        ...     with onebox.Trainer(model, loss, optimizer, pool=pool, plan=planned.plan) as trainer:
        ...         assert trainer.step(x, y).item() >= 0
    """
    batch = as_batch(inputs, targets)
    allowed = _allowed(batch.size, micro_batches)
    profile, captures = profile_model(
        model,
        loss,
        optimizer,
        inputs,
        targets,
        pool=pool,
        sizes=_measured(batch.size, allowed),
        precision=precision,
        fresh=fresh,
    )
    links = pool_links(pool, fresh=fresh)
    problem = make_problem(
        profile, pool.devices, links, batch=batch.size, micro_batches=allowed, schedules=tuple(schedules)
    )
    result, peaks = _search_within(
        problem,
        lambda plan: forecast_memory(plan, model, loss, optimizer, batch, devices=pool.devices, captures=captures),
        budget_s,
    )
    predicted = msgspec.structs.replace(
        _prediction(result.plan), peak_bytes=tuple(peaks[device] for device in result.plan.devices)
    )
    plan = msgspec.structs.replace(result.plan, predicted=predicted)
    return Planned(plan=plan, result=result, problem=problem, profile=profile)


def _prediction(plan: Plan) -> Prediction:
    assert plan.predicted is not None
    return plan.predicted


def _search_within(
    problem: Problem, exact: Callable[[Plan], Mapping[int, int]], budget_s: float
) -> tuple[SearchResult, Mapping[int, int]]:
    """Search for the best plan that fits by the exact count of its memory, of which the planner's is an estimate.

    Where the estimate is too low, the device's memory is taken for so much smaller, and the search is repeated.

    Returns:
        What was found, and the exact peak of each of the plan's devices.

    Raises:
        PlanError: Nothing fits.
    """
    devices = problem.devices
    for _ in range(_CORRECTIONS):
        result = search(replace(problem, devices=devices), budget_s=budget_s)
        plan, peaks = result.plan, exact(result.plan)
        estimates = dict(zip(plan.devices, _prediction(plan).peak_bytes, strict=True))
        limits = {device.number: device.capacity_bytes for device in problem.devices}
        over = {d: peaks[d] for d in plan.devices if limits[d] is not None and peaks[d] > (limits[d] or 0)}
        if not over:
            return result, peaks
        devices = tuple(
            replace(device, capacity_bytes=int(_less(device.capacity_bytes, estimates, over, device.number)))
            for device in devices
        )
    worst = max(over, key=over.__getitem__)
    missing = over[worst] - (limits[worst] or 0)
    raise PlanError(
        f"device {worst} would need {over[worst]} bytes, {missing} more than it has, in the best plan that was found; "
        "allow smaller micro-batches, or add a device",
        stage=None,
        device=worst,
        missing_bytes=missing,
    )


def _less(capacity: int | None, estimates: Mapping[int, int], over: Mapping[int, int], number: int) -> float:
    """Return the memory that a device is taken to have, after its need turned out to be more than estimated."""
    if capacity is None:
        return 1 << 62
    if number not in over:
        return capacity
    return min(capacity, capacity * max(1, estimates[number]) / over[number]) * _MARGIN


def _allowed(batch: int, asked: Sequence[int] | None) -> tuple[int, ...]:
    if asked is not None:
        sizes = sorted(set(asked))
        if not sizes or not 1 <= sizes[0] <= sizes[-1] <= batch:
            raise UsageError(f"micro-batches of {list(asked)} samples: allowed are 1 to {batch}, the batch")
        return tuple(sizes)
    found = {batch}
    while min(found) > 1 and -(-batch // min(found)) < _MOST:
        found.add(-(-min(found) // 2))
    return tuple(sorted(found))


def _measured(batch: int, allowed: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes to be measured: the smallest and the largest of those that make sense, and one in between."""
    sensible = [size for size in allowed if -(-batch // size) <= _SENSIBLE] or list(allowed)
    return tuple(sorted({sensible[0], sensible[len(sensible) // 2], sensible[-1]}))


def pool_links(pool: Pool, *, fresh: bool = False) -> Links:
    """Return the links of a pool, as they are measured or known from an earlier time."""
    if len(pool) == 1:
        only = pool.devices[0].number
        return Links(latency_s={only: {only: 0.0}}, bandwidth_bps={only: {only: float("inf")}})
    measured = pool.profile(fresh=fresh)
    return Links(latency_s=measured.latency_s, bandwidth_bps=measured.bandwidth_bps)


def make_problem(
    profile: ModelProfile,
    devices: Sequence[DeviceInfo],
    links: Links,
    *,
    batch: int,
    micro_batches: Sequence[int],
    schedules: Sequence[str] = SCHEDULES,
) -> Problem:
    """Return what the planner is given.

    Args:
        profile: The model's profile.
        devices: The devices that may be used.
        links: Links between them.
        batch: Samples of a step.
        micro_batches: Allowed samples of a micro-batch.
        schedules: Allowed schedules.

    Raises:
        UsageError: The model has not been measured on a type of device.
    """
    size = profile.bytes.size
    times = {kind: found for kind, found in profile.times.items() if found}
    return Problem(
        segments=tuple(_segment(profile, index, size) for index in range(len(profile.bytes.segments))),
        devices=tuple(
            DeviceSpec(
                number=device.number,
                type=device_type(device),
                host=device.host,
                capacity_bytes=device.memory_bytes,
                speed=device.speed,
            )
            for device in devices
        ),
        links=links,
        batch=batch,
        micro_batches=tuple(micro_batches),
        values=tuple(
            Value(
                source=value.source,
                consumers=value.consumers,
                forward_bytes=-(-value.forward_bytes // size),
                backward_bytes=-(-value.backward_bytes // size),
                kept=value.kept,
            )
            for value in profile.bytes.values
        ),
        ties=tuple(
            Tie(segments=tie.segments, parameter_bytes=tie.parameter_bytes, state_bytes=tie.state_bytes)
            for tie in profile.bytes.ties
        ),
        call_s=max(found.call_s for measured in times.values() for found in measured),
        schedules=tuple(schedules),
    )


def _segment(profile: ModelProfile, index: int, size: int) -> Segment:
    memory = profile.bytes.segments[index]
    everything = sum(segment.state_bytes for segment in profile.bytes.segments)
    part = memory.state_bytes / everything if everything else 0.0

    def fitted(place: int) -> Mapping[str, Time]:
        return {
            kind: Time.fit({found.size: max(found.seconds[index][place], 1e-9) for found in measured})
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
        saved_bytes=-(-memory.saved_bytes // size),
        late_bytes=-(-memory.late_bytes // size),
        forward_work_bytes=-(-memory.forward_work_bytes // size),
        backward_work_bytes=-(-memory.backward_work_bytes // size),
    )
