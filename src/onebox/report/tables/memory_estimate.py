"""A memory estimate as lines and a table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from onebox.plan import as_data
from onebox.sizes import bytes_text, time_text

if TYPE_CHECKING:  # importing the engine takes a second, and tables do not need it
    from onebox.engine.planning.memory_fit import FitAlternative, FitReport

_MOST_RESIDENTS = 40


def verdict_line(found: FitReport) -> str:
    """Describe whether the plan fits, and the missing memory."""
    over = {n: peak.size_bytes - found.budgets[n] for n, peak in found.peaks.items()}
    lacking = [f"device {n} lacks {bytes_text(size)}" for n, size in sorted(over.items()) if size > 0]
    return f"it does not fit: {', '.join(lacking)}" if lacking else "it fits"


def largest_line(found: FitReport) -> str:
    """Describe the largest batch with which the plan fits, as far as verified."""
    seen = found.largest
    if not seen.fits:
        least = "not even one sample does" if seen.fails == 1 else f"{seen.fails:,} does not, nor did any smaller one"
        return f"no batch fits: {least}"
    if seen.fails is None:
        return f"largest batch: one of {seen.fits:,} fits; larger ones were not looked at"
    if seen.exact:
        return f"largest batch: {seen.fits:,} fits, {seen.fails:,} does not"
    return f"largest batch: {seen.fits:,} fits, {seen.fails:,} does not; those between were not looked at"


def ways_table(ways: Sequence[FitAlternative], step_s: float) -> Table:
    """Return the table of plans for the same batch on the same devices.

    Args:
        ways: The plans, fitting ones first.
        step_s: Seconds of a step of the plan that does not fit, for comparison.
    """
    table = Table("way", "plan")
    for heading in ("memory", "step", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why not")
    for way in ways:
        peak = max(way.peak_bytes.values())
        ratio = f"× {way.step_s / step_s:.2f}" if step_s else ""
        cells = (way.label, way.plan.describe(), bytes_text(peak), time_text(way.step_s), ratio, way.refused)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def estimate_data(found: FitReport) -> dict[str, Any]:
    """Return the whole estimate as JSON values."""
    return {
        "fits": found.fits,
        "batch": found.batch,
        "plan": as_data(found.plan),
        "text": found.plan.describe(),
        "largest_batch": found.largest.fits,
        "too_large_batch": found.largest.fails,
        "devices": [
            {
                "device": number,
                "peak_bytes": peak.size_bytes,
                "budget_bytes": found.budgets[number],
                "peak_in": peak.name,
                "operator": peak.operator,
                "sorts": peak.sorts,
                "residents": [
                    {"what": one.sort, "name": one.name, "size_bytes": one.size_bytes}
                    for one in peak.residents[:_MOST_RESIDENTS]
                ],
                "used_bytes": [use.used_bytes for use in found.curves[number].uses],
            }
            for number, peak in sorted(found.peaks.items())
        ],
        "step_s": found.step_s,
        "times": found.basis,
        "ways": [
            {
                "label": way.label,
                "text": way.plan.describe(),
                "fits": way.fits,
                "peak_bytes": {str(device): size for device, size in way.peak_bytes.items()},
                "step_s": way.step_s,
                "rejection_reason": way.refused,
                "plan": as_data(way.plan),
            }
            for way in found.ways
        ],
        "refusal": found.refusal,
    }
