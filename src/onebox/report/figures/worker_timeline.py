"""From what workers did to a timeline: compute, wait, transfer and other tracks for each worker. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from onebox.report.figures.chrome_trace import Span, Timeline

if TYPE_CHECKING:  # the engine takes a second to be imported, which tables alone do not need
    from onebox.engine import TraceEvent

TRACKS = ("compute", "wait", "transfer", "other")
"""In the order in which they are shown."""

DISPATCH_NS = 5_000
"""Shorter gaps between computations are what reading the next instruction takes, and no waits."""

_LATE = " of the step before"
"""What an engine says behind the name of an action for that."""


def timeline_of(events: Iterable[TraceEvent], names: Mapping[int, str]) -> Timeline:
    """Return the timeline of what workers did.

    Args:
        events: From :meth:`~onebox.engine.Trainer.events`.
        names: What each worker is called.

    Returns:
        A timeline with a process for each worker. Transfers that overlap are on several tracks.
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
    return timeline


def waits(events: Sequence[TraceEvent], step: int) -> list[Span]:
    """Return when a worker waited in a step: while it had begun the step, or computed, and did not compute on.

    What it does beside computing, such as adding gradients up, is no wait. A wait in which something arrived is called
    after what arrived last; one in which nothing did, but the worker sent something, after that.

    Args:
        events: What one worker did in one step.
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
    """Return a wait, named after what arrived last in it, if something did."""
    inside = [event for event in arrivals if start_ns < event.end_ns <= end_ns]
    cause = max(inside, key=lambda event: (not event.name.startswith("send"), event.end_ns), default=None)
    args: dict[str, object] = {"step": step + 1}
    if cause is not None:
        args["for"] = cause.name
    name = f"wait: {cause.name}" if cause is not None else "wait"
    return Span(name=name, category="wait", start_ns=start_ns, end_ns=end_ns, args=args)


def _span(event: TraceEvent) -> Span:
    args: dict[str, object] = {"step": event.begun + 1}
    if event.action is not None:
        args |= {"stage": event.action.stage, "micro_batch": event.action.micro_batch}
    name = event.name.removesuffix(_LATE) if event.late else event.name  # the step is said
    return Span(name=name, category=event.track, start_ns=event.start_ns, end_ns=event.end_ns, args=args)
