"""The summary of a finished run: the files in its folder, and the printed lines."""

from __future__ import annotations

import dataclasses
from typing import Any

from onebox.cli.console import OutputConsole
from onebox.cli.training.training_loop import TrainingLoop, decision_data, recovery_data
from onebox.engine.memory.timeline import MemoryTimeline
from onebox.errors import MissingExtra
from onebox.extras import import_extra
from onebox.plan import Simulation, as_data
from onebox.plan.replan.profile_correction import ProfileCorrection
from onebox.pool import DeviceInfo, Pool
from onebox.pool.discovery import LOCAL_HOST
from onebox.report import (
    IslandsComparison,
    PlanComparison,
    compare,
    compare_islands,
    comparison_tables,
    islands_table,
    timeline_of,
    typical_step,
)
from onebox.report.figures.memory_figure import draw_memory, measured_rows
from onebox.report.figures.step_figure import draw_measured
from onebox.report.run.metrics import VERSION
from onebox.report.tables.memory import compare_memory

_CONTENTS = {
    "config.json": "the settings; onebox train --resume reads them",
    "status.json": "its pool, its plan and how it ended; onebox watch shows it",
    "plan.json": "the plan; onebox train --plan runs it again",
    "metrics.jsonl": "the loss of every step, the results of every epoch",
    "checkpoint": "the newest checkpoints",
    "timeline.json": "what each device and link did in the last steps; ui.perfetto.dev shows it",
    "schedule.png": "a step of the plan as it was measured",
    "memory.png": "the memory of each device over a step, predicted and measured",
    "summary.json": "the result, its rate, peak memory, the plan",
}


def write_outcome(
    loop: TrainingLoop, pool: Pool, *, expected: Simulation | None = None
) -> PlanComparison | IslandsComparison | None:
    """Write the timeline and the summary of a run and, if it has a plan, the figure of a step.

    Args:
        loop: The loop, which has ended.
        pool: The pool, still open.
        expected: The simulated step of its plan, if any.

    Returns:
        The comparison of the plan, or of the islands, with measurements; ``None`` without a plan, or without a whole
            step.

    Raises:
        OneboxError: A worker failed.
        OSError: A file cannot be written.
    """
    if not loop.samples and loop.folder.summary.exists():
        return None  # the run had ended before
    several = len({device.host for device in pool.devices}) > 1
    names = {device.number: f"worker {device.number} ({_kind(device, host=several)})" for device in pool.devices}
    timeline_of(loop.trainer.events(), names, loop.trainer.link_events()).write(loop.folder.timeline)
    found = _compare(loop)
    loop.folder.write_summary(_summary(loop, pool, found))
    if isinstance(found, PlanComparison) and _no_figures() is None:
        _draw(loop, pool, expected)
    return found


def print_outcome(
    loop: TrainingLoop, console: OutputConsole, found: PlanComparison | IslandsComparison | None = None
) -> None:
    """Print the accuracy of the plan, the quality of the model, and the paths of the files."""
    if found is not None:
        _print_comparison(found, loop, console)
    corrected = loop.trainer.profile_correction
    if corrected is not None and corrected.line:
        console.write_line(f"from step {corrected.first} on, {corrected.line}")
    last = loop.standing.last
    lines = []
    if not loop.computes:
        lines.append("sim devices compute nothing: times and memory are of use; there is no result, no checkpoint")
    elif last is not None and last.test_accuracy is not None:
        lines.append(f"test accuracy {100 * last.test_accuracy:.1f} % after epoch {last.epoch}")
    if loop.account.seconds:
        lines.append(f"{loop.account.seconds:.1f} s: {loop.account.text}")
    lines += _delays(loop) + _recoveries(loop) + _island_changes(loop) + _decisions(loop)
    if isinstance(found, PlanComparison) and (reason := _no_figures()):
        lines.append(f"no figures: {reason}")
    lines.append(f"run folder {loop.folder.path}")
    width = max(map(len, _CONTENTS))
    for name, what in _CONTENTS.items():
        if (loop.folder.path / name).exists():
            lines.append(f"  {name:<{width}}  {what}")
    for line in lines:
        console.write_line(line)


