"""``onebox plan``: the best plan for a model and a pool, its predicted cost, and the alternatives."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Collection, Mapping
from typing import Any

from onebox.cli.commands.devices import print_devices
from onebox.cli.console import OutputConsole
from onebox.cli.memory_report import MemoryReport, make_memory_report, memory_data, print_memory
from onebox.cli.options.common import PoolOptions
from onebox.cli.options.jobs import IslandsConfig, JobConfig, PlanConfig, StalenessConfig
from onebox.cli.output_files import check_figure, check_target, give_json
from onebox.cli.planning import INTERRUPTED, PlanForecast, predict_plan, probe_modes, search_plan, write_plan
from onebox.cli.training.run_setup import load_data
from onebox.cli.user_code import import_functions
from onebox.cost import link_age_line
from onebox.engine.planning.partial_profile import profile_line
from onebox.engine.planning.training_modes import IslandsPlanning
from onebox.engine.workload.delay_compensation import extra_copies, predicts
from onebox.errors import UsageError
from onebox.plan import Plan, as_data, draw_timeline, in_flight_of, stage_work, steady_window
from onebox.plan.evaluate.modes import TrainingMode
from onebox.pool import Pool, open_pool
from onebox.report import candidate_table, mode_table, plan_device_table, stage_table, summary_line
from onebox.report.figures.memory_figure import draw_memory
from onebox.report.figures.step_figure import draw_simulation
from onebox.report.tables.plan import noise_line, rejection_reason
from onebox.report.tables.topology import topology_line
from onebox.trainer_options import Outer

_PICTURE_WIDTH = 100


def show_plan(config: PlanConfig) -> None:
    """Open a pool, measure, search or check, and show the result.

    Raises:
        UsageError: An option does not fit, a file cannot be read or written, or the plan to be checked cannot be run.
        PlanError: Nothing fits the memory.
        OneboxError: The pool cannot be opened, the model not captured, or a worker failed.
    """
    given = Plan.read(config.check) if config.check is not None else None
    _check_targets(config)
    import_functions(config)
    data = load_data(config.resolved())
    console = OutputConsole(highlight=False, quiet=config.json)
    with open_pool(config.pool, threads=config.threads, memory=config.memory, plain_links=config.plain_links) as pool:
        print_devices(pool, console)
        if given is not None:
            found = predict_plan(config.resolved(), data, pool, given, preparing=config.preparing, fresh=config.fresh)
        else:
            found = search_plan(
                config.resolved(),
                data,
                pool,
                micro_batches=config.micro_batch_sizes,
                schedules=config.schedule_names,
                policies=config.policy_names,
                update=config.updates,
                split_layers=not config.whole_layers,
                preparing=config.preparing,
                budget_s=config.budget,
                fresh=config.fresh,
                islands=config.island_devices,
                outer=config.outer,
            )
            if found.interrupted:
                console.write_line(INTERRUPTED)
            if config.probe is not None:
                found = probe_modes(config.resolved(), data, pool, found, console.write_line)
        print_plan(found, pool, console)
        seen = make_memory_report(config.resolved(), found, data, pool) if config.show_memory else None
        if seen is not None:
            print_memory(seen, console)
        _write_files(config, found, seen, pool, console)
    if found.shortfall:
        raise UsageError(
            f"the plan does not fit: {found.shortfall}; smaller micro-batches, more stages, and stages that are "
            f"recomputed, offloaded or swapped need less: onebox memory --plan {config.check} finds such plans"
        )


def print_plan(found: PlanForecast, pool: Pool, console: OutputConsole) -> None:
    """Print a plan: stages, devices, schedule, alternatives."""
    names = [segment.name for segment in found.problem.segments]
    emulated = {device.number for device in pool.devices if device.emulated}
    room = {device.number: device.capacity_bytes for device in found.problem.devices}
    tables = [
        stage_table(found.plan, names, emulated),
        plan_device_table(found.plan, found.simulation, room, emulated),
        *([candidate_table(found.candidates)] if found.candidates else []),
        *([mode_table(found.modes)] if found.modes else []),
    ]
    console.widen(tables)
    console.write_line(f"\n{found.plan.describe()}")
    console.write_line(
        summary_line(found.plan) + (", with emulated devices" if emulated & set(found.plan.devices) else "")
    )
    if found.candidates and (line := noise_line(found.candidates)):
        console.write_line(line)
    if found.measured < 1:
        console.write_line(profile_line(found.measured))
    if found.plan.late:
        console.write_line(staleness_line(found))
    if line := topology_line(found.problem, found.plan):
        console.write_line(line)
    if pool.profiled is not None and (line := link_age_line(pool.profiled, time.time())):
        console.write_line(line)
    for table in tables[:2]:
        console.print(table)
    console.write_line("schedule: stage, F forward, B backward or I and W its halves, micro-batch; one row a device")
    console.write_line(draw_timeline(found.simulation, _PICTURE_WIDTH))
    if found.candidates:
        console.write_line("\nwhat it was compared with, all predicted")
        console.print(tables[2])
    if found.modes:
        console.write_line("\nexact, compressed and island training, all predicted; bytes of a step, both ways")
        console.print(tables[-1])


def staleness_line(found: PlanForecast) -> str:
    """Describe an asynchronous plan: delays of gradients, weight versions, and micro-batches in flight."""
    plan, problem = found.plan, found.problem
    edges = [(edge.source, edge.target) for edge in stage_work(problem, plan).edges]
    counts = in_flight_of(steady_window(plan.routes(problem.batch), edges, plan.in_flight), len(plan.stages))
    versions = 2 + predicts(found.delays)
    last = ", and what updates were last," if 1 + extra_copies(found.delays) >= versions else ""
    return (
        f"gradients are applied 1 step late; {versions} versions of the weights{last} on each device; micro-batches in "
        f"flight, stage by stage: {', '.join(map(str, counts))}; the step is one among many"
    )


def as_json(found: PlanForecast, pool: Pool, seen: MemoryReport | None = None) -> dict[str, Any]:
    """Return a plan with all its details as JSON values."""
    assert found.plan.predicted is not None
    return {
        **({"memory": memory_data(seen)} if seen is not None else {}),
        "plan": as_data(found.plan),
        "text": found.plan.describe(),
        "samples_per_s": found.plan.predicted.batch / found.plan.predicted.step_s,
        "devices": [
            {
                **dataclasses.asdict(device),
                "peak_bytes": found.peak_bytes.get(device.number, 0),
                "busy_s": found.simulation.busy_s.get(device.number, 0.0),
            }
            for device in pool.devices
        ],
        "candidates": [
            {
                "label": one.label,
                "text": one.plan.describe(),
                "step_s": one.step_s,
                "rejection_reason": rejection_reason(one),
                "plan": as_data(one.plan),
            }
            for one in found.candidates
        ],
        **({"modes": list(map(mode_data, found.modes))} if found.modes else {}),
        **({"islands": islands_data(found.islands)} if found.islands is not None else {}),
    }


def mode_data(mode: TrainingMode) -> dict[str, Any]:
    """Return a way to train as JSON values."""
    return {
        "name": mode.name,
        "text": mode.text,
        "step_s": mode.step_s if mode.batch else None,
        "sample_s": mode.sample_s,
        "traffic": [
            {"from": mode.groups[source], "to": mode.groups[target], "bytes": round(size_bytes)}
            for (source, target), size_bytes in sorted(mode.traffic.items())
        ],
        "peak_bytes": {str(device): peak for device, peak in sorted(mode.peak_bytes.items())},
        "accuracy": mode.accuracy,
        "probed_loss": mode.loss,
    }


def islands_data(found: IslandsPlanning) -> dict[str, Any]:
    """Return the plans of islands as JSON values."""
    return {
        "devices": found.islands,
        "shares": found.outer.shares,
        "plans": [as_data(plan) for plan in found.plans],
        "islands_s": found.predicted.islands_s,
        "sums_s": found.predicted.sums_s,
    }


def command_line(
    config: JobConfig,
    more: Mapping[str, object],
    *,
    late: bool = False,
    lossy: Collection[str] = (),
    islands: IslandsConfig | None = None,
) -> str:
    """Return the command that trains with a plan: the options that are not defaults, and additional flags.

    Args:
        config: The options.
        more: Additional options, by their flags.
        late: Whether gradients are a step late.
        lossy: Parts of the traffic that are compressed with a loss.
        islands: Options of islands, if they train.
    """
    words = ["onebox", "train", *(["--staleness", "1"] if late else [])]
    words += ["--lossy", ",".join(lossy)] if lossy else []
    if islands is not None:
        words += ["--islands", islands.islands or ""]
        for field in dataclasses.fields(Outer):
            value = getattr(islands, f"outer_{field.name}")
            if value != field.default:
                words += [f"--outer-{field.name}", str(value)]
    if late and isinstance(config, StalenessConfig) and config.correction != "auto":
        words += ["--correction", config.correction]
    pool = {field.name for field in dataclasses.fields(PoolOptions)}
    for field in sorted(dataclasses.fields(JobConfig), key=lambda field: field.name in pool):
        value = getattr(config, field.name)
        if value != field.default:
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    for flag, value in more.items():
        words += [flag, str(value)]
    return shlex.join(words)


def _check_targets(config: PlanConfig) -> None:
    """Require that output files can be written, before time is spent on their contents."""
    for flag, path in (("--out", config.out), ("--report", config.report)):
        check_target(flag, path)
    check_figure(config.figure)


def _write_files(
    config: PlanConfig, found: PlanForecast, seen: MemoryReport | None, pool: Pool, console: OutputConsole
) -> None:
    if config.figure is not None:
        emulated = [device.number for device in pool.devices if device.emulated]
        draw_simulation(found.simulation, config.figure, emulated=emulated, title=found.plan.describe())
        console.write_line(f"figure {config.figure}")
        if seen is not None:
            path = config.figure.with_stem(f"{config.figure.stem}-memory")
            draw_memory(seen.rows, path, emulated=emulated, title=found.plan.describe())
            console.write_line(f"figure {path}")
    if config.json or config.report is not None:
        give_json(as_json(found, pool, seen), printed=config.json, path=config.report)
    file, late = config.out or config.check, found.plan.late
    if config.out is not None:
        write_plan(config.out, found.plan)
    lossy = dict.fromkeys((*config.lossy_parts, *found.plan.lossy))
    command = command_line(config, {"--plan": file or "auto"}, late=late, lossy=lossy)
    if file is None:
        console.write_line(f"keep it with --out plan.json, or run it at once: {command}")
    elif not found.shortfall:
        console.write_line(f"plan {file}; run it with: {command}")
    if found.islands is not None:
        console.write_line(f"the islands: {command_line(config, {'--plan': 'auto'}, islands=config)}")
