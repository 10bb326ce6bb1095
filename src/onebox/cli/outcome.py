"""What a finished run leaves in its folder, and what is said about it."""

from __future__ import annotations

import dataclasses

from onebox.cli.console import OutputConsole
from onebox.cli.loop import Loop
from onebox.plan import as_data
from onebox.pool import Pool
from onebox.report import Span, Timeline

_CONTENTS = {
    "config.json": "the settings; onebox train --resume reads them",
    "metrics.jsonl": "the loss of every step, the results of every epoch",
    "checkpoint": "the newest checkpoints",
    "timeline.json": "what each device did in the last steps; ui.perfetto.dev shows it",
    "summary.json": "the result, its rate, peak memory, the plan",
}


def write_outcome(loop: Loop, pool: Pool, *, seconds: float) -> None:
    """Write the timeline and the summary of a run.

    Args:
        loop: The loop, which has ended.
        pool: The pool, still open.
        seconds: How long this process trained, tested and saved.

    Raises:
        OneboxError: A worker failed meanwhile.
        OSError: A file cannot be written.
    """
    if not loop.meter.samples and loop.folder.summary.exists():
        return  # the run had ended before
    _timeline(loop, pool).write(loop.folder.timeline)
    loop.folder.write_summary(_summary(loop, pool, seconds))


def print_outcome(loop: Loop, console: OutputConsole) -> None:
    """Say how good the model is and where everything lies."""
    last = loop.standing.last
    lines = [] if last is None else [f"test accuracy {100 * last.test_accuracy:.1f} % after epoch {last.epoch}"]
    lines.append(f"run folder {loop.folder.path}")
    width = max(map(len, _CONTENTS))
    for name, what in _CONTENTS.items():
        if (loop.folder.path / name).exists():
            lines.append(f"  {name:<{width}}  {what}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _timeline(loop: Loop, pool: Pool) -> Timeline:
    timeline = Timeline()
    names = {device.number: f"worker {device.number} ({device.device})" for device in pool.devices}
    tracks: dict[tuple[int, str], list[Span]] = {}
    for event in loop.trainer.events():
        span = Span(
            name=event.name,
            category=event.track,
            start_ns=event.start_ns,
            end_ns=event.end_ns,
            args={"step": event.step + 1},
        )
        tracks.setdefault((event.worker, event.track), []).append(span)
    for (worker, track), spans in tracks.items():
        timeline.add(names[worker], track, spans)
    return timeline


def _summary(loop: Loop, pool: Pool, seconds: float) -> dict[str, object]:
    last, meter, plan = loop.standing.last, loop.meter, loop.trainer.plan
    memory = loop.trainer.memory()
    return {
        "model": loop.config.model,
        "data": loop.config.data,
        "epochs": loop.config.epochs,
        "steps": loop.trainer.steps_done,
        "train_loss": last and last.train_loss,
        "test_loss": last and last.test_loss,
        "test_accuracy": last and last.test_accuracy,
        "seconds": seconds,
        "samples_per_s": meter.samples / meter.seconds if meter.seconds else None,
        "devices": [
            {**dataclasses.asdict(device), "peak_bytes": used.peak_bytes}
            for device, used in zip(pool.devices, memory, strict=True)
        ],
        "plan": plan and {"text": plan.describe(), **as_data(plan)},
        "checkpoint": loop.saved and str(loop.saved.relative_to(loop.folder.path)),
    }
