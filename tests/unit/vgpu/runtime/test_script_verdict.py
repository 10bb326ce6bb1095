"""The thread that says what a script is bound by while it runs."""

from __future__ import annotations

import queue

import pytest

from onebox.vgpu.runtime import script_verdict
from onebox.vgpu.runtime.script_time import DeviceBusy, ScriptFigures
from onebox.vgpu.runtime.script_verdict import ProgressLines, say


def test_each_line_is_of_the_time_since_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: queue.Queue[ScriptFigures] = queue.Queue()
    said: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(script_verdict, "_FIRST_S", 0.0)
    monkeypatch.setattr(script_verdict, "say", said.put)
    device = [DeviceBusy("cuda:0", 0.0), DeviceBusy("cuda:0", 9.0), DeviceBusy("cuda:0", 10.0)]
    steps.put(ScriptFigures())
    steps.put(ScriptFigures(elapsed_s=10.0, devices=(device[1],)))
    steps.put(ScriptFigures(elapsed_s=20.0, reading_s=5.0, devices=(device[2],)))
    last = ScriptFigures(elapsed_s=20.0, reading_s=5.0, devices=(device[2],))
    lines = ProgressLines(lambda: last if steps.empty() else steps.get(), "rank 0: ")
    assert said.get(timeout=60) == (
        "rank 0: 10.0 s, bound by the device cuda:0; busy cuda:0 90 %: faster devices, or more of them, help"
    )
    assert said.get(timeout=60) == (
        "rank 0: 50 % of 10.0 s waited for values; busy cuda:0 10 %: read values less often, such as at each tenth step"
    )
    lines.close()
    lines.close()
    assert said.empty()  # nothing more has happened


def test_nothing_is_said_where_stderr_is_closed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say("")
    say("a line")
    assert capsys.readouterr().err == "onebox: a line\n"

    class Closed:
        def write(self, text: str) -> None:
            raise OSError("closed")

    monkeypatch.setattr("sys.stderr", Closed())
    say("another line")
