"""Timelines of workers: what they waited for is seen, and no track overlaps itself."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine import LinkEvent, LinkUse, TraceEvent
from onebox.engine.compile.routine import LATE, InstructionLabel
from onebox.engine.steps.results import StepTrace
from onebox.plan import Action
from onebox.report import timeline_of
from onebox.report.figures.worker_timeline import DISPATCH_NS, waits
from tests.unit.report.steps import as_measured, foreseen, plan


def event(track: str, name: str, start_us: int, end_us: int, *, worker: int = 0, step: int = 0) -> TraceEvent:
    times = {"start_ns": 1000 * start_us, "end_ns": 1000 * end_us}
    return TraceEvent(worker=worker, track=track, name=name, step=step, **times)


def found(events: list[TraceEvent]) -> list[tuple[str, int, int]]:
    return [(span.name, span.start_ns // 1000, span.end_ns // 1000) for span in waits(events, 0)]


def test_a_wait_is_called_after_what_arrived_last() -> None:
    events = [
        event("compute", "forward", 0, 100),
        event("transfer", "receive for 0B0 from device 1", 50, 250),
        event("transfer", "receive for 0B0 from device 2", 50, 280),
        event("transfer", "send of stage 0 to device 1", 100, 290),
        event("compute", "backward", 300, 400),
    ]
    assert found(events) == [("wait: receive for 0B0 from device 2", 100, 300)]
    (span,) = waits(events, 7)
    assert span.args == {"step": 8, "for": "receive for 0B0 from device 2"}


def test_a_worker_that_was_held_up_by_a_send_says_so() -> None:
    events = [event("compute", "a", 0, 10), event("transfer", "send", 10, 90), event("compute", "b", 95, 100)]
    assert found(events) == [("wait: send", 10, 95)]


def test_what_had_arrived_before_is_not_what_was_waited_for() -> None:
    events = [event("transfer", "reduce", 0, 5), event("compute", "a", 0, 10), event("compute", "b", 50, 60)]
    assert found(events) == [("wait", 10, 50)]


def test_the_wait_for_the_first_input_counts() -> None:
    events = [event("transfer", "receive", 0, 200), event("compute", "forward", 210, 300)]
    assert found(events) == [("wait: receive", 0, 210)]


def test_other_work_is_no_wait_and_nothing_is_waited_for_after_the_last_computation() -> None:
    events = [
        event("compute", "a", 0, 10),
        event("other", "accumulate", 10, 50),
        event("compute", "b", 80, 90),
        event("other", "free", 500, 501),
    ]
    assert found(events) == [("wait", 50, 80)]


def test_dispatch_is_no_wait() -> None:
    least = DISPATCH_NS // 1000
    assert found([event("compute", "a", 0, 10), event("compute", "b", 10 + least - 1, 90)]) == []
    assert found([event("compute", "a", 0, 10), event("compute", "b", 10 + least, 90)]) == [("wait", 10, 10 + least)]


def test_a_step_without_computation_has_no_waits() -> None:
    assert waits([event("other", "loss", 0, 10)], 0) == []


def test_what_is_left_of_a_step_is_of_that_step_in_whichever_window_it_is() -> None:
    labels = [
        InstructionLabel("stage 0 backward 1" + LATE, "compute", Action("B", 0, -1)),
        InstructionLabel("forward", "compute"),
    ]
    trace = StepTrace(step=4, workers={0: (labels, (0, 10, 10, 20), (0, 0, 0, 0))}, micro_batches=2)
    late, own = trace.events()
    assert (late.step, late.begun, late.action) == (4, 3, Action("B", 0, 1))
    assert (own.step, own.begun) == (4, 4)
    shown = {one["name"]: one["args"] for one in written([late, own]) if one["ph"] == "X"}
    assert shown["stage 0 backward 1"] == {"step": 4, "kind": "B", "stage": 0, "micro_batch": 1}
    assert shown["forward"] == {"step": 5}


def test_links_have_a_track_for_each_direction_beside_the_workers() -> None:
    there = LinkUse(source="lab1", target="lab2", size_bytes=3 << 20, busy_s=2.62144)
    back = LinkUse(source="lab2", target="lab1", size_bytes=70, busy_s=0.0)
    links = [
        LinkEvent(step=0, start_ns=1_000, end_ns=5_000, use=there),
        LinkEvent(step=1, start_ns=5_000, end_ns=6_000, use=there),
        LinkEvent(step=0, start_ns=2_000, end_ns=6_000, use=back),
    ]
    shown = written([event("compute", "forward", 1, 2)], links)
    processes = {one["pid"]: one["args"]["name"] for one in shown if one["name"] == "process_name"}
    assert list(processes.values()) == ["worker 0 (cpu)", "links between hosts"]
    tracks = {one["tid"]: one["args"]["name"] for one in shown if one["name"] == "thread_name"}
    found = [
        (tracks[one["tid"]], one["name"], one["ts"], one["dur"], one["args"])
        for one in shown
        if one.get("cat") == "link" and processes[one["pid"]] == "links between hosts"
    ]
    usual = {"size_bytes": 3 << 20, "busy_s": 2.62144}
    assert found == [
        ("lab1 → lab2", "3 MiB at 9.6 Mbit/s", 0.0, 4.0, {"step": 1, **usual}),
        ("lab1 → lab2", "3 MiB at 9.6 Mbit/s", 4.0, 1.0, {"step": 2, **usual}),
        ("lab2 → lab1", "70 bytes", 1.0, 4.0, {"step": 1, "size_bytes": 70, "busy_s": 0.0}),
    ]


TRACK = st.sampled_from(["compute", "transfer", "other"])


@given(st.lists(st.tuples(TRACK, st.integers(0, 60), st.integers(0, 40)), max_size=12))
def test_waits_lie_between_work_and_apart_from_each_other(parts: list[tuple[str, int, int]]) -> None:
    events, clock = [], 0
    for track, gap_us, length_us in parts:  # a worker does one thing after the other; transfers go on beside
        start = clock + gap_us
        events.append(event(track, track, start, start + length_us))
        clock = start + (0 if track == "transfer" else length_us)
    spans = waits(events, 0)
    for first, second in pairwise(spans):
        assert first.end_ns <= second.start_ns
    for span in spans:
        for one in events:
            if one.track != "transfer" and one.end_ns > one.start_ns:
                assert span.end_ns <= one.start_ns or one.end_ns <= span.start_ns


def written(events: list[TraceEvent], links: Sequence[LinkEvent] = ()) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        timeline_of(events, {0: "worker 0 (cpu)", 1: "worker 1 (sim, emulated)"}, links).write(path)
        trace: dict[str, Any] = json.loads(path.read_text())
    return list(trace["traceEvents"])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_trace_of_a_pipeline(schedule: str) -> None:
    _, simulation = foreseen(plan(schedule))
    length_ns = round(simulation.step_s * 1e9)
    events = [e for step in range(2) for e in as_measured(simulation, step, start_ns=step * length_ns)]
    trace = written(events)
    processes = [e["args"]["name"] for e in trace if e["name"] == "process_name"]
    assert processes == ["worker 0 (cpu)", "worker 1 (sim, emulated)", "worker 2"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert {name.split(" #")[0] for name in names.values()} == {"compute", "wait", "transfer"}
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for one in trace:
        if one["ph"] == "X":
            tracks.setdefault((one["pid"], one["tid"]), []).append(one)
            assert one["cat"] == names[one["pid"], one["tid"]].split(" #")[0]
    for track in tracks.values():
        for first, second in pairwise(sorted(track, key=lambda one: float(one["ts"]))):
            assert int(1000 * (first["ts"] + first["dur"])) <= int(1000 * second["ts"]) + 1
    waited = [one for one in trace if one.get("cat") == "wait"]
    assert any(one["args"].get("for", "").startswith("receive for 1F0 from device 0") for one in waited)


def test_computations_say_their_stage_and_micro_batch() -> None:
    action = Action("F", 2, 5)
    one = TraceEvent(worker=0, track="compute", name="forward", step=3, start_ns=0, end_ns=9, action=action)
    (span,) = [e for e in written([one]) if e["ph"] == "X"]
    assert span["args"] == {"step": 4, "kind": "F", "stage": 2, "micro_batch": 5}
