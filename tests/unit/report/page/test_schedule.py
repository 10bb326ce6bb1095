"""The schedule of a step as rows of spans, of a run and read again from its trace."""

from __future__ import annotations

from itertools import pairwise

import pytest

from onebox.errors import UsageError
from onebox.report import Span, Timeline, timeline_of
from onebox.report.figures.worker_timeline import LINKS
from onebox.report.page.schedule import KINDS, SPANS, newest_step, schedule_view
from onebox.report.page.state import ScheduleView
from tests.unit.report.steps import as_measured, foreseen, plan

NAMES = {0: "worker 0 (cpu)", 1: "worker 1 (cpu)", 2: "worker 2 (cpu)"}


def timeline(*, steps: int = 2) -> Timeline:
    _, simulation = foreseen(plan())
    events = [each for step in range(steps) for each in as_measured(simulation, step, start_ns=step * 10**9)]
    return timeline_of(events, NAMES)


def kinds_of(view: ScheduleView) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for _, kind, _, _, name in view.spans:
        found.setdefault(view.kinds[kind], set()).add(view.names[name])
    return found


def test_what_each_device_did_in_a_step() -> None:
    view = schedule_view(timeline(), 2, {})
    assert view.step == 2 and not view.left_out
    assert {row.process for row in view.rows} == set(NAMES.values())
    found = kinds_of(view)
    assert {"0F0", "1F3", "2F0"} <= found["forward"]
    assert "1W0" in found["weight gradient"] and "2I1" in found["input gradient"]
    assert found["update"] == {"optimizer"}
    assert any(name.startswith("wait") for name in found["wait"])
    assert found["transfer"]


def test_spans_are_within_the_step_and_do_not_overlap_in_a_row() -> None:
    view = schedule_view(timeline(), 1, {})
    rows: dict[int, list[tuple[float, float]]] = {}
    for row, _, begin_us, length_us, _ in view.spans:
        assert begin_us >= 0 and begin_us + length_us <= view.length_us + 0.2
        rows.setdefault(row, []).append((begin_us, begin_us + length_us))
    for spans in rows.values():
        ordered = sorted(spans)
        assert all(end <= begin + 0.2 for (_, end), (begin, _) in pairwise(ordered))


def test_a_trace_that_is_read_again_gives_the_same_view() -> None:
    made = timeline()
    again = Timeline.from_json(made.to_json())
    assert newest_step(made) == newest_step(again) == 2
    one, other = schedule_view(made, 2, {}), schedule_view(again, 2, {})
    assert kinds_of(one) == kinds_of(other)
    assert len(one.spans) == len(other.spans)
    assert other.length_us == pytest.approx(one.length_us, abs=0.5)


def of_an_earlier_version() -> Timeline:
    """A timeline whose times are of each host's own clock."""
    return Timeline.from_json(b'{"traceEvents": []}')


def test_a_timeline_of_one_clock_is_shown_as_it_is() -> None:
    made = Timeline()
    for process, start_ns in (("worker 0 (cpu on lab1)", 0), ("worker 1 (cpu on lab2)", 500)):
        span = Span(name="0F0", category="compute", start_ns=start_ns, end_ns=start_ns + 1000, args={"step": 1})
        made.add(process, "compute", [span])
    for each in (made, Timeline.from_json(made.to_json())):
        view = schedule_view(each, 1, {"worker 0 (cpu on lab1)": "lab1", "worker 1 (cpu on lab2)": "lab2"})
        assert not view.aligned and view.length_us == 1.5
        assert [begin for _, _, begin, _, _ in view.spans] == [0.0, 0.5]


def test_hosts_with_clocks_of_their_own_begin_together() -> None:
    made = of_an_earlier_version()
    for process, start_ns in (("worker 0 (cpu)", 0), ("worker 1 (cpu)", 10**15)):
        span = Span(name="0F0", category="compute", start_ns=start_ns, end_ns=start_ns + 1000, args={"step": 1})
        made.add(process, "compute", [span])
    view = schedule_view(made, 1, {"worker 0 (cpu)": "lab1", "worker 1 (cpu)": "lab2"})
    assert view.aligned and view.length_us == 1.0
    assert {begin for _, _, begin, _, _ in view.spans} == {0.0}
    same = schedule_view(made, 1, dict.fromkeys(NAMES.values(), "localhost"))
    assert not same.aligned and same.length_us > 10**11


def test_a_link_has_the_clock_of_the_host_that_sends() -> None:
    made = of_an_earlier_version()
    for process, track, start_ns in (
        ("worker 0 (cpu)", "compute", 0),
        ("worker 1 (cpu)", "compute", 10**15),
        (LINKS, "lab1 → lab2", 500),
        (LINKS, "lab2 → lab1", 10**15 + 500),
    ):
        span = Span(name=track, category="link", start_ns=start_ns, end_ns=start_ns + 1000, args={"step": 1})
        made.add(process, track, [span])
    view = schedule_view(made, 1, {"worker 0 (cpu)": "lab1", "worker 1 (cpu)": "lab2"})
    assert view.aligned and view.length_us == 1.5
    assert [begin for _, _, begin, _, _ in view.spans] == [0.0, 0.0, 0.5, 0.5]


def test_the_number_of_spans_is_bounded_and_the_shortest_are_left_out() -> None:
    made = Timeline()
    spans = [
        Span(name="0F0", category="compute", start_ns=n * 10**6, end_ns=n * 10**6 + 10 + n, args={"step": 1})
        for n in range(SPANS + 100)
    ]
    made.add("worker 0 (cpu)", "compute", spans)
    view = schedule_view(made, 1, {})
    assert len(view.spans) + view.left_out == SPANS + 100
    assert len(view.spans) <= SPANS
    assert min(length for _, _, _, length, _ in view.spans) >= 0.1


def test_a_step_that_is_not_there_is_empty() -> None:
    view = schedule_view(timeline(), 99, {})
    assert view.rows == () and view.spans == () and view.kinds == KINDS
    assert newest_step(Timeline()) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"traceEvents": [{"ph": "X"}]}', b"\xff"], ids=str)
def test_what_is_no_trace_is_refused(content: bytes) -> None:
    with pytest.raises(UsageError, match="no trace"):
        Timeline.from_json(content)
