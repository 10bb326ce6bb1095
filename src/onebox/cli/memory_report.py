"""The output of ``onebox plan --show-memory``: activation policies, and the memory of a step, predicted and
measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onebox.cli.console import OutputConsole
from onebox.cli.options.jobs import JobConfig
from onebox.cli.planning import PlanForecast, job_of
from onebox.drawing import MemoryRow
from onebox.engine import Trainer
from onebox.engine.memory.timeline import MemoryTimeline
from onebox.engine.planning.memory_fit import estimate_memory
from onebox.feed import Data
from onebox.plan import Plan, PolicyReason, explain_policies
from onebox.pool import Pool, raise_first
from onebox.report.figures.memory_figure import measured_rows, predicted_rows
from onebox.report.tables.memory import (
    MemoryComparison,
    activation_policy_table,
    compare_memory,
    curve_lines,
    peak_table,
)
from onebox.wire.protocol.instructions import Ask

_STEPS = 3
"""The first step begins without optimizer state, the second may be delayed by one-time work."""

_WIDTH = 60


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The memory report of a plan.

    Args:
        plan: The plan.
        names: All segments of the model, in their order.
        reasons: Activation policies of each stage.
        curves: The predicted memory of each device over a step.
        compared: Comparison with measurements; empty where the plan was not run, because it does not fit.
        rows: The same data for a figure.
        budgets: The memory of each device.
        emulated: Numbers of the emulated devices.
        allocated: Peak of each GPU's allocator in the measured step.
    """

    plan: Plan
    names: tuple[str, ...]
    reasons: tuple[PolicyReason, ...]
    curves: Mapping[int, MemoryTimeline]
    compared: tuple[MemoryComparison, ...]
    rows: tuple[MemoryRow, ...]
    budgets: Mapping[int, int | None]
    emulated: frozenset[int]
    allocated: Mapping[int, int]


def make_memory_report(config: JobConfig, found: PlanForecast, data: Data, pool: Pool) -> MemoryReport:
    """Predict the memory of a plan's step, and run some steps to measure it, if it fits.

    Args:
        config: The options, resolved.
        found: The plan.
        data: The data set.
        pool: The devices.

    Raises:
        OneboxError: A worker failed.
    """
    budgets: dict[int, int | None] = {device.number: device.memory_bytes for device in pool.devices}
    allocated: dict[int, int] = {}
    if found.shortfall:
        curves, compared, rows = _predicted(config, found, data, pool, budgets)
    else:
        model, loss, optimizer, *batch = job_of(config, data)
        with Trainer(
            model,
            loss,
            optimizer,
            pool=pool,
            plan=found.plan,
            precision=config.precision,
            loss_reduction="mean" if config.loss is None else None,
            lossy=tuple(found.plan.lossy),
            recovery=None,
        ) as trainer:
            for _ in range(_STEPS - 1):
                trainer.step(*batch)
            trainer.wait()
            _peaks_anew(pool)
            trainer.step(*batch)
            trainer.wait()
            peaks = {number: one.allocated_peak_bytes for number, one in enumerate(trainer.memory())}
            allocated = {number: peak for number, peak in peaks.items() if peak and number in found.plan.devices}
            curves = trainer.predicted_curves(*batch)
            events = trainer.events()
        compared = compare_memory(curves, events, _STEPS - 1)
        rows = measured_rows(curves, events, _STEPS - 1, budgets)
    return MemoryReport(
        plan=found.plan,
        names=tuple(segment.name for segment in found.problem.segments),
        reasons=explain_policies(found.problem, found.plan),
        curves=curves,
        compared=compared,
        rows=rows,
        budgets=budgets,
        emulated=frozenset(device.number for device in pool.devices if device.emulated),
        allocated=allocated,
    )


def _peaks_anew(pool: Pool) -> None:
    """Reset the peaks that workers count."""
    raise_first([pool.post(device.number, [Ask("peak")], answer=True) for device in pool.devices])


def _predicted(
    config: JobConfig, found: PlanForecast, data: Data, pool: Pool, budgets: Mapping[int, int | None]
) -> tuple[Mapping[int, MemoryTimeline], tuple[MemoryComparison, ...], tuple[MemoryRow, ...]]:
    """Return the predicted memory of a plan that does not fit."""
    job = job_of(config, data)
    curves = estimate_memory(*job, pool=pool, plan=found.plan, precision=config.precision, budget_s=0.1).curves
    return curves, (), predicted_rows(curves, found.simulation, budgets)


def print_memory(seen: MemoryReport, console: OutputConsole) -> None:
    """Print the activation policies and the memory of devices."""
    tables = [
        activation_policy_table(seen.reasons, seen.plan, seen.names, seen.emulated),
        peak_table(seen.curves, seen.budgets, seen.compared, seen.emulated, seen.allocated),
    ]
    console.widen(tables)
    console.write_line("\nwhat becomes of the activations of each stage until its backward")
    console.print(tables[0])
    measured = f"; measured in step {_STEPS} of {_STEPS}" if seen.compared else ""
    console.write_line(f"memory over a step, by instruction{measured}")
    console.print(tables[1])
    for line in curve_lines(seen.curves, seen.budgets, _WIDTH):
        console.write_line(line)


def memory_data(seen: MemoryReport) -> dict[str, Any]:
    """Return the whole report as JSON values."""
    return {
        "stages": [
            {**dataclasses.asdict(one), "segments": seen.plan.stages[one.stage].segments or seen.names}
            for one in seen.reasons
        ],
        "devices": [
            {
                "device": device,
                "budget_bytes": seen.budgets.get(device),
                "peak_bytes": curve.peak.peak_bytes,
                "peak_in": curve.peak.name,
                "allocated_peak_bytes": seen.allocated.get(device),
                "start_bytes": curve.start_bytes,
                "instructions": [
                    {"name": use.name, "peak_bytes": use.peak_bytes, "used_bytes": use.used_bytes} for use in curve.uses
                ],
            }
            for device, curve in sorted(seen.curves.items())
        ],
        "compared": [one.to_data() for one in seen.compared],
    }
