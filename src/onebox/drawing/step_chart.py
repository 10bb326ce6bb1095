"""A figure of a step: computation, transfers and sums of each device over time; predicted, measured, or both.

One row a device, time from left to right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from onebox.drawing.style import (
    COLOURS,
    FONT,
    MEANINGS,
    WIDTH_IN,
    canvas,
    headline,
    legend,
    matplotlib,
    style,
    text_on,
    tint,
)
from onebox.sizes import time_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")

THIN = ("transfer", "sum")
"""Kinds of work that go on beside computation."""

_ROW_IN = 0.55
_LIGHTEST = 0.4
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
    """The bars of a step.

    Args:
        title: Its title, such as ``predicted``.
        bars: The devices' activities.
        step_s: Duration of the step in seconds.
    """

    title: str
    bars: tuple[Bar, ...]
    step_s: float

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that do something in it."""
        return tuple(sorted({bar.device for bar in self.bars}))

    @property
    def stages(self) -> int:
        """Number of stages, from the first to the last that is there."""
        return 1 + max((bar.stage for bar in self.bars if bar.stage is not None), default=0)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of work in it, in the order of the legend."""
        there = {bar.kind for bar in self.bars}
        return tuple(kind for kind in MEANINGS if kind in there)

    @property
    def idle(self) -> float:
        """Idle part of the devices' time, from 0 to 1."""
        busy_s = math.fsum(bar.end_s - bar.start_s for bar in self.bars if bar.kind not in (*THIN, "other"))
        return 1 - busy_s / (self.step_s * len(self.devices)) if self.step_s and self.bars else 0.0

    def describe(self) -> str:
        """Return its title, the time of the step, and the idle part."""
        return f"{self.title}: {time_text(self.step_s)}, {self.idle:.1%} idle"

    def stages_of(self, device: int) -> tuple[int, ...]:
        """Return the stages that a device computes."""
        return tuple(sorted({bar.stage for bar in self.bars if bar.device == device and bar.stage is not None}))


def step_figure(charts: Sequence[StepChart], *, title: str = "", emulated: Collection[int] = ()) -> Figure:
    """Return a figure of steps below each other, on one scale of time.

    Args:
        charts: The charts, at least one.
        title: Title above the figure.
        emulated: Numbers of emulated devices, which are marked.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    devices = sorted({device for chart in charts for device in chart.devices})
    stages = max(chart.stages for chart in charts)
    longest_s = max(max((bar.end_s for bar in chart.bars), default=chart.step_s) for chart in charts)
    with style():
        figure, axes = canvas(1.3 + 0.6 * len(charts) + _ROW_IN * len(devices) * len(charts), len(charts))
        for place, chart in zip(axes, charts, strict=True):
            place.set_xlim(0, longest_s * 1.01e3)
            _draw_rows(place, chart, devices, stages, emulated)
        axes[-1].set_xlabel("time in ms")
        _draw_legend(figure, charts, stages)
        headline(figure, title)
    return figure


def lanes(spans: Iterable[T], times: Callable[[T], tuple[float, float]]) -> list[list[T]]:
    """Distribute spans over the fewest lanes without overlap.

    Args:
        spans: The spans.
        times: Returns the beginning and the end of one.
    """
    found: list[list[T]] = []
    for span in sorted(spans, key=times):
        lane = next((lane for lane in found if times(lane[-1])[1] <= times(span)[0]), None)
        if lane is None:
            found.append(lane := [])
        lane.append(span)
    return found


def shade(kind: str, stage: int | None, stages: int) -> tuple[float, float, float]:
    """Return the colour of a bar: full for the first stage, lightest for the last."""
    return tint(COLOURS[kind], 0.0 if stage is None or stages < 2 else _LIGHTEST * stage / (stages - 1))


def _draw_rows(axes: Axes, chart: StepChart, devices: Sequence[int], stages: int, emulated: Collection[int]) -> None:
    digits = max((len(str(bar.micro_batch)) for bar in chart.bars if bar.micro_batch is not None), default=1)
    for row, device in enumerate(devices):
        own = [bar for bar in chart.bars if bar.device == device]
        for bar in own:
            if bar.kind not in THIN:
                _draw_block(axes, bar, row, stages, digits)
        thin = lanes((bar for bar in own if bar.kind in THIN), lambda bar: (bar.start_s, bar.end_s))
        for lane, bars in enumerate(thin):
            height = 0.16 / len(thin)
            spans = [(bar.start_s * 1e3, (bar.end_s - bar.start_s) * 1e3) for bar in bars]
            colours = [COLOURS[bar.kind] for bar in bars]
            axes.broken_barh(spans, (row + 0.27 + lane * height, height * 0.9), facecolors=colours, lw=0)
    axes.set_ylim(len(devices) - 0.45, -0.55)
    axes.set_yticks(range(len(devices)), [_row_name(chart, device, emulated) for device in devices])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=True)
    axes.grid(axis="x", zorder=0)
    axes.spines["left"].set_visible(False)
    note = ", emulated devices are marked *" if set(emulated) & set(devices) else ""
    axes.set_title(f"{chart.describe()}{note}")
    axes.axvline(chart.step_s * 1e3, lw=0.9, ls=(0, (4, 3)), zorder=3, color=COLOURS["sum"])


def _draw_block(axes: Axes, bar: Bar, row: int, stages: int, digits: int) -> None:
    colour = shade(bar.kind, bar.stage, stages)
    width = (bar.end_s - bar.start_s) * 1e3
    edge = min(0.5, 60 * width / axes.get_xlim()[1])  # white edges would hide narrow blocks
    axes.broken_barh(
        [(bar.start_s * 1e3, width)], (row - 0.32, 0.56), facecolors=colour, edgecolors="white", lw=edge, zorder=2
    )
    if bar.micro_batch is None:
        return
    room_pt = width / axes.get_xlim()[1] * (WIDTH_IN - 1.3) * 72
    size = min(FONT, (room_pt - 1.5) / (0.62 * digits))
    if size >= 5.5:
        place = (bar.start_s * 1e3 + width / 2, row - 0.04)
        look: dict[str, Any] = {"fontsize": size, "color": text_on(colour), "zorder": 4, "clip_on": True}
        axes.text(*place, str(bar.micro_batch), ha="center", va="center", **look)


def _row_name(chart: StepChart, device: int, emulated: Collection[int]) -> str:
    stages = chart.stages_of(device)
    mark = "*" if device in emulated else ""
    if not stages:
        return f"device {device}{mark}"
    return f"device {device}{mark}\nstage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _draw_legend(figure: Figure, charts: Sequence[StepChart], stages: int) -> None:
    patch = matplotlib("patches").Patch
    there = {kind for chart in charts for kind in chart.kinds}
    handles = [patch(facecolor=COLOURS[kind], label=text) for kind, text in MEANINGS.items() if kind in there]
    if any(len(chart.stages_of(device)) > 1 for chart in charts for device in chart.devices):
        shown = range(stages) if stages <= 8 else (0, stages - 1)
        handles += [patch(facecolor=shade("F", stage, stages), label=f"stage {stage}") for stage in shown]
    legend(figure, handles, 1.2)
