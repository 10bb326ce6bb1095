"""Timelines as Chrome-trace JSON, which Perfetto and chrome://tracing open.

Format: "Trace Event Format", Google, 2016,
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from onebox.drawing import lanes
from onebox.errors import UsageError
from onebox.files import put_file
from onebox.report.run.json_files import to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """An activity with a duration.

    Args:
        name: Its name, such as ``forward``.
        category: Its kind, such as ``compute`` or ``transfer``.
        start_ns: Its beginning, in nanoseconds on the common clock of a timeline.
        end_ns: Its end, not before the beginning.
        args: Further details, as small JSON values.

    Raises:
        UsageError: It ends before it begins.
    """

    name: str
    category: str
    start_ns: int
    end_ns: int
    args: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.end_ns < self.start_ns:
            raise UsageError(f"the span {self.name!r} ends at {self.end_ns} ns, before it begins at {self.start_ns} ns")


_VERSION = 2
_ONE_CLOCK = 2
"""Version of the trace from which on its times are of one clock."""


class _Event(msgspec.Struct):
    """An event of a trace, as far as it is read."""

    ph: str
    name: str
    pid: int
    tid: int
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]
    version: int = 1


class Timeline:
    """Collects spans, by process and track, and writes them as one trace.

    Tracks never overlap: a span that begins before an earlier one of its track has ended goes to another lane,
    ``<track> #2`` and so on. (Perfetto drops a complete event that overlaps another on its track.)

    Example:
        >>> timeline = Timeline()
        >>> span = Span(name="forward", category="compute", start_ns=0, end_ns=1500, args={"step": 1})
        >>> timeline.add("vgpu:0", "compute", [span])
        >>> timeline.write("timeline.json")  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._processes: dict[str, dict[str, list[Span]]] = {}
        self.one_clock = True
        """True if all times are of one clock; those of a trace of version 1 are of each host's own."""

    def add(self, process: str, track: str, spans: Iterable[Span]) -> None:
        """Add spans to a track; the first call creates the track and its process.

        Args:
            process: Name of the group of tracks, such as a device.
            track: Name of the track in it.
            spans: The spans, in any order.
        """
        self._processes.setdefault(process, {}).setdefault(track, []).extend(spans)

    @property
    def processes(self) -> Mapping[str, Mapping[str, Sequence[Span]]]:
        """The spans of each track of each process."""
        return self._processes

    @classmethod
    def from_json(cls, trace: bytes) -> Timeline:
        """Read a trace that :meth:`to_json` has made; spans of several lanes are again of one track.

        Raises:
            UsageError: It is no such trace.
        """
        try:
            found = msgspec.json.decode(trace, type=_Trace)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"this is no trace that onebox has written: {error}") from None
        names: dict[int, str] = {}
        tracks: dict[int, str] = {}
        timeline = cls()
        timeline.one_clock = found.version >= _ONE_CLOCK
        for event in found.traceEvents:
            if event.ph == "M":
                known = names if event.name == "process_name" else tracks
                known[event.tid] = str(event.args.get("name", ""))
            elif event.ph == "X" and event.pid in names and event.dur >= 0:
                start_ns = round(event.ts * 1000)
                span = Span(
                    name=event.name,
                    category=event.cat,
                    start_ns=start_ns,
                    end_ns=start_ns + round(event.dur * 1000),
                    args=event.args,
                )
                timeline.add(names[event.pid], tracks.get(event.tid, "other").partition(" #")[0], [span])
        return timeline

    def to_json(self) -> bytes:
        """Return the trace; times count from the beginning of the earliest span.

        Raises:
            UsageError: A span's args contain something that JSON cannot express.
        """
        return to_json({"version": _VERSION, "displayTimeUnit": "ms", "traceEvents": self._events()})

    def write(self, path: Path | str) -> None:
        """Write the trace atomically; see :meth:`to_json`.

        Args:
            path: The file; one that exists is replaced.

        Raises:
            UsageError: A span's args contain something that JSON cannot express.
            OSError: The file cannot be written.
        """
        put_file(Path(path), self.to_json(), private=False)

    def _events(self) -> list[dict[str, object]]:
        tracks = [track for process in self._processes.values() for track in process.values()]
        origin_ns = min((span.start_ns for track in tracks for span in track), default=0)
        numbers = count(1)  # one sequence for processes and tracks, so that no track has its process's number
        events: list[dict[str, object]] = []
        for process, tracks_by_name in self._processes.items():
            pid = next(numbers)
            events.append(_name("process_name", process, pid, pid))
            for track, spans in tracks_by_name.items():
                own_lanes = lanes(spans, lambda span: (span.start_ns, span.end_ns)) or [[]]
                for lane_number, lane in enumerate(own_lanes, start=1):
                    tid = next(numbers)
                    name = track if lane_number == 1 else f"{track} #{lane_number}"
                    events.append(_name("thread_name", name, pid, tid))
                    events.extend(_complete(span, origin_ns, pid, tid) for span in lane)
        return events


def _name(kind: str, name: str, pid: int, tid: int) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(span: Span, origin_ns: int, pid: int, tid: int) -> dict[str, object]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.category,
        "pid": pid,
        "tid": tid,
        "ts": _microseconds(span.start_ns - origin_ns),
        "dur": _microseconds(span.end_ns - span.start_ns),
        "args": span.args,
    }


def _microseconds(time_ns: int) -> float:
    """Convert nanoseconds to microseconds that Perfetto reads back as the same nanoseconds.

    Perfetto multiplies by 1000 and cuts off the fraction (``CoerceToTs`` in its JSON importer), which would turn 1.001
    us into 1000 ns, and give neighbours an overlap of 1 ns.
    """
    time_us = time_ns / 1000
    return time_us if int(time_us * 1000.0) >= time_ns else math.nextafter(time_us, math.inf)
