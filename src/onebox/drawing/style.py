"""Shared parts of all figures: size, colours, axes of time, legend, and the file.

Matplotlib is used without pyplot, so that nothing global changes, and is imported on first use. A figure has a ground
of its own, light and not quite white, so that one file is readable on light and on dark pages: no text on a transparent
ground has the contrast of 4.5, which WCAG 2.2 requires, on white and on the usual dark grey.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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

GROUND = "#f7f8fa"
TEXT = "#24282f"
GRID = "#dde1e6"

COLOURS = {
    "F": "#0072b2",
    "B": "#d55e00",
    "I": "#e69f00",
    "W": "#009e73",
    "optimizer": "#cc79a7",
    "other": "#d3d8de",
    "transfer": "#5d6876",
    "sum": "#111418",
}
"""By kind of work. The first five are of a palette for all kinds of colour vision (M. Okabe and K. Ito, "Color
Universal Design", 2008); the greys differ from these and from each other in lightness."""

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

PREDICTED = "#56b4e9"
MEASURED = "#0072b2"
LIMIT = "#d55e00"
"""Of curves: a prediction, a measurement, a limit; of the same palette."""

WIDTH_IN = 10.0
FONT = 9.0
_DPI = 120
_TITLE_COLUMNS = 112


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


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Draw in the style of all figures, whatever the user's own settings of matplotlib are.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    library = matplotlib()
    with library.rc_context():
        library.rcdefaults()
        library.rcParams.update(
            {
                "font.size": FONT,
                "text.color": TEXT,
                "text.parse_math": False,  # names that others give may have a dollar
                "axes.labelcolor": TEXT,
                "axes.edgecolor": TEXT,
                "axes.facecolor": "none",
                "axes.titlesize": FONT + 1,
                "axes.titlelocation": "left",
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.axisbelow": True,
                "grid.color": GRID,
                "grid.linewidth": 0.6,
                "xtick.color": TEXT,
                "ytick.color": TEXT,
                "figure.facecolor": GROUND,
                "legend.frameon": False,
                "svg.hashsalt": "onebox",  # else ids inside the file are random
            }
        )
        yield


def canvas(height_in: float, places: int = 1, *, width_in: float = WIDTH_IN) -> tuple[Figure, Sequence[Axes]]:
    """Return an empty figure, with axes one below the other that share their abscissa; call it within :func:`style`.

    Args:
        height_in: Its height, in inches.
        places: Number of axes.
        width_in: Its width, in inches.
    """
    figure: Figure = matplotlib("figure").Figure(figsize=(width_in, height_in), dpi=_DPI, layout="constrained")
    matplotlib("backends.backend_agg").FigureCanvasAgg(figure)
    return figure, list(figure.subplots(places, 1, sharex=True, squeeze=False)[:, 0])


def headline(figure: Figure, title: str) -> None:
    """Write a title above a figure, if there is one."""
    if title:
        figure.suptitle("\n".join(wrap(title, _TITLE_COLUMNS)), fontsize=FONT + 2, x=0.01, ha="left")


def save(figure: Figure, path: Path | str) -> None:
    """Write a figure without the date, so that equal figures are equal files.

    Args:
        figure: The figure.
        path: The file.

    Raises:
        UsageError: The suffix is not supported, or the file cannot be written.
    """
    check_suffix(path)
    metadata: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(
        Path(path).suffix.lower(), {}
    )
    try:
        with style():
            figure.savefig(path, metadata=metadata)
    except OSError as error:
        raise UsageError(f"figure {path} cannot be written: {error.strerror}") from error


def legend(figure: Figure, handles: Sequence[Artist], handle_length: float) -> None:
    """Draw a legend in rows of at most seven below all axes.

    Args:
        figure: The figure.
        handles: Its entries, with their labels.
        handle_length: Width of each one's symbol, in units of the font size.
    """
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=min(len(handles), 7),
        fontsize=FONT,
        handlelength=handle_length,
        columnspacing=1.4,
    )


def luminance(colour: str | tuple[float, float, float]) -> float:
    """Return the relative luminance of a colour, from 0 to 1, by the definition of WCAG 2.2.

    Args:
        colour: As ``#rrggbb``, or as red, green and blue from 0 to 1.

    Example:
        >>> luminance("#ffffff")
        1.0
    """
    parts = tuple(int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)) if isinstance(colour, str) else colour
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str | tuple[float, float, float], other: str | tuple[float, float, float]) -> float:
    """Return the contrast of two colours, from 1 to 21, by the definition of WCAG 2.2.

    Example:
        >>> contrast("#000000", "#ffffff")
        21.0
    """
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def text_on(colour: str | tuple[float, float, float]) -> str:
    """Return the colour of text on a coloured block: white or dark, whichever has the more contrast."""
    return max("#ffffff", "#111418", key=lambda text: contrast(text, colour))


def tint(colour: str, white: float) -> tuple[float, float, float]:
    """Mix white into a colour.

    Args:
        colour: As ``#rrggbb``.
        white: Fraction of white.
    """
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white
