"""Timelines as Chrome-trace JSON."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.report import Span, Timeline
from onebox.report.figures.chrome_trace import _microseconds


def span(start_ns: int, end_ns: int, name: str = "forward", **args: object) -> Span:
    return Span(name=name, category="compute", start_ns=start_ns, end_ns=end_ns, args=args)


def written(timeline: Timeline) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        timeline.write(path)
        trace = json.loads(path.read_text())
    assert set(trace) == {"version", "displayTimeUnit", "traceEvents"} and trace["version"] == 2
    return trace["traceEvents"]  # type: ignore[no-any-return]


def read_ns(time_us: float) -> int:
    """Read a time as Perfetto does: multiply, cut off the fraction."""
    return int(time_us * 1000.0)


def test_the_whole_trace_of_two_tracks() -> None:
    timeline = Timeline()
    timeline.add("vgpu:0", "compute", [span(10_000, 12_500, step=1)])
    timeline.add("vgpu:0", "compute", [span(12_500, 13_000, "backward")])
    timeline.add("vgpu:1", "transfer", [span(11_000, 11_000)])
    common = {"ph": "X", "cat": "compute"}
    assert written(timeline) == [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 1, "args": {"name": "vgpu:0"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "compute"}},
        {**common, "name": "forward", "pid": 1, "tid": 2, "ts": 0.0, "dur": 2.5, "args": {"step": 1}},
        {**common, "name": "backward", "pid": 1, "tid": 2, "ts": 2.5, "dur": 0.5, "args": {}},
        {"ph": "M", "name": "process_name", "pid": 3, "tid": 3, "args": {"name": "vgpu:1"}},
        {"ph": "M", "name": "thread_name", "pid": 3, "tid": 4, "args": {"name": "transfer"}},
        {**common, "name": "forward", "pid": 3, "tid": 4, "ts": 1.0, "dur": 0.0, "args": {}},
    ]


def test_a_span_that_overlaps_goes_to_a_further_lane() -> None:
    timeline = Timeline()
    spans = [span(5, 15, "b"), span(0, 10, "a"), span(6, 7, "c"), span(10, 20, "d")]
    timeline.add("vgpu:0", "transfer", spans)
    events = written(timeline)
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    placed = {event["name"]: lanes[event["tid"]] for event in events if event["ph"] == "X"}
    assert placed == {"a": "transfer", "b": "transfer #2", "c": "transfer #3", "d": "transfer"}


def test_an_empty_timeline_and_an_empty_track_are_traces_too() -> None:
    timeline = Timeline()
    assert written(timeline) == []
    timeline.add("vgpu:0", "compute", [])
    assert [event["ph"] for event in written(timeline)] == ["M", "M"]


def test_a_span_may_not_end_before_it_begins() -> None:
    with pytest.raises(UsageError, match=r"'forward' ends at 1 ns, before it begins at 2 ns"):
        span(2, 1)


def test_args_that_are_no_json_are_refused() -> None:
    timeline = Timeline()
    timeline.add("vgpu:0", "compute", [span(0, 1, tensor=object())])
    with pytest.raises(UsageError, match="cannot write this as JSON"):
        written(timeline)


spans_of_a_run = st.lists(
    st.builds(
        lambda start_ns, duration_ns: span(start_ns, start_ns + duration_ns),
        # far from 0, as on a machine that has been up for years; apart by nanoseconds or by a day
        st.integers(2**57, 2**57 + 5000) | st.integers(2**57, 2**57 + 10**14),
        st.integers(0, 2000),
    ),
    max_size=40,
)


@given(st.dictionaries(st.tuples(st.sampled_from("ab"), st.sampled_from("xy")), spans_of_a_run))
def test_no_two_events_of_a_track_overlap_and_none_is_lost(tracks: dict[tuple[str, str], list[Span]]) -> None:
    timeline = Timeline()
    for (process, track), spans in tracks.items():
        timeline.add(process, track, spans)
    events = written(timeline)
    everything = [one for spans in tracks.values() for one in spans]
    origin_ns = min((one.start_ns for one in everything), default=0)

    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start_ns = read_ns(event["ts"])
            lanes[event["pid"], event["tid"]].append((start_ns, start_ns + read_ns(event["dur"])))
    for times in lanes.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(times))

    kept = Counter(time for times in lanes.values() for time in times)
    assert kept == Counter((one.start_ns - origin_ns, one.end_ns - origin_ns) for one in everything)
    named = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    assert len(named) == len(set(named))
    assert set(lanes) <= set(named)


@given(st.integers(0, 2**52))
def test_times_are_read_back_to_the_nanosecond(time_ns: int) -> None:
    time_us = _microseconds(time_ns)
    assert read_ns(time_us) == time_ns
    assert round(time_us * 1000) == time_ns