def _delays(loop: TrainingLoop) -> list[str]:
    """Describe the delays of gradients, as measured by the workers."""
    trainer = loop.trainer
    if trainer.stale is None:
        return []
    exact = min(trainer.stale.warm_up or 0, trainer.steps_done)
    if not trainer.delays:
        return [f"no gradient was late: all {exact} steps were exact; --warm-up says how many are"]
    said = [
        f"{late} step{'s' * (late != 1)} late {'once' if times == 1 else f'{times} times'}"
        for late, times in trainer.delays.items()
    ]
    return [f"gradients were {', '.join(said)}; {exact} step{'s were' if exact != 1 else ' was'} exact"]


def _recoveries(loop: TrainingLoop) -> list[str]:
    """Describe losses of workers and their costs."""
    stories = loop.trainer.recoveries
    if not stories:
        return []
    redone, seconds = sum(story.redone for story in stories), sum(story.seconds for story in stories)
    times = "once" if len(stories) == 1 else f"{len(stories)} times"
    gone = sorted(loop.trainer.pool.gone)
    left = f"; without device {', '.join(map(str, gone))} since" if gone else ""
    return [f"recovered {times}: {redone} steps done again, {seconds:.1f} s{left}"]


def _island_changes(loop: TrainingLoop) -> list[str]:
    """Describe the islands that left and joined."""
    kinds = [change.kind for change in loop.trainer.island_changes]
    if not kinds:
        return []
    left, joined = kinds.count("left"), kinds.count("joined")
    return [f"islands left {left} time{'s' * (left != 1)} and joined again {joined} time{'s' * (joined != 1)}"]


def _decisions(loop: TrainingLoop) -> list[str]:
    """Describe the number of adaptations of the plan to devices and links."""
    made = [each for each in loop.trainer.decisions if not each.refused]
    if not made:
        return []
    back = sum(each.decision.kind == "back" for each in made)
    moved = sum(each.moved_bytes for each in made)
    taken = f", {back} of them taken back" if back else ""
    times = "once" if len(made) == 1 else f"{len(made)} times"
    return [f"the plan changed {times}{taken}, {moved / 1e6:.1f} MB moved from device to device"]


def correction_data(found: ProfileCorrection) -> dict[str, object]:
    """Return the comparison of the first steps with their prediction as plain data, with its description."""
    return {
        "first": found.first,
        "steps": found.steps,
        "planned_s": found.planned.step_s,
        "measured_s": found.measured_s,
        "spread": found.spread,
        "noisy": found.noisy,
        "devices": {str(number): factor for number, factor in found.devices.items()},
        "rest": found.rest,
        "load": {} if found.factors is None else found.factors.load,
        "text": found.line,
    }


def _kind(device: DeviceInfo, *, host: bool) -> str:
    where = f"{device.device} on {device.host}" if host or device.host != LOCAL_HOST else device.device
    return f"{where}, emulated" if device.emulated else where


def _compare(loop: TrainingLoop) -> PlanComparison | IslandsComparison | None:
    """Compare a run with its plan, or with those of its islands, by its whole steps."""
    trainer, size, steps = loop.trainer, loop.full_batch, set(loop.full_steps)
    if not loop.planned or trainer.plan is None or not steps:
        return None
    exact, events = trainer.predicted_memory(*loop.data.example(size)), trainer.events()
    if not trainer.island_plans:
        return compare(trainer.plan, events, batch=size, steps=steps, exact=exact)
    prediction, outer = trainer.predicted_islands(), loop.config.outer
    if prediction is None or outer is None:
        return None
    islands = []
    for plan in trainer.island_plans:
        own = [event for event in events if event.worker in plan.devices]
        batch = plan.predicted.batch if plan.predicted is not None else size
        islands.append(compare(plan, own, batch=batch, steps=steps, exact=exact))
    sums_s = trainer.island_sums_s
    return compare_islands(prediction, islands, events, sums_s, every=outer.every, steps=steps)


