"""A schedule as text, for people: a row for each device, time from left to right."""

from __future__ import annotations

from onebox.errors import UsageError
from onebox.plan.simulate.step import Simulation


def draw_timeline(simulation: Simulation, width: int = 100) -> str:
    """Draw what each device does when.

    Every column is an equal part of the step. An action begins with its name, such as ``2F0``, if that has room, and
    goes on with ``-``; where it has none it is its letter alone. ``u`` is an optimizer step, ``.`` is idle time. Of a
    step among many, what goes beyond its end is drawn at the beginning, where the step before has it.

    Args:
        simulation: What to draw, with its details.
        width: Columns for the step; the devices' numbers come on top.

    Returns:
        A line for each device and one for the scale.

    Raises:
        UsageError: The width is too small, or the simulation was made without details.
    """
    if width < 10:
        raise UsageError(f"width={width}: at least 10 columns are needed")
    if not simulation.spans:
        raise UsageError("the simulation was made with detail=False; make it with details")
    rows = {device: ["."] * width for device in simulation.busy_s}
    per_s = width / simulation.step_s if simulation.step_s > 0 else 0.0
    for span in simulation.spans:
        _draw(rows[span.device], span.start_s * per_s, span.end_s * per_s, str(span.action), span.action.kind)
    for update in simulation.updates:
        if update.stage is None:
            _draw(rows[update.device], update.start_s * per_s, update.end_s * per_s, "update", "u")
    digits = max(len(str(device)) for device in rows)
    lines = [f"{device:>{digits}} |{''.join(cells)}|" for device, cells in sorted(rows.items())]
    scale = f"{simulation.step_s:.4g} s, {simulation.bubble:.1%} idle"
    return "\n".join([*lines, f"{'':>{digits}} |0{scale:>{width - 1}}|"])


def _draw(cells: list[str], start: float, end: float, name: str, letter: str) -> None:
    """Write an action into the columns whose middle it covers, and from the first one on where they end."""
    width = len(cells)
    first = round(start)
    room = min(round(end) - first, width)
    text = name.ljust(room, "-") if len(name) <= room else letter * room
    for place, sign in enumerate(text, first):
        cells[place % width] = sign
