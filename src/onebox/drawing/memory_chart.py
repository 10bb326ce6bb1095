"""A figure of a step's memory: for each device its curve over time, its budget, and its peak.

The prediction is an area, the measurement a line on top of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from onebox.drawing.style import (
    COLOURS,
    LIMIT,
    MEANINGS,
    MEASURED,
    PREDICTED,
    TEXT,
    canvas,
    headline,
    legend,
    matplotlib,
    style,
    tint,
)
from onebox.sizes import bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW_IN = 1.5
_STRIP = 0.06
"""Height of the strip that shows the computations, as a fraction of the axes."""
_DASHES = (0, (3, 1.5))
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


def memory_figure(rows: Sequence[MemoryRow], *, title: str = "", emulated: Collection[int] = ()) -> Figure:
    """Return a figure of the memory of devices below each other, on one scale of time.

    Args:
        rows: The devices' memory, at least one.
        title: Title above the figure, such as the plan in a line.
        emulated: Numbers of emulated devices, which are marked.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    with style():
        figure, axes = canvas(0.9 + _ROW_IN * len(rows), len(rows))
        for place, row in zip(axes, rows, strict=True):
            _draw_row(place, row, row.device in emulated)
        axes[-1].set_xlabel("time in ms")
        _draw_legend(figure, rows)
        headline(figure, title)
    return figure


def _draw_row(axes: Axes, row: MemoryRow, emulated: bool) -> None:
    highest = max(max(one.predicted_peak, one.peak or 0) for one in row.moments)
    near = row.budget_bytes is not None and row.budget_bytes <= 3 * highest  # a distant budget would flatten the curve
    top = max(highest, row.budget_bytes if near and row.budget_bytes else 0)
    unit, name = next((unit, name) for unit, name in _UNITS if top >= unit or unit == 1)
    predicted = [(one.start_s, one.end_s, one.predicted_peak, one.predicted_used) for one in row.moments]
    times, heights = _corners(predicted, row.start_bytes, unit)
    axes.fill_between(times, heights, color=tint(PREDICTED, 0.55), lw=0, zorder=1)
    axes.plot(times, heights, color=PREDICTED, lw=0.9, zorder=2)
    measured = [(o.start_s, o.end_s, o.peak, o.used) for o in row.moments if o.peak is not None and o.used is not None]
    if measured:
        first = measured[0][3] if row.start_bytes > measured[0][2] else row.start_bytes
        axes.plot(*_corners(measured, first, unit), color=MEASURED, lw=1.1, ls=_DASHES, zorder=3)
    if near and row.budget_bytes is not None:
        axes.axhline(row.budget_bytes / unit, color=LIMIT, lw=1.2, zorder=4)
    axes.set_ylim(0, top / unit * 1.18)
    _draw_strip(axes, row, top / unit * 1.18 * _STRIP)
    peak = max(row.moments, key=lambda one: one.predicted_peak)
    middle = (peak.start_s + peak.end_s) / 2 * 1e3
    axes.plot([middle], [peak.predicted_peak / unit], "v", color=TEXT, ms=4.5, zorder=5)
    budget = "" if row.budget_bytes is None else f", budget {bytes_text(row.budget_bytes)}"
    mark = ", emulated" if emulated else ""
    axes.set_title(f"device {row.device}{mark}: peak {bytes_text(peak.predicted_peak)} in {row.peak_name}{budget}")
    axes.set_ylabel(name)
    axes.tick_params(labelbottom=True)
    axes.grid(axis="y", zorder=0)
    axes.margins(x=0.005)


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
    handles = [patch(facecolor=tint(PREDICTED, 0.55), edgecolor=PREDICTED, label="predicted")]
    if any(one.peak is not None for row in rows for one in row.moments):
        handles.append(line([], [], color=MEASURED, lw=1.1, ls=_DASHES, label="measured"))
    if any(row.budget_bytes is not None for row in rows):
        handles.append(line([], [], color=LIMIT, lw=1.2, label="budget"))
    handles.append(line([], [], color=TEXT, marker="v", ms=4.5, lw=0, label="peak"))
    there = {one.kind for row in rows for one in row.moments}
    handles += [patch(facecolor=COLOURS[kind], label=text) for kind, text in MEANINGS.items() if kind in there]
    legend(figure, handles, 1.6)
