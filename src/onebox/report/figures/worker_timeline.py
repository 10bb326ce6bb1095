"""Timelines of a run: compute, wait, transfer and other tracks for each worker, and the links between hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from onebox.report.figures.chrome_trace import Span, Timeline
from onebox.sizes import bit_rate_text, size_text

if TYPE_CHECKING:  # importing the engine takes a second, and tables do not need it
    from onebox.engine import LinkEvent, TraceEvent

TRACKS = ("compute", "wait", "transfer", "other")
"""The tracks of a worker, in their order."""

LINKS = "links between hosts"
"""Name of the process whose tracks are links."""

DISPATCH_NS = 5_000
"""Shorter gaps between computations are the time to read the next instruction, and not waits."""

_LATE = " of the step before"
"""Suffix of the engine's names of late actions."""


def timeline_of(events: Iterable[TraceEvent], names: Mapping[int, str], links: Iterable[LinkEvent] = ()) -> Timeline:
    """Return the timeline of workers' events, and of what links between hosts carried.

    Args:
        events: From :meth:`~onebox.engine.Trainer.events`.
        names: Name of each worker.
        links: From :meth:`~onebox.engine.Trainer.link_events`.

    Returns:
        A timeline with a process for each worker, in which transfers that overlap are on several tracks, and one with a
            track for each direction of a link, if links carried anything.
    """
    timeline = Timeline()
    rows: dict[int, dict[int, list[TraceEvent]]] = {}
    for event in events:
        rows.setdefault(event.worker, {}).setdefault(event.step, []).append(event)
    for worker, steps in sorted(rows.items()):
        spans: dict[str, list[Span]] = {track: [] for track in TRACKS}
        for step, own in steps.items():
            for event in own:
                spans.setdefault(event.track, []).append(_span(event))
            spans["wait"] += waits(own, step)
        for track, found in spans.items():
            if found:
                timeline.add(names.get(worker, f"worker {worker}"), track, found)
    for link in links:
        timeline.add(LINKS, f"{link.use.source} → {link.use.target}", [_carried(link)])
    return timeline


def waits(events: Sequence[TraceEvent], step: int) -> list[Span]:
    """Return a worker's waits in a step: gaps between its first event and its last computation.

    Other work, such as adding up gradients, is not a wait. A wait is named after the last transfer that arrived in it
    or, without one, after the last that the worker sent.

    Args:
        events: The events of one worker in one step.
        step: The step.
    """
    busy = sorted(
        ((event.start_ns, event.end_ns, event.track) for event in events if event.track != "transfer"),
        key=lambda one: one[:2],
    )
    last = max((end for _, end, track in busy if track == "compute"), default=None)
    if last is None:
        return []
    arrivals = [event for event in events if event.track == "transfer"]
    until = min(event.start_ns for event in events)
    found = []
    for start, end, _ in busy:
        if start > last:
            break
        if start - until >= DISPATCH_NS:
            found.append(_wait(until, start, arrivals, step))
        until = max(until, end)
    return found


def _wait(start_ns: int, end_ns: int, arrivals: Iterable[TraceEvent], step: int) -> Span:
    """Return a wait, named after its last arrival, if any."""
    inside = [event for event in arrivals if start_ns < event.end_ns <= end_ns]
    cause = max(inside, key=lambda event: (not event.name.startswith("send"), event.end_ns), default=None)
    args: dict[str, object] = {"step": step + 1}
    if cause is not None:
        args["for"] = cause.name
    name = f"wait: {cause.name}" if cause is not None else "wait"
    return Span(name=name, category="wait", start_ns=start_ns, end_ns=end_ns, args=args)


def _carried(link: LinkEvent) -> Span:
    """Return a link's use in a step, named after the bytes and their rate while the link was busy."""
    size_bytes, busy_s = link.use.size_bytes, link.use.busy_s
    args: dict[str, object] = {"step": link.step + 1, "size_bytes": size_bytes, "busy_s": busy_s}
    rate = f" at {bit_rate_text(size_bytes / busy_s)}" if busy_s > 0 else ""
    name = f"{size_text(size_bytes)}{rate}"
    return Span(name=name, category="link", start_ns=link.start_ns, end_ns=link.end_ns, args=args)


def _span(event: TraceEvent) -> Span:
    args: dict[str, object] = {"step": event.begun + 1}
    if event.action is not None:
        args |= {"kind": event.action.kind, "stage": event.action.stage, "micro_batch": event.action.micro_batch}
    name = event.name.removesuffix(_LATE) if event.late else event.name  # the step is shown otherwise
    return Span(name=name, category=event.track, start_ns=event.start_ns, end_ns=event.end_ns, args=args)
