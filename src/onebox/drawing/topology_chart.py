"""A figure of a pool: places (hosts, or groups of near devices) with their devices, and the links between them.

A link is the wider the faster it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onebox.drawing.style import (
    COLOURS,
    FONT,
    GROUND,
    TEXT,
    WIDTH_IN,
    canvas,
    headline,
    legend,
    matplotlib,
    style,
    text_on,
)
from onebox.sizes import bit_rate_text, time_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {"cuda": COLOURS["W"], "cpu": COLOURS["F"], "sim": COLOURS["optimizer"]}
"""Colours of kinds of devices."""

_COLUMNS = 4
_CHIP_IN, _CHIP_HIGH_IN, _GAP_IN = 0.62, 0.34, 0.08
_HEAD_IN, _FOOT_IN = 0.32, 0.26
_NARROWEST_IN = 1.7
_DASHES = (0, (4, 3))
_LABELLED = 8
"""Most places whose links are labelled: of more places the labels would cover each other."""


@dataclass(frozen=True, kw_only=True)
class PlaceDevice:
    """A device in a place.

    Args:
        number: Its number in the pool.
        kind: ``cuda``, ``cpu`` or ``sim``.
        emulated: Whether times on it are emulated.
    """

    number: int
    kind: str
    emulated: bool = False


@dataclass(frozen=True, kw_only=True)
class Place:
    """A host, or a group of near devices.

    Args:
        name: Its name.
        devices: Its devices, at least one.
        inner_bps: Bytes per second of the slowest link between two of its devices; ``None`` where it is unknown, or
            there is only one.
    """

    name: str
    devices: tuple[PlaceDevice, ...]
    inner_bps: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlaceLink:
    """The link between two places.

    Args:
        ends: The places, by their position.
        bandwidth_bps: Bytes per second, of the slower direction; ``None`` where it has not been measured.
        latency_s: Seconds of an empty message, of the slower direction; likewise.
    """

    ends: tuple[int, int]
    bandwidth_bps: float | None = None
    latency_s: float | None = None

    @property
    def text(self) -> str:
        """Its rate and latency; empty where they have not been measured."""
        if self.bandwidth_bps is None:
            return ""
        late = "" if self.latency_s is None else f", {time_text(self.latency_s)}"
        return f"{bit_rate_text(self.bandwidth_bps)}{late}"


def topology_figure(places: Sequence[Place], links: Sequence[PlaceLink], *, title: str = "") -> Figure:
    """Return a figure of places and the links between them.

    Args:
        places: The places, at least one.
        links: The links.
        title: Title above the figure.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    widest, highest = (max(size) for size in zip(*(_size_in(place) for place in places), strict=True))
    centres = _layout(len(places), widest, highest)
    width_in = max(WIDTH_IN, 2 * max(abs(x) for x, _ in centres) + widest + 0.2)
    bottom_in, top_in = (end(y for _, y in centres) for end in (min, max))
    bottom_in, top_in = bottom_in - highest / 2 - 0.1, top_in + highest / 2 + 0.1
    with style():
        figure, (axes,) = canvas(top_in - bottom_in + 0.7, width_in=width_in)
        axes.set_axis_off()
        axes.set_xlim(-width_in / 2, width_in / 2)
        axes.set_ylim(bottom_in, top_in)
        axes.set_aspect("equal")
        for link in links:
            _draw_link(axes, link, centres, labelled=len(places) <= _LABELLED)
        for place, centre in zip(places, centres, strict=True):
            _draw_place(axes, place, centre)
        _draw_legend(figure, places, links)
        headline(figure, title)
    return figure


def link_width_pt(bandwidth_bps: float) -> float:
    """Return the width of a link in points: 1 at 1 Mbit/s, and 1.5 more for each tenfold rate, up to 100 Gbit/s.

    Example:
        >>> [link_width_pt(rate) for rate in (125e3, 125e6, 125e12)]
        [1.0, 5.5, 8.5]
    """
    return 1 + 1.5 * min(5.0, max(0.0, math.log10(bandwidth_bps / 125e3)))


