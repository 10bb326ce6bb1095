"""Shared parts of all figures: size, colours, axes of time, legend, and the file.

Matplotlib is used without pyplot, so that nothing global changes, and is imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from types import ModuleType
from typing import TYPE_CHECKING, Any

from onebox.errors import UsageError
from onebox.extras import import_extra

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")

COLOURS = {
    "F": "#3f74b5",
    "B": "#d9702b",
    "I": "#e8a13c",
    "W": "#4f9d57",
    "optimizer": "#7d5ba6",
    "other": "#b9bec6",
    "transfer": "#5f6b7a",
    "sum": "#c2464a",
}
"""Blue and orange differ for all kinds of colour vision; green, purple and red also differ in position."""

MEANINGS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "optimizer": "optimizer",
    "other": "other work",
    "transfer": "transfer",
    "sum": "sum of gradients",
}
WIDTH_IN = 13.0
FONT = 7.5
_DPI = 150


def check_suffix(path: Path | str) -> None:
    """Require that a file name has the suffix of a supported figure format.

    Raises:
        UsageError: It has another suffix than ``.png``, ``.svg`` or ``.pdf``.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise UsageError(f"figure {path}: the suffix says the format; allowed are {', '.join(SUFFIXES)}")


def matplotlib(module: str = "") -> ModuleType:
    """Return matplotlib, or a module of it.

    Raises:
        MissingExtra: It is not installed.
    """
    return import_extra(f"matplotlib.{module}".rstrip("."), "A figure")


def canvas(height_in: float, places: int) -> tuple[Figure, Sequence[Axes]]:
    """Return an empty figure, with axes one below the other, which share their time in milliseconds.

    Args:
        height_in: Its height, in inches.
        places: Number of axes.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    figure: Figure = matplotlib("figure").Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    matplotlib("backends.backend_agg").FigureCanvasAgg(figure)
    axes = list(figure.subplots(places, 1, sharex=True, squeeze=False)[:, 0])
    axes[-1].set_xlabel("time in ms", fontsize=FONT + 1.5)
    return figure, axes


def save(figure: Figure, path: Path | str, title: str = "") -> None:
    """Write a figure without the date, so that equal figures are equal files.

    Args:
        figure: The figure.
        path: The file.
        title: Title above the figure.

    Raises:
        UsageError: The file cannot be written.
    """
    if title:
        figure.suptitle("\n".join(wrap(title, 150)), fontsize=FONT + 3, x=0.01, ha="left")
    metadata: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(
        Path(path).suffix.lower(), {}
    )
    try:
        with matplotlib().rc_context({"svg.hashsalt": "onebox"}):  # else ids inside the file are random
            figure.savefig(path, dpi=_DPI, metadata=metadata)
    except OSError as error:
        raise UsageError(f"figure {path} cannot be written: {error.strerror}") from error


def legend(figure: Figure, handles: Sequence[Artist], handle_length: float) -> None:
    """Draw a legend in one row below all axes.

    Args:
        figure: The figure.
        handles: Its entries, with their labels.
        handle_length: Width of each one's symbol, in units of the font size.
    """
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=len(handles),
        fontsize=FONT + 0.5,
        frameon=False,
        handlelength=handle_length,
        columnspacing=1.4,
    )
