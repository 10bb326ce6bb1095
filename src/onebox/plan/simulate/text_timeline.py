"""A schedule as text: a row for each device, time from left to right."""

from __future__ import annotations

from onebox.errors import UsageError
from onebox.plan.simulate.step import Simulation


def draw_timeline(simulation: Simulation, width: int = 100) -> str:
    """Draw the timeline of each device.

    Every column is an equal part of the step. An action begins with its name, such as ``2F0``, if there is room, and
    continues with ``-``; otherwise it is its letter alone. ``u`` is an optimizer step, ``.`` is idle time. In the
    steady state, the part beyond the step's end is drawn at the beginning, where the step before has it.

    Args:
        simulation: The simulation, with details.
        width: Columns of the step, without the devices' numbers.

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
    """Write an action into the columns whose middle it covers, and wrap round at the end of the row."""
    width = len(cells)
    first = round(start)
    room = min(round(end) - first, width)
    text = name.ljust(room, "-") if len(name) <= room else letter * room
    for place, sign in enumerate(text, first):
        cells[place % width] = sign