def _size_in(place: Place) -> tuple[float, float]:
    """Return the width and height of a place's box in inches."""
    columns = min(_COLUMNS, len(place.devices))
    rows = -(-len(place.devices) // _COLUMNS)
    width = max(_NARROWEST_IN, columns * (_CHIP_IN + _GAP_IN) + _GAP_IN, 0.085 * len(place.name) + 0.3)
    return width, _HEAD_IN + rows * (_CHIP_HIGH_IN + _GAP_IN) + (_FOOT_IN if place.inner_bps else _GAP_IN)


def _layout(count: int, width_in: float, height_in: float) -> list[tuple[float, float]]:
    """Return the centres of places: side by side up to two, and on an ellipse from three on.

    Args:
        count: Number of places.
        width_in: Width of the widest.
        height_in: Height of the highest.
    """
    if count <= 2:
        apart = width_in / 2 + 1.6
        return [(0.0, 0.0)] if count == 1 else [(-apart, 0.0), (apart, 0.0)]
    across = max(WIDTH_IN / 2 - width_in / 2 - 0.1, width_in * count / 5)
    up = max(1.25, height_in * count / 5)
    angles = [math.pi / 2 + 2 * math.pi * place / count for place in range(count)]
    return [(-across * math.cos(angle), up * math.sin(angle)) for angle in angles]


def _draw_link(axes: Axes, link: PlaceLink, centres: Sequence[tuple[float, float]], *, labelled: bool) -> None:
    (x, y), (to_x, to_y) = (centres[end] for end in link.ends)
    known = link.bandwidth_bps is not None
    width = link_width_pt(link.bandwidth_bps) if link.bandwidth_bps is not None else 1.0
    look: dict[str, Any] = {"color": COLOURS["transfer"], "lw": width, "ls": "-" if known else _DASHES}
    axes.plot([x, to_x], [y, to_y], solid_capstyle="round", zorder=1, **look)
    if labelled and link.text:
        box = {"boxstyle": "round,pad=0.2", "facecolor": GROUND, "edgecolor": "none"}
        middle = ((x + to_x) / 2, (y + to_y) / 2)
        axes.text(*middle, link.text.replace(", ", "\n"), ha="center", va="center", fontsize=FONT, bbox=box, zorder=2)


def _draw_place(axes: Axes, place: Place, centre: tuple[float, float]) -> None:
    box = matplotlib("patches").FancyBboxPatch
    width, height = _size_in(place)
    left, top = centre[0] - width / 2, centre[1] + height / 2
    look = {"boxstyle": "round,pad=0,rounding_size=0.08", "lw": 1.0}
    axes.add_patch(
        box((left, top - height), width, height, facecolor="white", edgecolor=COLOURS["transfer"], zorder=3, **look)
    )
    axes.text(centre[0], top - _HEAD_IN / 2, place.name, ha="center", va="center", weight="bold", zorder=4)
    columns = min(_COLUMNS, len(place.devices))
    first = centre[0] - (columns * _CHIP_IN + (columns - 1) * _GAP_IN) / 2
    for index, device in enumerate(place.devices):
        row, column = divmod(index, _COLUMNS)
        x = first + column * (_CHIP_IN + _GAP_IN)
        y = top - _HEAD_IN - (row + 1) * _CHIP_HIGH_IN - row * _GAP_IN
        colour = KINDS.get(device.kind, COLOURS["other"])
        axes.add_patch(box((x, y), _CHIP_IN, _CHIP_HIGH_IN, facecolor=colour, edgecolor="none", zorder=4, **look))
        text = f"{device.number}{'*' if device.emulated else ''}"
        middle = (x + _CHIP_IN / 2, y + _CHIP_HIGH_IN / 2)
        axes.text(*middle, text, ha="center", va="center", color=text_on(colour), zorder=5)
    if place.inner_bps:
        text = f"within: {bit_rate_text(place.inner_bps)}"
        axes.text(centre[0], top - height + _FOOT_IN / 2, text, ha="center", va="center", fontsize=FONT - 1, zorder=4)


def _draw_legend(figure: Figure, places: Sequence[Place], links: Sequence[PlaceLink]) -> None:
    patch, line = matplotlib("patches").Patch, matplotlib("lines").Line2D
    devices = [device for place in places for device in place.devices]
    there = {device.kind for device in devices}
    handles = [patch(facecolor=colour, label=kind) for kind, colour in KINDS.items() if kind in there]
    if any(device.emulated for device in devices):
        handles.append(line([], [], lw=0, marker="$*$", color=TEXT, ms=5, label="emulated"))
    known = [link.bandwidth_bps for link in links if link.bandwidth_bps is not None]
    for rate in sorted({min(known), max(known)}) if known else ():
        handles.append(
            line([], [], color=COLOURS["transfer"], lw=link_width_pt(rate), label=f"link of {bit_rate_text(rate)}")
        )
    if len(known) < len(links):
        handles.append(line([], [], color=COLOURS["transfer"], lw=1.0, ls=_DASHES, label="link, not measured"))
    legend(figure, handles, 1.6)
