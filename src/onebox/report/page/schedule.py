"""The schedule of a step as rows of spans, from a timeline. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onebox.drawing import lanes
from onebox.report.figures.chrome_trace import Span, Timeline
from onebox.report.figures.worker_timeline import LINKS
from onebox.report.page.state import ScheduleRow, ScheduleView

KINDS = ("forward", "backward", "input gradient", "weight gradient", "update", "wait", "transfer", "other")
"""Kinds of spans, each with a colour of its own."""

SPANS = 6000
"""The most spans of a view; of more the shortest are left out."""

_ACTIONS = {"F": 0, "B": 1, "I": 2, "W": 3}
"""Kinds of the plan's actions."""

_UPDATES = ("optimizer", "outer update")
_UNSEEN = ("free",)
"""Names of spans that take no time worth showing."""


def schedule_view(timeline: Timeline, step: int, hosts: Mapping[str, str]) -> ScheduleView:
    """Return a step of a timeline as rows of spans.

    Args:
        timeline: The timeline.
        step: The step, as in the arguments of its spans.
        hosts: The host of each process, as far as known, for a timeline whose times are of each host's own clock: the
            spans of each host begin with its first. A link has the clock of the host that sends.
    """
    found: list[tuple[ScheduleRow, str, list[Span]]] = []
    for process, tracks in timeline.processes.items():
        for track, spans in tracks.items():
            own = [span for span in spans if span.args.get("step") == step and span.name not in _UNSEEN]
            for number, lane in enumerate(lanes(own, lambda span: (span.start_ns, span.end_ns)), start=1):
                name = track if number == 1 else f"{track} #{number}"
                host = track.partition(" → ")[0] if process == LINKS else hosts.get(process, process)
                host = "" if timeline.one_clock else host
                found.append((ScheduleRow(process=process, track=name), host, lane))
    starts: dict[str, int] = {}
    for _, host, spans in found:
        for span in spans:
            starts[host] = min(starts.get(host, span.start_ns), span.start_ns)
    threshold_ns, left_out = _threshold([span for _, _, spans in found for span in spans])
    names: dict[str, int] = {}
    rows: list[ScheduleRow] = []
    shown: list[tuple[int, int, float, float, int]] = []
    length_us = 0.0
    for row, host, spans in found:
        start_ns = starts[host]
        kept = [span for span in spans if span.end_ns - span.start_ns >= threshold_ns]
        if not kept:
            continue
        for span in kept:
            begin_us, own_us = _us(span.start_ns - start_ns), _us(span.end_ns - span.start_ns)
            length_us = max(length_us, begin_us + own_us)
            shown.append((len(rows), _kind(span), begin_us, own_us, names.setdefault(span.name, len(names))))
        rows.append(row)
    return ScheduleView(
        step=step,
        length_us=round(length_us, 1),
        rows=tuple(rows),
        kinds=KINDS,
        names=tuple(names),
        spans=tuple(shown),
        aligned=len(set(starts.values())) > 1,
        left_out=left_out,
    )


def newest_step(timeline: Timeline) -> int | None:
    """Return the newest step of a timeline in which something was computed; ``None`` if there is none."""
    steps = (
        span.args.get("step")
        for tracks in timeline.processes.values()
        for span in tracks.get("compute", ())
        if span.category == "compute"
    )
    return max((step for step in steps if isinstance(step, int)), default=None)


def _threshold(spans: Sequence[Span]) -> tuple[int, int]:
    """Return the least nanoseconds of a span that is shown, and the number of those that are not."""
    if len(spans) <= SPANS:
        return 0, 0
    lengths = sorted((span.end_ns - span.start_ns for span in spans), reverse=True)
    least = lengths[SPANS] + 1
    return least, sum(length < least for length in lengths)


def _kind(span: Span) -> int:
    if span.category in ("wait", "transfer"):
        return KINDS.index(span.category)
    if span.category == "link":
        return KINDS.index("transfer")
    action = span.args.get("kind")
    if isinstance(action, str) and action in _ACTIONS:
        return _ACTIONS[action]
    return KINDS.index("update" if span.name.startswith(_UPDATES) else "other")


def _us(time_ns: int) -> float:
    return round(time_ns / 1000, 1)
