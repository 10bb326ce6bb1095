"""A figure of a step: computation, transfers and sums of each device over time; predicted, measured, or both.

One row a device, time from left to right.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from onebox.errors import UsageError
from onebox.plan import Simulation
from onebox.report.figures.canvas import (
    COLOURS,
    FONT,
    MEANINGS,
    WIDTH_IN,
    canvas,
    check_suffix,
    legend,
    matplotlib,
    save,
)
from onebox.report.figures.chrome_trace import lanes
from onebox.report.tables.text import time_text

if TYPE_CHECKING:  # importing the engine takes a second, and tables do not need it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from onebox.engine import TraceEvent

_THIN = ("transfer", "sum")
_ROW_IN = 0.55
_LIGHTEST = 0.5
"""Fraction of white in the colours of the last stage."""


class Bar(NamedTuple):
    """An activity of a device.

    Args:
        device: The device.
        kind: ``F``, ``I``, ``W``, ``B``, ``optimizer``, ``other``, ``transfer`` or ``sum``.
        start_s: Its beginning, in seconds from the beginning of the step.
        end_s: Its end.
        stage: The stage of an action.
        micro_batch: Its micro-batch.
    """

    device: int
    kind: str
    start_s: float
    end_s: float
    stage: int | None = None
    micro_batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepChart:
    """The chart of a step.

    Args:
        title: Its title, such as ``predicted``.
        bars: The devices' activities.
        step_s: Duration of the step in seconds.
    """

    title: str
    bars: tuple[Bar, ...]
    step_s: float


def draw_simulation(
    simulation: Simulation, path: Path | str, *, title: str = "", emulated: Collection[int] = ()
) -> None:
    """Draw the predicted step of a plan.

    Args:
        simulation: A step, with its details.
        path: The file, a ``.png``, ``.svg`` or ``.pdf``; one that exists is replaced.
        title: Title above the figure, such as the plan in a line.
        emulated: Numbers of emulated devices, which are marked.

    Raises:
        UsageError: The suffix is another one, the simulation has no details, or the file cannot be written.
    """
    draw([predicted_chart(simulation)], path, title=title, emulated=emulated)


def draw_measured(
    events: Sequence[TraceEvent],
    path: Path | str,
    step: int,
    *,
    title: str = "",
    emulated: Collection[int] = (),
    simulation: Simulation | None = None,
) -> None:
    """Draw a measured step, below the predicted one where that is given.

    Args:
        events: The workers' events, from :meth:`~onebox.engine.Trainer.events`.
        path: The file, a ``.png``, ``.svg`` or ``.pdf``; one that exists is replaced.
        step: The training step.
        title: Title above the figure, such as the plan in a line.
        emulated: Numbers of emulated devices, which are marked.
        simulation: The predicted step, with its details.

    Raises:
        UsageError: The suffix is another one, there are no events of the step, or the file cannot be written.
    """
    expected = [predicted_chart(simulation)] if simulation is not None else []
    draw([*expected, measured_chart(events, step)], path, title=title, emulated=emulated)


def predicted_chart(simulation: Simulation) -> StepChart:
    """Return the chart of a simulated step.

    Raises:
        UsageError: The simulation was made without details.
    """
    if not simulation.spans:
        raise UsageError("the simulation was made with detail=False; make it with details")
    bars = [
        Bar(span.device, span.action.kind, span.start_s, span.end_s, span.action.stage, span.action.micro_batch)
        for span in simulation.spans
    ]
    bars += [Bar(one.source, "transfer", one.start_s, one.end_s) for one in simulation.transfers]
    for update in simulation.updates:
        kind = "optimizer" if update.stage is None else "sum"
        if update.end_s > update.start_s:
            bars.append(Bar(update.device, kind, update.start_s, update.end_s))
    return StepChart(title="predicted", bars=tuple(bars), step_s=simulation.step_s)


def measured_chart(events: Iterable[TraceEvent], step: int) -> StepChart:
    """Return the chart of a measured step, which begins with its first computation.

    Transfers are shown at their sender, since a receive begins with its request.

    Raises:
        UsageError: The events contain no computation of the step.
    """
    own = [event for event in events if event.step == step]
    computed = [event for event in own if event.track == "compute"]
    if not computed:
        raise UsageError(f"there are no events of step {step}; a trainer with trace=True has those of the last steps")
    begin = min(event.start_ns for event in computed)
    bars = []
    for event in own:
        if event.track == "transfer" and event.name.startswith("receive"):
            continue
        times = (max(0, event.start_ns - begin) * 1e-9, (event.end_ns - begin) * 1e-9)
        if times[1] <= 0:
            continue
        if event.action is not None:
            bars.append(Bar(event.worker, event.action.kind, *times, event.action.stage, event.action.micro_batch))
        else:
            bars.append(Bar(event.worker, _kind(event), *times))
    end = max(event.end_ns for event in computed)
    return StepChart(title=f"measured, step {step + 1}", bars=tuple(bars), step_s=(end - begin) * 1e-9)


def _kind(event: TraceEvent) -> str:
    if event.track == "transfer":
        return "sum" if event.name.startswith("reduce") else "transfer"
    return "optimizer" if event.track == "compute" else "other"


def draw(pictures: Sequence[StepChart], path: Path | str, *, title: str = "", emulated: Collection[int] = ()) -> None:
    """Draw charts of steps below each other, on one scale of time.

    Args:
        pictures: The charts, at least one.
        path: The file, a ``.png``, ``.svg`` or ``.pdf``; one that exists is replaced.
        title: Title above the figure.
        emulated: Numbers of emulated devices, which are marked.

    Raises:
        UsageError: The suffix is another one, or the file cannot be written.
    """
    check_suffix(path)
    devices = sorted({bar.device for picture in pictures for bar in picture.bars})
    rows = len(devices) * len(pictures)
    figure, axes = canvas(1.5 + 0.7 * len(pictures) + _ROW_IN * rows, len(pictures))
    stages = 1 + max((bar.stage for picture in pictures for bar in picture.bars if bar.stage is not None), default=0)
    longest = max(max(bar.end_s for bar in picture.bars) for picture in pictures)
    for place, picture in zip(axes, pictures, strict=True):
        place.set_xlim(0, longest * 1.01e3)
        _draw_rows(place, picture, devices, stages, emulated, figure)
    _draw_legend(figure, pictures, stages)
    save(figure, path, title)


def _draw_rows(
    axes: Axes, picture: StepChart, devices: Sequence[int], stages: int, emulated: Collection[int], figure: Figure
) -> None:
    digits = max((len(str(bar.micro_batch)) for bar in picture.bars if bar.micro_batch is not None), default=1)
    for row, device in enumerate(devices):
        own = [bar for bar in picture.bars if bar.device == device]
        for bar in own:
            if bar.kind not in _THIN:
                _draw_block(axes, bar, row, stages, digits)
        for lane, bars in enumerate(
            thin := lanes((bar for bar in own if bar.kind in _THIN), lambda bar: (bar.start_s, bar.end_s))
        ):
            height = 0.16 / len(thin)
            spans = [(bar.start_s * 1e3, (bar.end_s - bar.start_s) * 1e3) for bar in bars]
            colours = [COLOURS[bar.kind] for bar in bars]
            axes.broken_barh(spans, (row + 0.27 + lane * height, height * 0.9), facecolors=colours, lw=0)
    axes.set_ylim(len(devices) - 0.45, -0.55)
    axes.set_yticks(range(len(devices)), [_row_name(picture, device, emulated) for device in devices])
    axes.tick_params(axis="y", length=0, labelsize=FONT + 0.5)
    axes.tick_params(axis="x", labelsize=FONT + 0.5, labelbottom=True)
    axes.grid(axis="x", color="#d9dce1", lw=0.5, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    idle = 1 - _busy(picture) / (picture.step_s * len(devices)) if picture.step_s else 0.0
    note = ", emulated devices are marked *" if set(emulated) & set(devices) else ""
    text = f"{picture.title}: {time_text(picture.step_s)}, {idle:.1%} idle{note}"
    axes.set_title(text, fontsize=FONT + 1.5, loc="left")
    axes.axvline(picture.step_s * 1e3, color="#30343b", lw=0.8, ls=(0, (4, 3)), zorder=3)


def _busy(picture: StepChart) -> float:
    return math.fsum(bar.end_s - bar.start_s for bar in picture.bars if bar.kind not in (*_THIN, "other"))


def _draw_block(axes: Axes, bar: Bar, row: int, stages: int, digits: int) -> None:
    colour = _shade(COLOURS[bar.kind], bar.stage, stages)
    width = (bar.end_s - bar.start_s) * 1e3
    edge = min(0.5, 60 * width / axes.get_xlim()[1])  # white edges would hide narrow blocks
    axes.broken_barh(
        [(bar.start_s * 1e3, width)], (row - 0.32, 0.56), facecolors=colour, edgecolors="white", lw=edge, zorder=2
    )
    if bar.micro_batch is None:
        return
    text = str(bar.micro_batch)
    room_pt = width / axes.get_xlim()[1] * (WIDTH_IN - 1.3) * 72
    size = min(FONT, (room_pt - 1.5) / (0.62 * digits))
    if size >= 4.5:
        middle = bar.start_s * 1e3 + width / 2
        tone = "white" if _luminance(colour) < 0.5 else "#1d2026"
        axes.text(middle, row - 0.04, text, ha="center", va="center", fontsize=size, color=tone, zorder=4, clip_on=True)


def _row_name(picture: StepChart, device: int, emulated: Collection[int]) -> str:
    stages = sorted({bar.stage for bar in picture.bars if bar.device == device and bar.stage is not None})
    mark = "*" if device in emulated else ""
    if not stages:
        return f"device {device}{mark}"
    return f"device {device}{mark}\nstage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _draw_legend(figure: Figure, pictures: Sequence[StepChart], stages: int) -> None:
    patch = matplotlib("patches").Patch
    there = {bar.kind for picture in pictures for bar in picture.bars}
    handles = [patch(facecolor=COLOURS[kind], label=text) for kind, text in MEANINGS.items() if kind in there]
    homes: dict[int, set[int]] = {}
    for picture in pictures:
        for bar in picture.bars:
            if bar.stage is not None:
                homes.setdefault(bar.device, set()).add(bar.stage)
    if any(len(found) > 1 for found in homes.values()):
        shown = range(stages) if stages <= 8 else (0, stages - 1)
        handles += [patch(facecolor=_shade("#555b66", stage, stages), label=f"stage {stage}") for stage in shown]
    legend(figure, handles, 1.2)


def _shade(colour: str, stage: int | None, stages: int) -> tuple[float, float, float]:
    """Mix white into a colour: none for the first stage, most for the last."""
    part = 0.0 if stage is None or stages < 2 else _LIGHTEST * stage / (stages - 1)
    red, green, blue = matplotlib("colors").to_rgb(colour)
    return red + (1 - red) * part, green + (1 - green) * part, blue + (1 - blue) * part


def _luminance(colour: tuple[float, float, float]) -> float:
    """Return the luminance of a colour, from 0 to 1 (ITU-R BT.709 weights, without gamma)."""
    return 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2]
