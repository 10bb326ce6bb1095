"""A figure of a step's memory: for each device its curve over time, its budget, and its peak.

The prediction is an area, the measurement a line on top of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from onebox.errors import UsageError
from onebox.plan import Simulation
from onebox.report.figures.canvas import COLOURS, FONT, MEANINGS, canvas, check_suffix, legend, matplotlib, save
from onebox.report.tables.memory import bytes_text, measured_instructions

if TYPE_CHECKING:  # importing the engine takes a second, and figures of simulations do not need it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from onebox.engine import TraceEvent
    from onebox.engine.memory.timeline import MemoryTimeline

_ROW_IN = 2.1
_STRIP = 0.05
"""Height of the strip that shows the computations, as a fraction of the axes."""
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


class Moment(NamedTuple):
    """One instruction of a device.

    Args:
        start_s: Its beginning, in seconds from the beginning of the step.
        end_s: Its end, not later than the beginning of the next.
        kind: The kind of action that it computes; empty if it computes none.
        predicted_peak: Predicted peak of bytes during it.
        predicted_used: Predicted bytes in use after it.
        peak: Measured peak of bytes during it; ``None`` where it was not measured.
        used: Measured bytes in use after it; likewise.
    """

    start_s: float
    end_s: float
    kind: str
    predicted_peak: int
    predicted_used: int
    peak: int | None = None
    used: int | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """The memory of one device over a step.

    Args:
        device: Its number.
        start_bytes: Bytes in use at the beginning of the step.
        moments: Its instructions, in order.
        peak_name: The action at the peak.
        budget_bytes: Its limit; ``None`` for none.
    """

    device: int
    start_bytes: int
    moments: tuple[Moment, ...]
    peak_name: str
    budget_bytes: int | None


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
    figure, axes = canvas(1.0 + _ROW_IN * len(rows), len(rows))
    for place, row in zip(axes, rows, strict=True):
        _draw_row(place, row, row.device in emulated)
    _draw_legend(figure, rows)
    save(figure, path, title)


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


def _draw_row(axes: Axes, row: MemoryRow, emulated: bool) -> None:
    highest = max(max(one.predicted_peak, one.peak or 0) for one in row.moments)
    near = row.budget_bytes is not None and row.budget_bytes <= 3 * highest  # a distant budget would flatten the curve
    top = max(highest, row.budget_bytes if near and row.budget_bytes else 0)
    unit, name = next((unit, name) for unit, name in _UNITS if top >= unit or unit == 1)
    predicted = [(one.start_s, one.end_s, one.predicted_peak, one.predicted_used) for one in row.moments]
    times, heights = _corners(predicted, row.start_bytes, unit)
    axes.fill_between(times, heights, color="#c9d6e6", lw=0, zorder=1)
    axes.plot(times, heights, color="#7d97b8", lw=0.8, zorder=2)
    measured = [(o.start_s, o.end_s, o.peak, o.used) for o in row.moments if o.peak is not None and o.used is not None]
    if measured:
        first = measured[0][3] if row.start_bytes > measured[0][2] else row.start_bytes
        axes.plot(*_corners(measured, first, unit), color="#1f3a5f", lw=1.0, ls=(0, (3, 1.5)), zorder=3)
    if near and row.budget_bytes is not None:
        axes.axhline(row.budget_bytes / unit, color="#c2464a", lw=1.0, zorder=4)
    axes.set_ylim(0, top / unit * 1.18)
    _draw_strip(axes, row, top / unit * 1.18 * _STRIP)
    peak = max(row.moments, key=lambda one: one.predicted_peak)
    middle = (peak.start_s + peak.end_s) / 2 * 1e3
    axes.plot([middle], [peak.predicted_peak / unit], "v", color="#1d2026", ms=4, zorder=5)
    budget = "" if row.budget_bytes is None else f", budget {bytes_text(row.budget_bytes)}"
    mark = ", emulated" if emulated else ""
    text = f"device {row.device}{mark}: peak {bytes_text(peak.predicted_peak)} in {row.peak_name}{budget}"
    axes.set_title(text, fontsize=FONT + 1.5, loc="left")
    axes.set_ylabel(name, fontsize=FONT + 0.5)
    axes.tick_params(labelsize=FONT + 0.5, labelbottom=True)
    axes.grid(axis="y", color="#d9dce1", lw=0.5, zorder=0)
    axes.set_axisbelow(True)
    axes.margins(x=0.005)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _corners(
    moments: Iterable[tuple[float, float, int, int]], start_bytes: int, unit: int
) -> tuple[list[float], list[float]]:
    """Return times in milliseconds and memory: up to an instruction's peak at its beginning, down at its end."""
    times, heights, level = [0.0], [start_bytes / unit], start_bytes
    for start, end, peak, used in moments:
        times += [start * 1e3, start * 1e3, end * 1e3, end * 1e3]
        heights += [level / unit, peak / unit, peak / unit, used / unit]
        level = used
    return times, heights


def _draw_strip(axes: Axes, row: MemoryRow, height: float) -> None:
    """Draw the strip of computations, in the colours of the figure of the schedule."""
    for one in row.moments:
        if one.kind and one.end_s > one.start_s:
            span = [(one.start_s * 1e3, (one.end_s - one.start_s) * 1e3)]
            axes.broken_barh(span, (0, height), facecolors=COLOURS[one.kind], lw=0, zorder=6)


def _draw_legend(figure: Figure, rows: Sequence[MemoryRow]) -> None:
    patch, line = matplotlib("patches").Patch, matplotlib("lines").Line2D
    handles = [patch(facecolor="#c9d6e6", edgecolor="#7d97b8", label="predicted")]
    if any(one.peak is not None for row in rows for one in row.moments):
        handles.append(line([], [], color="#1f3a5f", lw=1.0, ls=(0, (3, 1.5)), label="measured"))
    if any(row.budget_bytes is not None for row in rows):
        handles.append(line([], [], color="#c2464a", lw=1.0, label="budget"))
    handles.append(line([], [], color="#1d2026", marker="v", ms=4, lw=0, label="peak"))
    there = {one.kind for row in rows for one in row.moments}
    handles += [patch(facecolor=COLOURS[kind], label=text) for kind, text in MEANINGS.items() if kind in there]
    legend(figure, handles, 1.6)
