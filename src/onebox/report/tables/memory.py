"""The memory of a step, predicted beside measured, as lines and tables. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from onebox.plan import Plan, PolicyReason
from onebox.report.tables.comparison import PredictedMeasured
from onebox.report.tables.plan import segments_text
from onebox.report.tables.text import emulated_caption, marked, share_text
from onebox.sizes import bytes_text, time_text

if TYPE_CHECKING:  # importing the engine takes a second, and tables do not need it
    from onebox.engine import TraceEvent
    from onebox.engine.memory.timeline import MemoryPeak, MemoryTimeline

_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class MemoryComparison:
    """A device's memory over a step, predicted and measured.

    Args:
        device: Its number in the pool.
        peak_bytes: Its peak.
        difference_bytes: Largest difference of the two during or after an instruction; 0 where they are always equal.
        where: The instruction of that difference; empty where they are always equal.
    """

    device: int
    peak_bytes: PredictedMeasured
    difference_bytes: int
    where: str

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "device": self.device,
            "peak_bytes": self.peak_bytes.to_data(),
            "difference_bytes": self.difference_bytes,
            "where": self.where,
        }


def compare_memory(
    curves: Mapping[int, MemoryTimeline], events: Iterable[TraceEvent], step: int
) -> tuple[MemoryComparison, ...]:
    """Compare each device's predicted and measured memory over a step, instruction by instruction.

    The first step of a run uses less: an optimizer creates its state in its first step.

    Args:
        curves: From :meth:`~onebox.engine.Trainer.predicted_curves`.
        events: From :meth:`~onebox.engine.Trainer.events`.
        step: The step.

    Returns:
        A comparison for each device measured with that plan, in the order of their numbers.
    """
    own = [event for event in events if event.step == step]
    pairs = [(curve, measured_instructions(curve, own)) for _, curve in sorted(curves.items())]
    return tuple(_compared(curve, found) for curve, found in pairs if found)


def measured_instructions(curve: MemoryTimeline, events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Return a device's events in a step, one for each instruction of its curve.

    Args:
        curve: The device's curve.
        events: The events of the step; several times where it was repeated after a loss.

    Returns:
        The newest events; empty where the step had another plan or batch, and so other instructions.
    """
    found = [event for event in events if event.worker == curve.device][-len(curve.uses) :]
    return found if [event.name for event in found] == [use.name for use in curve.uses] else []


def _compared(curve: MemoryTimeline, events: Sequence[TraceEvent]) -> MemoryComparison:
    """Compare the instructions of one device one by one."""
    found = [
        (max(abs(use.peak_bytes - event.peak_bytes), abs(use.used_bytes - event.used_bytes)), use.name)
        for use, event in zip(curve.uses, events, strict=True)
    ]
    largest, where = max(found, key=lambda pair: pair[0])
    return MemoryComparison(
        device=curve.device,
        peak_bytes=PredictedMeasured(
            predicted=curve.peak.peak_bytes, measured=max(event.peak_bytes for event in events)
        ),
        difference_bytes=largest,
        where=where if largest else "",
    )


