"""``onebox memory``: memory of a model on some devices, and changes that would make it fit; nothing is run."""

from __future__ import annotations

from pathlib import Path

from onebox.cli.console import OutputConsole
from onebox.cli.exit_status import FAILED, OK
from onebox.cli.options.estimates import MemoryConfig
from onebox.cli.output_files import check_target, give_json
from onebox.cli.planning import job_of, write_plan
from onebox.cli.run_setup import load_data
from onebox.cost.estimate import DeviceRates
from onebox.engine.planning.memory_fit import FitReport, estimate_memory
from onebox.report.tables.memory import curve_lines, peak_table, residents_table
from onebox.report.tables.memory_estimate import estimate_data, largest_line, verdict_line, ways_table

_WIDTH = 60
_OPERATOR_S = 5e-6


def show_memory_estimate(config: MemoryConfig) -> int:
    """Estimate the memory, and show the result.

    Returns:
        0 if it fits, 1 if it does not.

    Raises:
        UsageError: An option does not fit, or a file cannot be read or written.
        CaptureError: The model cannot be captured.
    """
    check_target("--out", config.out)
    check_target("--report", config.report)
    job = config.resolved()
    found = estimate_memory(
        *job_of(job, load_data(job)),
        memory=config.memory,
        pool=config.pool,
        threads=config.threads,
        plan=config.plan or config.data_parallel,
        precision=config.precision,
        clip_grad_norm=config.clip_grad_norm,
        rates=_rates(config),
    )
    console = OutputConsole(highlight=False, quiet=config.json)
    _print(found, config, console)
    if config.json or config.report is not None:
        give_json(estimate_data(found), printed=config.json, path=config.report)
    if config.out is not None:
        _write(config.out, found, console)
    return OK if found.fits else FAILED


def _rates(config: MemoryConfig) -> DeviceRates | None:
    if config.gflops is None or config.bandwidth is None:
        return None
    return DeviceRates(flops=config.gflops * 1e9, bandwidth_bps=config.bandwidth * 1e9, operator_s=_OPERATOR_S)


def _print(found: FitReport, config: MemoryConfig, console: OutputConsole) -> None:
    """Print the estimate: whether it fits, the peak and its contents, the largest batch, and possible remedies."""
    budgets: dict[int, int | None] = dict(found.budgets)
    emulated = [device.number for device in found.devices if device.emulated]
    worst = max(found.peaks.values(), key=lambda peak: peak.size_bytes / found.budgets[peak.device])
    tables = [peak_table(found.curves, budgets, emulated=emulated), residents_table(worst)]
    if found.ways:
        tables.append(ways_table(found.ways, found.step_s or 0.0))
    console.widen(tables)
    console.write_line(f"{config.model}, batch {found.batch}, {config.optimizer}: {found.plan.describe()}")
    console.write_line(verdict_line(found))
    console.print(tables[0])
    for line in curve_lines(found.curves, budgets, _WIDTH):
        console.write_line(line)
    during = f", {worst.operator}" if worst.operator else ""
    console.write_line(f"\nat the peak of device {worst.device}, in {worst.name}{during}")
    console.print(tables[1])
    console.write_line(largest_line(found))
    if found.ways:
        console.write_line(f"\nwhat would make it fit; times are {found.basis}")
        console.print(tables[2])
    if found.refusal:
        console.write_line(found.refusal)


def _write(path: Path, found: FitReport, console: OutputConsole) -> None:
    """Write the plan that fits, if there is one."""
    plans = [found.plan] if found.fits else [way.plan for way in found.ways if way.fits]
    if plans:
        write_plan(path, plans[0])
        console.write_line(f"plan {path}: {plans[0].describe()}")
