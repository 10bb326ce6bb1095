"""What the page shows of a script's time."""

from __future__ import annotations

from onebox.report.page.script_pool import script_view
from onebox.report.page.state import TimePart, WaitingLine
from onebox.vgpu.runtime.script_time import DeviceBusy, LineWaits, ScriptFigures, ScriptLine


def test_the_parts_of_the_time_and_the_lines_that_wait() -> None:
    lines = tuple(LineWaits(ScriptLine("/no/train.py", number), 2, 0.1) for number in range(30))
    figures = ScriptFigures(
        elapsed_s=10.0, reading_s=3.0, uploading_s=1.0, ahead_s=0.5, devices=(DeviceBusy("cuda:0", 5.0),), lines=lines
    )
    view = script_view(figures)
    assert view is not None and view.bound.startswith("30 % of 10.0 s waited for values, most at train.py:0 (")
    assert view.parts == (
        TimePart(name="waiting for values", share=0.3),
        TimePart(name="uploading", share=0.1),
        TimePart(name="too far ahead of devices", share=0.05),
        TimePart(name="the script itself", share=0.55),
    )
    assert len(view.lines) == 10
    assert view.lines[0] == WaitingLine(place="train.py:0", text="", waits=2, share=0.01)


def test_a_script_without_devices_has_no_such_figures() -> None:
    assert script_view(ScriptFigures(elapsed_s=3.0)) is None
