"""HTML of objects that a notebook shows: a card with tables and a step as an inline SVG; no script, no style sheet.

Colours of text and lines are those of the page, so that cards suit light and dark pages. All text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from onebox.drawing.step_chart import THIN, Bar, StepChart, lanes, shade
from onebox.drawing.style import MEANINGS
from onebox.sizes import time_text

_WIDTH, _LEFT, _ROW, _BAR = 900, 84, 30, 18
_MOST_BARS = 3000
"""A step of more bars is described, but not drawn: a page of many such cards would be slow."""

_LINE = "1px solid rgba(128,128,128,.4)"


def card(title: str, *parts: str) -> str:
    """Return a card: a title, and parts below each other.

    Args:
        title: The title, as text.
        parts: HTML, as the other functions return it; empty ones are left out.
    """
    body = "".join(f'<div style="margin-top:.5em">{part}</div>' for part in parts if part)
    return (
        f'<div style="border:{_LINE};border-radius:6px;padding:.6em .8em;max-width:{_WIDTH + 20}px;overflow-x:auto">'
        f"<strong>{escape(title)}</strong>{body}</div>"
    )


def text(line: str) -> str:
    """Return a line of text."""
    return f"<span>{escape(line)}</span>"


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Return a table; cells that are numbers are aligned to the right.

    Args:
        headings: The heading of each column; empty for none.
        rows: The cells of each row, as text or numbers.
        caption: A line above it.
    """
    cell = f"padding:.15em .8em .15em 0;border-bottom:{_LINE};background:none"
    head = "".join(f'<th scope="col" style="{cell};text-align:left">{escape(each)}</th>' for each in headings)
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    body = "".join(
        '<tr style="background:none">'
        + "".join(
            f'<td style="{cell};text-align:{"right" if isinstance(each, int | float) else "left"}">'
            f"{escape(str(each))}</td>"
            for each in row
        )
        + "</tr>"
        for row in rows
    )
    told = f'<caption style="text-align:left">{escape(caption)}</caption>' if caption else ""
    return f'<table style="border-collapse:collapse;margin:0">{told}{head}<tbody>{body}</tbody></table>'


def step_svg(chart: StepChart) -> str:
    """Return a step as an inline SVG with a legend: a row for each device; pointing at a bar names it.

    Args:
        chart: The step.
    """
    if not chart.bars or len(chart.bars) > _MOST_BARS:
        return text(chart.describe())
    devices = chart.devices
    end_s = max(chart.step_s, *(bar.end_s for bar in chart.bars))
    scale = (_WIDTH - _LEFT) / end_s if end_s > 0 else 0.0
    height = _ROW * len(devices)
    shapes = []
    for row, device in enumerate(devices):
        top = row * _ROW
        shapes.append(f'<text x="0" y="{top + 15}" font-size="13" fill="currentColor">device {device}</text>')
        own = [bar for bar in chart.bars if bar.device == device]
        shapes += [_rect(bar, chart.stages, scale, top + 2, _BAR) for bar in own if bar.kind not in THIN]
        thin = lanes((bar for bar in own if bar.kind in THIN), lambda bar: (bar.start_s, bar.end_s))
        for lane, bars in enumerate(thin):
            each = 6 / len(thin)
            shapes += [_rect(bar, chart.stages, scale, top + 3 + _BAR + lane * each, each * 0.9) for bar in bars]
    x = _LEFT + chart.step_s * scale
    shapes.append(f'<path d="M{x:.1f} 0V{height}" stroke="currentColor" stroke-dasharray="4 3"/>')
    drawn = (
        f'<svg role="img" aria-label="{escape(chart.describe(), quote=True)}" viewBox="0 0 {_WIDTH} {height}" '
        f'style="width:100%;max-width:{_WIDTH}px" xmlns="http://www.w3.org/2000/svg">{"".join(shapes)}</svg>'
    )
    mark = "display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 .9em"
    legend = "".join(
        f'<span style="{mark};background:{_fill(kind)}"></span>{escape(MEANINGS[kind])}' for kind in chart.kinds
    )
    return f"<div>{escape(chart.describe())}</div>{drawn}<div>{legend}</div>"


def _fill(kind: str, stage: int | None = None, stages: int = 1) -> str:
    """Return the colour of a bar: of sums, which are black in figures, that of the page's text."""
    if kind == "sum":
        return "currentColor"
    red, green, blue = (round(255 * part) for part in shade(kind, stage, stages))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _rect(bar: Bar, stages: int, scale: float, top: float, height: float) -> str:
    name = MEANINGS[bar.kind]
    if bar.stage is not None:
        name += f" of stage {bar.stage}" + (f", micro-batch {bar.micro_batch}" if bar.micro_batch is not None else "")
    left, width = _LEFT + bar.start_s * scale, max(0.5, (bar.end_s - bar.start_s) * scale - 0.5)
    told = f"{escape(name)}: {time_text(bar.end_s - bar.start_s)}"
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{_fill(bar.kind, bar.stage, stages)}"><title>{told}</title></rect>'
    )
