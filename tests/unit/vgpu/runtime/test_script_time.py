"""Where the time of a script goes: sums over its lines and threads, and what is said of them."""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Iterator
from pathlib import Path

import pytest

from onebox.vgpu.runtime import script_lines, script_time
from onebox.vgpu.runtime.script_lines import current_line, place_of, text_of
from onebox.vgpu.runtime.script_time import DeviceBusy, LineWaits, ScriptFigures, ScriptLine, ScriptTime
from onebox.vgpu.runtime.script_verdict import LEAST_S, last_line, verdict

S = 1_000_000_000
LOSS, NORM = ScriptLine("/no/train.py", 88), ScriptLine("/no/train.py", 90)


def waits(time: ScriptTime, line: ScriptLine | None, since_s: int, now_s: int, **how: object) -> None:
    time.begin_wait(since_s * S)
    time.end_wait(line, since_s * S, now_s * S, **how)  # type: ignore[arg-type]


def test_each_part_of_the_time_is_one_of_four() -> None:
    time = ScriptTime()
    time.begin(10 * S)
    time.begin(50 * S)  # another pool's devices
    waits(time, NORM, 11, 12)
    waits(time, LOSS, 20, 25, arriving_ns=2 * S)
    waits(time, LOSS, 30, 31)
    waits(time, None, 40, 43, ahead=True)
    time.uploaded(1000, 4 * S)
    found = time.figures(30 * S + 10 * S, [DeviceBusy("cuda:0", 9.0)])
    assert found == ScriptFigures(
        elapsed_s=30.0,
        reading_s=5.0,
        ahead_s=3.0,
        uploading_s=6.0,
        upload_bytes=1000,
        devices=(DeviceBusy("cuda:0", 9.0),),
        lines=(LineWaits(LOSS, 2, 6.0), LineWaits(NORM, 1, 1.0)),
    )
    assert found.own_s == 16.0 and found.share(found.ahead_s) == 0.1


def test_what_threads_wait_for_together_counts_once() -> None:
    time = ScriptTime()
    time.begin(1 * S)
    time.begin_wait(2 * S)
    time.begin_wait(3 * S)
    time.end_wait(LOSS, 2 * S, 5 * S)
    assert time.figures(6 * S).reading_s == pytest.approx(4.0)  # one of them still waits
    time.end_wait(NORM, 3 * S, 6 * S)
    found = time.figures(9 * S)
    assert found.reading_s == pytest.approx(4.0)
    assert [each.waited_s for each in found.lines] == [3.0, 3.0]


def test_the_figures_of_an_interval_are_its_own() -> None:
    time = ScriptTime()
    time.begin(1 * S)
    waits(time, NORM, 2, 6)
    before = time.figures(11 * S, [DeviceBusy("cuda:0", 1.0)])
    waits(time, LOSS, 12, 14)
    time.uploaded(10, S)
    found = time.figures(21 * S, [DeviceBusy("cuda:0", 4.0, 5.0), DeviceBusy("cuda:1", 2.0)]).since(before)
    assert (found.elapsed_s, found.reading_s, found.uploading_s, found.upload_bytes) == (10.0, 2.0, 1.0, 10)
    assert found.devices == (DeviceBusy("cuda:0", 3.0, 5.0), DeviceBusy("cuda:1", 2.0))
    assert found.lines == (LineWaits(LOSS, 1, 2.0),)


def test_the_number_of_lines_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_time, "LINES", 1)
    time = ScriptTime()
    time.begin(1 * S)
    for line in (LOSS, NORM, LOSS):
        waits(time, line, 2, 3)
    found = time.figures(9 * S)
    assert found.lines == (LineWaits(LOSS, 2, 2.0),) and found.reading_s == 3.0


# ---- lines


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield


def test_a_line_is_the_innermost_that_is_no_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    found = nothing()(current_line)()  # called by a function of contextlib
    assert found is not None and found.file == __file__
    assert text_of(found) == "found = nothing()(current_line)()  # called by a function  …"
    monkeypatch.setattr(script_lines, "_theirs", {__file__: False})
    beyond = current_line()  # of what has called this test
    assert beyond is None or beyond.file != __file__