def _no_figures() -> str | None:
    """Return the reason for which no figures can be drawn; ``None`` where they can."""
    try:
        import_extra("matplotlib", "the figure of a step")
    except MissingExtra as error:
        return str(error)
    return None


def _draw(loop: TrainingLoop, pool: Pool, expected: Simulation | None) -> None:
    events, plan = loop.trainer.events(), loop.trainer.plan
    step = typical_step(events, set(loop.full_steps))
    if step is None or plan is None:
        return
    draw_measured(
        events,
        loop.folder.schedule,
        step,
        title=plan.describe(),
        emulated=[device.number for device in pool.devices if device.emulated],
        simulation=expected,
    )
    curves, step = _curves(loop), max(loop.full_steps)
    if not compare_memory(curves, events, step):
        return
    budgets: dict[int, int | None] = {device.number: device.memory_bytes for device in pool.devices}
    draw_memory(
        measured_rows(curves, events, step, budgets),
        loop.folder.memory,
        title=plan.describe(),
        emulated=[device.number for device in pool.devices if device.emulated],
    )


def _curves(loop: TrainingLoop) -> dict[int, MemoryTimeline]:
    """Return the predicted memory of each device over a whole step."""
    return loop.trainer.predicted_curves(*loop.data.example(loop.full_batch))


def _memory(loop: TrainingLoop) -> list[dict[str, Any]]:
    """Return the differences of the last whole step's memory from the prediction."""
    step = max(loop.full_steps)
    return [one.to_data() for one in compare_memory(_curves(loop), loop.trainer.events(), step)]


def _print_comparison(found: PlanComparison | IslandsComparison, loop: TrainingLoop, console: OutputConsole) -> None:
    emulated = any(device.emulated for device in loop.trainer.pool.devices)
    note = ", on emulated devices" if emulated else ""
    console.print(f"predicted and measured, medians of {found.steps} steps{note}", highlight=False)
    if isinstance(found, IslandsComparison):
        parts = {f"island {number}": comparison_tables(own) for number, own in enumerate(found.islands)}
        parts["all islands"] = [islands_table(found)]
    else:
        parts = {"": comparison_tables(found)}
    console.widen([table for tables in parts.values() for table in tables])
    for title, tables in parts.items():
        if title:
            console.write_line(title)
        for table in tables:
            console.print(table)
    if found.step_s.predicted is None:
        text = f"the plan predicts nothing for batches of {found.batch}; onebox plan --check {loop.folder.plan} does"
        console.write_line(text)


def _summary(loop: TrainingLoop, pool: Pool, found: PlanComparison | IslandsComparison | None) -> dict[str, object]:
    last, account, plan = loop.standing.last, loop.account, loop.trainer.plan
    memory = dict(zip(pool.present, loop.trainer.memory(), strict=True))
    return {
        "version": VERSION,
        "model": loop.config.model,
        "data": loop.config.data,
        "epochs": loop.config.epochs,
        "steps": loop.trainer.steps_done,
        "train_loss": last and last.train_loss,
        "test_loss": last and last.test_loss,
        "test_accuracy": last and last.test_accuracy,
        "seconds": account.seconds,
        "samples_per_s": account.rate(loop.samples),
        "account": account.shares,
        "devices": [
            {
                **dataclasses.asdict(device),
                "peak_bytes": memory[device.number].peak_bytes if device.number in memory else None,
            }
            for device in pool.devices
        ],
        "plan": plan and {"text": plan.describe(), **as_data(plan)},
        "profile_correction": (corrected := loop.trainer.profile_correction) and correction_data(corrected),
        "comparison": found and {**found.to_data(), "memory": _memory(loop)},
        "delays": {str(late): times for late, times in loop.trainer.delays.items()},
        "recoveries": [recovery_data(story) for story in loop.trainer.recoveries],
        "decisions": [decision_data(made) for made in loop.trainer.decisions],
        "checkpoint": loop.saved and str(loop.saved.relative_to(loop.folder.path)),
    }
