"""The memory of a step as figures: where instructions stand, and what a figure says."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from onebox.engine.memory.timeline import MemoryTimeline, MemoryUse
from onebox.errors import UsageError
from onebox.plan import Action
from onebox.report.figures.memory_figure import draw_memory, measured_rows, predicted_rows
from tests.unit.report.figures.test_step_figure import texts
from tests.unit.report.steps import as_measured, foreseen, plan

MIB = 1 << 20


def curves() -> dict[int, MemoryTimeline]:
    """Return what the devices of a simulated plan would use: some more in each action, and the optimizer."""
    _, simulation = foreseen(plan("zb-h1"))
    found: dict[int, list[Action]] = {}
    for span in simulation.spans:
        found.setdefault(span.device, []).append(span.action)
    return {
        device: MemoryTimeline(
            device=device,
            start_bytes=MIB,
            uses=(
                *(
                    MemoryUse(
                        name=str(action), action=action, peak_bytes=(3 + place) * MIB, used_bytes=(2 + place) * MIB
                    )
                    for place, action in enumerate(actions)
                ),
                MemoryUse(name="optimizer", action=None, peak_bytes=2 * MIB, used_bytes=MIB),
            ),
        )
        for device, actions in found.items()
    }


def test_predicted_instructions_stand_where_their_actions_were_simulated() -> None:
    _, simulation = foreseen(plan("zb-h1"))
    for row in predicted_rows(curves(), simulation, {0: 9 * MIB}):
        spans = [(one.start_s, one.end_s) for one in simulation.spans if one.device == row.device]
        assert [(one.start_s, one.end_s) for one in row.moments[:-1]] == spans
        assert row.moments[-1].kind == "optimizer"
        assert row.moments[-1].end_s == simulation.step_s
        assert all(one.peak is None for one in row.moments)
        assert row.budget_bytes == (9 * MIB if row.device == 0 else None)


def test_the_calls_of_one_action_share_its_time() -> None:
    _, simulation = foreseen(plan())
    span = simulation.spans[0]
    half = MemoryUse(name="forward", action=span.action, peak_bytes=2, used_bytes=1)
    curve = MemoryTimeline(device=span.device, start_bytes=0, uses=(half, half))
    (row,) = predicted_rows({span.device: curve}, simulation, {})
    middle = (span.start_s + span.end_s) / 2
    times = [time for one in row.moments for time in one[:2]]
    assert times == pytest.approx([span.start_s, middle, middle, span.end_s])


def test_measured_instructions_stand_where_they_ran_and_do_not_overlap() -> None:
    events = [event for event in as_measured(foreseen(plan("zb-h1"))[1], 4) if event.worker == 0]
    events.sort(key=lambda event: event.start_ns)
    uses = tuple(MemoryUse(name=event.name, action=event.action, peak_bytes=5, used_bytes=4) for event in events)
    (row,) = measured_rows({0: MemoryTimeline(device=0, start_bytes=1, uses=uses)}, events, 4, {})
    assert row.moments[0].start_s == 0
    assert all(one.end_s <= later.start_s for one, later in pairwise(row.moments))
    assert {one.peak for one in row.moments} == {0}, "these events say nothing of memory"
    with pytest.raises(UsageError, match="no events of step 5"):
        measured_rows({}, events, 5, {})


def test_a_figure_names_devices_peaks_and_budgets(tmp_path: Path) -> None:
    rows = predicted_rows(curves(), foreseen(plan("zb-h1"))[1], {0: 20 * MIB, 1: 9999 * MIB})
    draw_memory(rows, tmp_path / "memory.svg", title="three stages", emulated=[2])
    ElementTree.parse(tmp_path / "memory.svg")
    said = texts(tmp_path / "memory.svg")
    assert {"three stages", "predicted", "budget", "peak", "forward", "optimizer", "time in ms", "MiB"} <= set(said)
    assert "measured" not in said
    assert any(text.startswith("device 0: peak") and text.endswith("budget 20 MiB") for text in said)
    assert any(text.startswith("device 2, emulated: peak") for text in said)
    first = (tmp_path / "memory.svg").read_bytes()
    draw_memory(rows, tmp_path / "memory.svg", title="three stages", emulated=[2])
    assert (tmp_path / "memory.svg").read_bytes() == first, "the same figure is the same file"


def test_a_measured_curve_is_told_apart(tmp_path: Path) -> None:
    rows = predicted_rows(curves(), foreseen(plan("zb-h1"))[1], {})
    seen = [one._replace(peak=one.predicted_peak + MIB, used=one.predicted_used) for one in rows[0].moments]
    draw_memory([type(rows[0])(**{**vars(rows[0]), "moments": tuple(seen)})], tmp_path / "memory.svg")
    assert "measured" in texts(tmp_path / "memory.svg")


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"allowed are \.png, \.svg, \.pdf"):
        draw_memory([], tmp_path / "memory.gif")
