"""The timeline of a script: tracks of its threads and of its devices."""

from __future__ import annotations

from collections import Counter

from onebox.report.figures.chrome_trace import Span
from onebox.report.figures.script_timeline import script_timeline
from onebox.vgpu.runtime.script_events import MessageEvent, ScriptEvent, ScriptEvents
from onebox.vgpu.runtime.script_time import ScriptLine

STEP, READ = ScriptLine("/no/train.py", 15), ScriptLine("/no/train.py", 17)


def test_threads_and_devices_have_their_tracks() -> None:
    events = ScriptEvents()
    events.of_threads += [
        ScriptEvent("MainThread", "upload", STEP, 0, 10, 4096),
        ScriptEvent("MainThread", "wait", READ, 20, 90, 0),
        ScriptEvent("other", "ahead", None, 20, 30, 0),
    ]
    many = Counter({f"aten.{number}": 20 - number for number in range(12)})
    events.of_devices += [
        MessageEvent(1, None, READ, Counter(), 60, 70, 5000),
        MessageEvent(0, STEP, READ, many, 30, 60, 0),
        MessageEvent(0, READ, None, Counter(), 70, 80, 0),
    ]
    found = script_timeline(events, lambda worker: f"cuda:{worker}").processes
    assert list(found) == ["script", "cuda:0", "cuda:1"]
    step, read = {"line": "train.py:15", "text": ""}, {"line": "train.py:17", "text": ""}
    assert found["script"] == {
        "MainThread": [
            span("upload train.py:15", "upload", 0, 10, **step, size_bytes=4096),
            span("wait train.py:17", "wait", 20, 90, **read),
        ],
        "other": [span("wait for the devices", "ahead", 20, 30)],
    }
    names = ", ".join(f"aten.{number} {20 - number}" for number in range(8))
    assert found["cuda:0"]["operators"] == [
        span("174 operators up to train.py:17", "compute", 30, 60, **read, after="train.py:15", operators=names),
        span("reply to the end", "compute", 70, 80, after="train.py:17"),
    ]
    assert found["cuda:1"]["operators"] == [span("reply to train.py:17", "compute", 60, 70, **read, waited_us=5)]


def span(name: str, category: str, start_ns: int, end_ns: int, **args: object) -> Span:
    return Span(name=name, category=category, start_ns=start_ns, end_ns=end_ns, args=args)
