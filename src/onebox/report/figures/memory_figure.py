"""The memory of a step, predicted and measured, as the rows of a figure; and the figure's file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onebox.drawing import MemoryRow, Moment, check_suffix, memory_figure, save
from onebox.errors import UsageError
from onebox.plan import Simulation
from onebox.report.tables.memory import measured_instructions

if TYPE_CHECKING:  # importing the engine takes a second, and figures of simulations do not need it
    from onebox.engine import TraceEvent
    from onebox.engine.memory.timeline import MemoryTimeline


def predicted_rows(
    curves: Mapping[int, MemoryTimeline], simulation: Simulation, budgets: Mapping[int, int | None]
) -> tuple[MemoryRow, ...]:
    """Return the predicted memory of devices over the simulated step.

    Instructions of an action share its time; the others take none, except the optimizer, which takes the rest of the
    step.

    Args:
        curves: The curve of each device.
        simulation: The step, with its details.
        budgets: The memory of each device; ``None`` for one without limit.
    """
    rows = []
    for device, curve in sorted(curves.items()):
        spans = {one.action: (one.start_s, one.end_s) for one in simulation.spans if one.device == device}
        shares: dict[object, list[int]] = {}
        for number, use in enumerate(curve.uses):
            if use.action is not None:
                shares.setdefault(use.action, []).append(number)
        now, moments = 0.0, []
        for number, use in enumerate(curve.uses):
            end = now
            if use.action in spans and use.action is not None:
                start, stop = spans[use.action]
                own = shares[use.action]
                part = (stop - start) / len(own)
                now = max(now, start + own.index(number) * part)
                end = max(now, start + (own.index(number) + 1) * part)
            elif use.name == "optimizer":
                end = max(now, simulation.step_s)
            moments.append(Moment(now, end, _kind(use.name, use.action), use.peak_bytes, use.used_bytes))
            now = end
        rows.append(_row(curve, moments, budgets))
    return tuple(rows)


def measured_rows(
    curves: Mapping[int, MemoryTimeline], events: Iterable[TraceEvent], step: int, budgets: Mapping[int, int | None]
) -> tuple[MemoryRow, ...]:
    """Return the measured memory of devices over a step, beside the prediction for the same instructions.

    Args:
        curves: The predicted curve of each device for such a step.
        events: From :meth:`~onebox.engine.Trainer.events`.
        step: The step.
        budgets: The memory of each device; ``None`` for one without limit.

    Raises:
        UsageError: There are no events of the step, or it had another plan or batch.
    """
    own = [event for event in events if event.step == step]
    seen = {device: measured_instructions(curve, own) for device, curve in sorted(curves.items())}
    if not any(seen.values()):
        raise UsageError(
            f"there are no events of step {step} by that plan; a trainer with trace=True has those of the last steps"
        )
    begin = min(event.start_ns for event in own)
    rows = []
    for device, found in seen.items():
        if not found:
            continue
        curve = curves[device]
        starts = [(event.start_ns - begin) * 1e-9 for event in found]
        ends = [(event.end_ns - begin) * 1e-9 for event in found]
        moments = [
            Moment(
                start,
                min(end, later),
                _kind(use.name, use.action),
                use.peak_bytes,
                use.used_bytes,
                event.peak_bytes,
                event.used_bytes,
            )
            for start, end, later, use, event in zip(
                starts, ends, [*starts[1:], ends[-1]], curve.uses, found, strict=True
            )
        ]
        rows.append(_row(curve, moments, budgets))
    return tuple(rows)


def draw_memory(
    rows: Sequence[MemoryRow], path: Path | str, *, title: str = "", emulated: Collection[int] = ()
) -> None:
    """Draw the memory of devices below each other, on one scale of time.

    Args:
        rows: The devices' memory, at least one.
        path: The file, a ``.png``, ``.svg`` or ``.pdf``; one that exists is replaced.
        title: Title above the figure, such as the plan in a line.
        emulated: Numbers of emulated devices, which are marked.

    Raises:
        UsageError: The suffix is another one, or the file cannot be written.
    """
    check_suffix(path)
    save(memory_figure(rows, title=title, emulated=emulated), path)


def _row(curve: MemoryTimeline, moments: Sequence[Moment], budgets: Mapping[int, int | None]) -> MemoryRow:
    return MemoryRow(
        device=curve.device,
        start_bytes=curve.start_bytes,
        moments=tuple(moments),
        peak_name=curve.peak.name,
        budget_bytes=budgets.get(curve.device),
    )


def _kind(name: str, action: object) -> str:
    return str(getattr(action, "kind", "")) or ("optimizer" if name == "optimizer" else "")
