"""Memory fit: whether and how a model can be trained within the memory of some devices, without running it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from onebox.cost.estimate import DeviceRates
from onebox.engine.memory.forecast import TrainingJob
from onebox.engine.memory.timeline import MemoryPeak, MemoryTimeline, memory_peak, memory_timeline
from onebox.engine.planning.bisection import LargestFit, find_largest
from onebox.engine.planning.resolve_plan import plan_of
from onebox.engine.problem.estimate import estimate_links, estimate_profile
from onebox.engine.problem.memory_search import search_sharing, search_within, short_of_memory, with_peaks
from onebox.engine.problem.planner_problem import allowed_sizes, make_problem, measured_sizes
from onebox.engine.workload.batch import Batch, as_batch
from onebox.engine.workload.captures import Captures, CaptureSpec, target_type
from onebox.engine.workload.named_state import named_state, trained_names
from onebox.engine.workload.parameter_groups import Optimizers, optimizers_in
from onebox.errors import CaptureError, PlanError, UsageError
from onebox.graph import Loss, Precision
from onebox.plan import SCHEDULES, Plan, predict
from onebox.plan.model.problem import Problem
from onebox.pool import DeviceInfo, Pool
from onebox.pool.expected_devices import expected_devices
from onebox.sizes import Memory, enough_text
from onebox.trainer_options import DataParallel

_MOST_SAMPLES = 1 << 20
_MOST_MICRO_BATCHES = 64
"""Most micro-batches to consider; further ones add no memory beyond their samples."""


@dataclass(frozen=True, kw_only=True)
class FitAlternative:
    """A plan for the same batch on the same devices.

    Args:
        label: Readable description.
        plan: The plan, with its exact memory peaks.
        peak_bytes: Peak bytes of each device.
        step_s: Expected seconds of a step.
        refused: Reason that it cannot be used; empty if it fits.
    """

    label: str
    plan: Plan
    peak_bytes: Mapping[int, int]
    step_s: float
    refused: str = ""

    @property
    def fits(self) -> bool:
        """True if it fits into the memory of all devices."""
        return not self.refused


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """Result of a memory-fit question.

    Args:
        plan: The plan in question.
        batch: Samples per step.
        devices: The devices.
        segments: Names of the model's segments, in their order.
        peaks: Peak of each device of the plan, and the contents of its memory then.
        curves: Memory of each device of the plan over the step.
        largest: Largest batch that fits the plan.
        step_s: Expected seconds of a step of the plan.
        ways: If it does not fit: plans that do, fastest first, then some that do not.
        basis: Description of the source of expected times.
        refusal: Reason that nothing fits; empty if something does.
    """

    plan: Plan
    batch: int
    devices: tuple[DeviceInfo, ...]
    segments: tuple[str, ...]
    peaks: Mapping[int, MemoryPeak]
    curves: Mapping[int, MemoryTimeline]
    largest: LargestFit
    step_s: float | None = None
    ways: tuple[FitAlternative, ...] = ()
    basis: str = ""
    refusal: str = ""

    @property
    def budgets(self) -> dict[int, int]:
        """Memory budget of each device."""
        return {device.number: device.memory_bytes for device in self.devices}

    @property
    def fits(self) -> bool:
        """True if the plan fits into the memory of all devices."""
        return not _shortfall({device: peak.size_bytes for device, peak in self.peaks.items()}, self.budgets)


def estimate_memory(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizers,
    inputs: Any,
    targets: Any = None,
    *,
    memory: Memory | None = None,
    pool: str | Pool = "auto",
    threads: int | None = None,
    plan: Plan | str | Path | DataParallel | Literal["auto"] = DataParallel(),
    precision: Precision = "fp32",
    fuse: bool = False,
    clip_grad_norm: float | None = None,
    rates: DeviceRates | None = None,
    budget_s: float = 3.0,
) -> FitReport:
    """Return whether a model, a batch and an optimizer fit the memory of devices, where the peak is, and which changes
    help.

    Nothing is run, and no worker is started: memory follows from the lifetimes of buffers, equal to the workers' own
    count to the byte. The times by which alternatives are compared come from an earlier measurement or an estimate.

    Args:
        model: The model.
        loss: Maps (outputs, targets) to a scalar, a mean over samples.
        optimizer: Of ``torch.optim``, over the model's parameters, or several.
        inputs: A batch, as for :meth:`Trainer.step`.
        targets: Likewise; ``None`` for a loss that needs none.
        memory: Budget of each device, such as ``2GiB``; ``None`` for the devices' memory.
        pool: The devices: of this machine, or emulated stand-ins such as ``sim*2``; or an open pool.
        threads: CPU threads of each device.
        plan: The plan in question, or data parallel over all devices, whose shares follow from the devices' speeds
            unless they are given; with ``auto`` the best plan that fits, or data parallel if none does.
        precision: As for :class:`Trainer`.
        fuse: Likewise.
        clip_grad_norm: Likewise.
        rates: Rates of each device; ``None`` for an earlier measurement or else an estimate.
        budget_s: Approximate time limit of the search for alternatives, in seconds.

    Raises:
        UsageError: An argument is invalid.
        CaptureError: The model cannot be captured.

    Example:
        >>> import torch, onebox
        >>> model = torch.nn.Linear(1000, 1000)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> x, y = torch.ones(8, 1000), torch.ones(8, 1000)
        >>> loss = torch.nn.functional.mse_loss
        >>> found = onebox.estimate_memory(model, loss, optimizer, x, y, pool="cpu", memory="12MiB")
        >>> found.fits, found.peaks[0].sorts["optimizer state"]
        (False, 8008008)
    """
    devices = pool.devices if isinstance(pool, Pool) else expected_devices(pool, threads=threads, memory=memory)
    if isinstance(pool, Pool) and (memory is not None or threads is not None):
        raise UsageError("an open pool has its memory and threads already; leave memory and threads out")
    asked = None if plan == "auto" else _asked(Plan.read(plan) if isinstance(plan, str | Path) else plan, devices)
    captures = _captures(model, loss, optimizer, devices, precision, fuse=fuse)
    job = TrainingJob(
        captures=captures,
        optimizer=optimizer,
        batch=as_batch(inputs, targets),
        devices=tuple(devices),
        links=pool.links if isinstance(pool, Pool) else None,
        plain_links=isinstance(pool, Pool) and pool.plain_links,
        max_norm=clip_grad_norm or 0.0,
    )
    return _Question(job).answer(asked, rates, budget_s)


def _asked(given: Plan | DataParallel, devices: Sequence[DeviceInfo]) -> Plan:
    """Return the plan in question: the given one, or data parallel over all devices."""
    if isinstance(given, DataParallel):
        shares = [device.speed for device in devices] if given.shares in ("auto", "measured") else given.shares
        weights = [1.0] * len(devices) if isinstance(shares, str) else shares
        return plan_of(given, [device.number for device in devices], weights)
    strangers = [device for device in given.devices if device >= len(devices)]
    if strangers:
        raise UsageError(f"the plan uses device {strangers[0]}, but there are {len(devices)}, numbered from 0")
    return given


def _captures(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizers,
    devices: Sequence[DeviceInfo],
    precision: Precision,
    *,
    fuse: bool,
) -> Captures:
    """Return the captures of a model for some devices."""
    state = named_state(model, loss, itertools.count(1).__next__)
    recipe = CaptureSpec(
        model=model,
        loss=loss,
        metrics={},
        precision=precision,
        device_type=target_type(devices),
        trained=frozenset(trained_names(state, optimizers_in(optimizer))),
        fuse=fuse,
    )
    return Captures(recipe)


class _Question:
    """A job, about which several questions are answered."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._budgets = {device.number: device.memory_bytes for device in job.devices}

    def answer(self, plan: Plan | None, rates: DeviceRates | None, budget_s: float) -> FitReport:
        """Return the complete result for a plan, or for the best one."""
        if plan is not None:
            found = self._report(plan)
            return found if found.fits else self._with_ways(found, rates, budget_s)
        problem, basis = self._problem(allowed_sizes(self._job.batch.size, None), rates)
        shares = len(self._job.devices) > 1 and short_of_memory(problem)
        try:
            best = (search_sharing if shares else search_within)(problem, self._job.count, budget_s)[1]
        except PlanError as error:
            return replace(self._report(_asked(DataParallel(), self._job.devices)), basis=basis, refusal=str(error))
        assert best.predicted is not None
        return replace(self._report(best), step_s=best.predicted.step_s, basis=basis)

    def _report(self, plan: Plan) -> FitReport:
        """Return the memory of a plan, and the largest batch that fits it."""
        batch, contents = self._job.batch, self._job.contents(plan)
        peaks = {device: memory_peak(device, found) for device, found in contents.items()}
        return FitReport(
            plan=plan,
            batch=batch.size,
            devices=tuple(self._job.devices),
            segments=self._job.captures.segments(batch, max(part.size for part in plan.micro_batches(batch.size))),
            peaks=peaks,
            curves={device: memory_timeline(device, one) for device, one in contents.items()},
            largest=self._largest(plan, {device: peak.size_bytes for device, peak in peaks.items()}),
        )

    def _largest(self, plan: Plan, known: Mapping[int, int]) -> LargestFit:
        """Find the largest batch that fits."""
        batch = self._job.batch
        most = _MOST_SAMPLES if plan.micro_batch is None else max(batch.size, plan.micro_batch * _MOST_MICRO_BATCHES)

        def excess(size: int) -> float:
            try:
                job = replace(self._job, batch=_resized(batch, size))
                peaks = known if size == batch.size else job.peaks(plan)
            except CaptureError:  # such as batch norm with one sample
                return math.inf
            return max(peak - self._budgets[device] for device, peak in peaks.items())

        return find_largest(excess, batch.size, most)

    def _with_ways(self, found: FitReport, rates: DeviceRates | None, budget_s: float) -> FitReport:
        """Search for plans that fit."""
        asked = None if found.plan.micro_batch is None else [found.plan.micro_batch]
        problem, basis = self._problem(allowed_sizes(found.batch, asked), rates)
        prediction, _ = predict(problem, found.plan)
        ways: list[FitAlternative] = []
        refusal = ""
        try:
            result, best = search_within(problem, self._job.count, budget_s)
        except PlanError as error:
            refusal = str(error)
        else:
            ways = [self._way(one.label, one.plan) for one in result.candidates[1:]]
            ways = [one for one in ways if _sort(one.plan) != _sort(best)]
            ways.insert(0, self._way("the best found", best))
        return replace(
            found,
            step_s=prediction.step_s,
            ways=tuple(sorted(ways, key=lambda way: (not way.fits, way.step_s))),
            basis=basis,
            refusal=refusal,
        )

    def _problem(self, sizes: Sequence[int], rates: DeviceRates | None) -> tuple[Problem, str]:
        """Return the planner's problem, and a description of the source of its times."""
        job = self._job
        measured = measured_sizes(job.batch.size, sizes)
        profile, basis = estimate_profile(job.captures, job.batch, measured, job.optimizer, job.devices, rates)
        problem = make_problem(
            profile,
            job.devices,
            estimate_links(job.devices),
            batch=job.batch.size,
            micro_batches=sizes,
            schedules=SCHEDULES,
            updates=("device", "host"),
        )
        return problem, basis

    def _way(self, label: str, plan: Plan) -> FitAlternative:
        """Return a plan of a search with its exact memory."""
        assert plan.predicted is not None
        peaks = self._job.peaks(plan)
        return FitAlternative(
            label=label,
            plan=with_peaks(plan, peaks),
            peak_bytes=peaks,
            step_s=plan.predicted.step_s,
            refused=_shortfall(peaks, self._budgets),
        )


def _sort(plan: Plan) -> tuple[object, ...]:
    """Return the key by which two plans count as the same for a reader."""
    return plan.stages, plan.micro_batch, plan.schedule, plan.update


def _resized(batch: Batch, size: int) -> Batch:
    """Return a batch of another size, of which only shapes and types are meaningful."""
    leaves = tuple(leaf[:1].expand(size, *leaf.shape[1:]) for leaf in batch.leaves)
    return Batch(leaves=leaves, structure=batch.structure, size=size)


def _shortfall(peaks: Mapping[int, int], budgets: Mapping[int, int]) -> str:
    """Return a description of the devices that lack memory, and how much; empty if none does."""
    over = {device: peak - budgets[device] for device, peak in sorted(peaks.items()) if peak > budgets[device]}
    return "; ".join(f"device {device} lacks {enough_text(size)}" for device, size in over.items())