def test_a_line_is_shown_as_from_the_current_folder_or_in_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("\n    x = '\x1b[2J" + "y" * 90 + "'\n")
    linecache.checkcache()
    assert place_of(ScriptLine(str(tmp_path / "lib" / "a.py"), 3)) == "lib/a.py:3"
    assert place_of(ScriptLine("/elsewhere/train.py", 88)) == "train.py:88"
    assert place_of(ScriptLine("/e/lib/site-packages/transformers/trainer.py", 9)) == "transformers/trainer.py:9"
    text = text_of(ScriptLine(str(tmp_path / "a.py"), 2))
    assert text.startswith("x = '\\u001b[2Jyyy") and text.endswith(" …") and len(text) == 60
    assert text_of(LOSS) == ""


# ---- what is said

IDLE = (DeviceBusy("cuda:0", 5.2), DeviceBusy("cuda:1", 0.3))


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        (
            ScriptFigures(elapsed_s=10.0, reading_s=4.1, devices=IDLE, lines=(LineWaits(LOSS, 9, 3.8),)),
            "41 % of 10.0 s waited for values, most at train.py:88 (38 %); busy cuda:0 52 %, cuda:1 3 %: read values "
            "less often, such as at each tenth step",
        ),
        (
            ScriptFigures(elapsed_s=10.0, reading_s=2.0, uploading_s=3.5, upload_bytes=310 << 20, devices=IDLE),
            "10.0 s, bound by uploads: 310 MiB took 35 %; busy cuda:0 52 %, cuda:1 3 %: upload smaller types, such as "
            "images as uint8, keep on a device what is used again, or read values less often",
        ),
        (
            ScriptFigures(elapsed_s=200.0, reading_s=190.0, devices=(DeviceBusy("cuda:0", 186.0),)),
            "200 s, bound by the device cuda:0; busy cuda:0 93 %: faster devices, or more of them, help",
        ),
        (
            ScriptFigures(elapsed_s=10.0, ahead_s=7.0, devices=IDLE),
            "10.0 s, bound by the device cuda:0; busy cuda:0 52 %, cuda:1 3 %: give cuda:1 more of the work",
        ),
        (
            ScriptFigures(elapsed_s=10.0, reading_s=6.0, devices=(*IDLE, DeviceBusy("cuda:2", 1.0, 4.0))),
            "10.0 s, bound by devices that wait for each other, cuda:2 40 %; busy cuda:0 52 %, cuda:1 3 %, cuda:2 10 "
            "%: divide the work by their speed (ranks with --uneven), or batches into micro-batches",
        ),
        (
            ScriptFigures(elapsed_s=10.0, reading_s=2.0, uploading_s=0.9, devices=IDLE[:1]),
            "10.0 s, bound by the script itself (Python 71 %, waiting for values 20 %, uploading 9 %); busy cuda:0 52 "
            '%: larger batches, or torch.compile(model, backend="onebox")',
        ),
        (ScriptFigures(elapsed_s=10.0), ""),
        (ScriptFigures(), ""),
    ],
    ids=["values", "uploads", "device", "ahead", "each other", "python", "no device", "nothing"],
)
def test_it_says_what_a_script_is_bound_by_and_what_would_help(figures: ScriptFigures, said: str) -> None:
    assert verdict(figures) == said


def test_a_short_script_ends_without_a_word() -> None:
    whole = ScriptFigures(elapsed_s=10.0, uploading_s=0.6 * LEAST_S, devices=(DeviceBusy("cuda:0", 0.5 * LEAST_S),))
    assert last_line(whole) == verdict(whole) != ""
    short = ScriptFigures(elapsed_s=1e6, devices=(DeviceBusy("cuda:0", 0.9 * LEAST_S),))
    assert last_line(short) == ""
    assert last_line(short, 0.0) == verdict(short)
