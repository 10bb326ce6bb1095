"""Memory predicted beside measured: comparisons, lines and tables."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from onebox.engine import TraceEvent
from onebox.engine.memory.timeline import MemoryPeak, MemoryTimeline, MemoryUse, ResidentTensor
from onebox.plan import Action, Plan, PolicyReason, Stage
from onebox.report.tables.memory import (
    activation_policy_table,
    compare_memory,
    curve_lines,
    peak_table,
    residents_table,
    sparkline,
)
from onebox.sizes import bytes_text

MIB = 1 << 20
FORWARD, BACKWARD = Action("F", 0, 0), Action("B", 0, 0)


def curve(device: int = 0) -> MemoryTimeline:
    """Return the curve of a device with three instructions."""
    return MemoryTimeline(
        device=device,
        start_bytes=10 * MIB,
        uses=(
            MemoryUse(name="forward 0", action=FORWARD, peak_bytes=30 * MIB, used_bytes=25 * MIB),
            MemoryUse(name="backward 0", action=BACKWARD, peak_bytes=40 * MIB, used_bytes=15 * MIB),
            MemoryUse(name="free", action=None, peak_bytes=15 * MIB, used_bytes=10 * MIB),
        ),
    )


def measured(found: MemoryTimeline, step: int = 2, *, more: int = 0) -> list[TraceEvent]:
    """Return the events of a step that used what was predicted, and some more bytes in its backward."""
    return [
        TraceEvent(
            worker=found.device,
            track="compute" if use.action else "other",
            name=use.name,
            step=step,
            start_ns=1000 * number,
            end_ns=1000 * number + 800,
            action=use.action,
            peak_bytes=use.peak_bytes + more * (use.action == BACKWARD),
            used_bytes=use.used_bytes,
        )
        for number, use in enumerate(found.uses)
    ]


def shown(table: Table, width: int = 100) -> str:
    """Return what a table says."""
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_a_step_that_used_what_was_predicted_differs_nowhere() -> None:
    curves = {0: curve(), 1: curve(1)}
    events = [*measured(curves[0]), *measured(curves[1]), *measured(curves[0], step=3, more=7)]
    found = compare_memory(curves, events, 2)
    assert [(one.device, one.difference_bytes, one.where) for one in found] == [(0, 0, ""), (1, 0, "")]
    assert found[0].peak_bytes.predicted == found[0].peak_bytes.measured == 40 * MIB


def test_the_largest_difference_is_named_with_its_instruction() -> None:
    (found,) = compare_memory({0: curve()}, measured(curve(), more=4096), 2)
    assert (found.difference_bytes, found.where) == (4096, "backward 0")
    assert found.to_data()["peak_bytes"]["measured"] == 40 * MIB + 4096
    assert compare_memory({0: curve()}, [], 2) == (), "what was not measured is not compared"


def test_of_a_step_that_was_done_again_the_last_time_counts_and_one_of_another_plan_does_not() -> None:
    again = [*measured(curve(), more=9), *measured(curve())]
    assert compare_memory({0: curve()}, again, 2)[0].difference_bytes == 0
    other = [event for event in measured(curve()) if event.name != "free"]
    assert compare_memory({0: curve()}, other, 2) == ()


@given(st.lists(st.integers(0, 100), min_size=1, max_size=50), st.integers(1, 60))
def test_a_sparkline_shows_the_highest_of_each_column(values: list[int], width: int) -> None:
    drawn = sparkline(values, 100, width)
    assert len(drawn) == min(width, len(values))
    assert max(drawn) == sparkline([max(values)], 100, 1)


def test_lines_say_what_a_full_bar_is_and_where_the_peak_is() -> None:
    lines = curve_lines({0: curve(), 11: curve(11)}, {0: 80 * MIB, 11: None}, 20)
    assert lines == [
        " 0 |▃▄▂| a full bar is its budget; the peak is in backward 0",
        "11 |▆█▃| a full bar is its peak; the peak is in backward 0",
    ]


def test_the_table_of_peaks_has_measurements_where_there_are_some() -> None:
    curves = {0: curve(), 1: curve(1)}
    said = shown(peak_table(curves, {0: 30 * MIB, 1: None}, emulated=[1]))
    assert "133.3% too much" in said
    assert "1*" in said
    assert "measured" not in said
    compared = compare_memory(curves, measured(curves[0]), 2)
    said = shown(peak_table(curves, {0: 80 * MIB}, compared))
    assert "measured" in said
    assert "50.0%" in said


def test_what_an_allocator_has_given_out_has_a_column_of_its_own() -> None:
    said = shown(peak_table({0: curve()}, {0: 80 * MIB}, allocated={0: 42 * MIB}), width=140)
    assert "by the allocator" in said
    assert "42 MiB" in said
    assert "by the allocator" not in shown(peak_table({0: curve()}, {0: 80 * MIB}))


def test_the_table_of_residents_has_sums_and_the_largest() -> None:
    residents = (
        ResidentTensor(sort="activations", name="relu float32[8]", size_bytes=6 * MIB),
        ResidentTensor(sort="parameters", name="model.weight", size_bytes=3 * MIB),
        ResidentTensor(sort="activations", name="mul float32[4]", size_bytes=2 * MIB),
        ResidentTensor(sort="batch", name="tensor 0 of micro-batch 0", size_bytes=MIB),
    )
    peak = MemoryPeak(device=0, size_bytes=12 * MIB, name="f", action=None, operator="", residents=residents)
    assert peak.sorts == {"activations": 8 * MIB, "parameters": 3 * MIB, "batch": MIB}
    said = shown(residents_table(peak, most=2))
    assert "relu float32[8]" in said
    assert "mul" not in said, "it is not among the two largest"
    assert "66.7%" in said
    assert "8.3%" in said, "a sort that none of the largest is of has its sum all the same"


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1023 * 1024, "1,023 KiB"), (25 << 28, "6.25 GiB")],
)
def test_bytes_have_three_digits(size_bytes: int, text: str) -> None:
    assert bytes_text(size_bytes) == text


def test_the_table_of_fates_says_of_each_stage_what_it_saves_costs_and_why() -> None:
    stages = (
        Stage(segments=("a", "b"), replicas=((0,),), shares=(1.0,), policy="recompute"),
        Stage(segments=("c",), replicas=((0,),), shares=(1.0,)),
    )
    plan = Plan(stages=stages, micro_batch=2)
    common: Any = {"device": 0, "again_s": 1e-3, "wait_s": 0.0}
    freed = PolicyReason(
        stage=0,
        policy="recompute",
        segments=2,
        activation_bytes=3 * MIB,
        saved_bytes=MIB,
        paid_s=2e-3,
        text="x",
        **common,
    )
    kept = PolicyReason(
        stage=1, policy="keep", segments=1, activation_bytes=512, saved_bytes=0, paid_s=0.0, text="y", **common
    )
    said = shown(activation_policy_table([freed, kept], plan, ["a", "b", "c"], [0]), width=120)
    for part in ("a … b (2)", "0*", "recompute", "3 MiB", "1 MiB", "2.00 ms", "512 B", "* emulated"):
        assert part in said, part