def sparkline(values: Sequence[int], most: int, width: int) -> str:
    """Draw values as a line of bars of nine heights: each column shows its highest value.

    Args:
        values: The values, at least one, from 0.
        most: The value of a full bar.
        width: The maximum number of columns.

    Example:
        >>> sparkline([0, 1, 2, 3, 4], 4, 5)
        ' ▂▄▆█'
    """
    columns = min(width, len(values))
    bounds = [len(values) * column // columns for column in range(columns + 1)]
    highest = (max(values[start:end]) for start, end in pairwise(bounds))
    return "".join(_BARS[min(8, -(-8 * value // max(1, most)))] for value in highest)


def curve_lines(curves: Mapping[int, MemoryTimeline], budgets: Mapping[int, int | None], width: int) -> list[str]:
    """Return a line for each device: its memory over the step, against its budget or, without one, its peak.

    Args:
        curves: The curve of each device.
        budgets: The memory of each device; ``None`` for one without limit.
        width: The maximum number of columns of a curve.
    """
    digits = max((len(str(device)) for device in curves), default=1)
    lines = []
    for device, curve in sorted(curves.items()):
        peak, budget = curve.peak, budgets.get(device)
        drawn = sparkline([use.peak_bytes for use in curve.uses], max(budget or 0, peak.peak_bytes), width)
        full = "its peak" if budget is None or budget < peak.peak_bytes else "its budget"
        lines.append(f"{device:>{digits}} |{drawn}| a full bar is {full}; the peak is in {peak.name}")
    return lines


def peak_table(
    curves: Mapping[int, MemoryTimeline],
    budgets: Mapping[int, int | None],
    compared: Sequence[MemoryComparison] = (),
    emulated: Collection[int] = (),
    allocated: Mapping[int, int] | None = None,
) -> Table:
    """Return the table of each device's peak: predicted, measured where it was run, and its limit.

    Args:
        curves: The predicted curve of each device.
        budgets: The memory of each device; ``None`` for one without limit.
        compared: The measurements.
        emulated: Numbers of the emulated devices.
        allocated: Peak of each GPU's allocator in a step.
    """
    allocated = allocated or {}
    table = Table("device", "peak in", caption=emulated_caption(curves, emulated), caption_justify="left")
    measured = {one.device: one for one in compared}
    headings = ["predicted", *(["measured", "differ by at most"] if measured else [])]
    headings += [*(["by the allocator"] if allocated else []), "budget", ""]
    for heading in headings:
        table.add_column(heading, justify="right")
    for device, curve in sorted(curves.items()):
        peak, budget = curve.peak.peak_bytes, budgets.get(device)
        cells = [bytes_text(peak)]
        if measured:
            one = measured.get(device)
            both = (one.peak_bytes.measured, one.difference_bytes) if one is not None else (None, None)
            cells += ["-" if value is None else bytes_text(int(value)) for value in both]
        if allocated:
            cells.append(bytes_text(allocated[device]) if device in allocated else "-")
        cells += [bytes_text(budget) if budget else "-", share_text(peak, budget)]
        table.add_row(marked(device, emulated), Text(curve.peak.name), *cells)
    return table


def activation_policy_table(
    reasons: Sequence[PolicyReason], plan: Plan, names: Sequence[str], emulated: Collection[int] = ()
) -> Table:
    """Return the table of each stage's activation policies.

    Args:
        reasons: From :func:`~onebox.plan.explain_policies`, one for each stage.
        plan: The plan.
        names: All segments of the model, in their order.
        emulated: Numbers of the emulated devices.
    """
    caption = emulated_caption(plan.devices, emulated)
    table = Table("stage", "segments", "device", "policy", caption=caption, caption_justify="left")
    for heading in ("would keep\nof a micro-batch", "saved", "paid\nin a step"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why")
    for one in reasons:
        segments = segments_text(plan.stages[one.stage], names)
        saved = bytes_text(one.saved_bytes) if one.saved_bytes else ""
        paid = time_text(one.paid_s) if one.saved_bytes else ""
        made = bytes_text(one.activation_bytes)
        cells = (str(one.stage), segments, marked(one.device, emulated), one.policy, made, saved, paid, one.text)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def residents_table(peak: MemoryPeak, most: int = 12) -> Table:
    """Return the table of a device's memory contents at its peak: sums by kind, and the largest of each.

    Args:
        peak: The peak.
        most: Maximum number of rows of single tensors, the largest first.
    """
    table = Table("what", "which", title_justify="left")
    table.add_column("memory", justify="right")
    table.add_column("", justify="right")
    shown = sorted(peak.residents[:most], key=lambda one: (-peak.sorts[one.sort], one.sort, -one.size_bytes))
    for sort, group in groupby(shown, key=lambda one: one.sort):
        total = peak.sorts[sort]
        table.add_row(sort, "", bytes_text(total), f"{total / peak.size_bytes:.1%}")
        for one in group:
            table.add_row("", Text(one.name), bytes_text(one.size_bytes), "")
    for sort, total in peak.sorts.items():
        if all(one.sort != sort for one in shown):
            table.add_row(sort, "", bytes_text(total), f"{total / peak.size_bytes:.1%}")
    return table
