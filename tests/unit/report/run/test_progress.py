"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import io
import sys
import threading

import pytest
from rich.console import Console

from onebox.report import Progress


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def plain(stream: io.TextIOBase) -> Console:
    return Console(file=stream, force_terminal=False)  # type: ignore[arg-type]


def terminal(stream: io.TextIOBase) -> Console:
    return Console(file=stream, force_terminal=True, width=120, legacy_windows=False)  # type: ignore[arg-type]


def test_elsewhere_it_is_one_line_every_n_steps_and_at_the_last() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(10, 2, every=4, console=plain(stream), clock=clock) as progress:
        for step in range(1, 11):
            if step in (1, 6):
                progress.epoch(1 + step // 6)
            clock.now_s += 0.5
            progress.step(step, loss=1 / step, samples=64)
    assert stream.getvalue().splitlines() == [
        "epoch 1/2  step 4/10  loss 0.2500  128 samples/s  ETA 0:00:03",
        "epoch 2/2  step 8/10  loss 0.1250  128 samples/s  ETA 0:00:01",
        "epoch 2/2  step 10/10  loss 0.1000  128 samples/s  ETA 0:00:00",
    ]


def test_steps_that_skip_the_mark_are_shown_at_the_next() -> None:
    stream = io.StringIO()
    progress = Progress(100, 1, every=10, console=plain(stream), clock=Clock())
    for step in (7, 12, 14, 33):
        progress.step(step)
    assert stream.getvalue().splitlines() == ["epoch 0/1  step 12/100", "epoch 0/1  step 33/100"]


def test_the_end_of_an_epoch_counts_for_the_rate_and_the_remaining_time() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(6, 3, every=1, console=plain(stream), clock=clock)
    for step in range(1, 7):
        if step % 2:
            clock.now_s += 8 * (step > 1)
            progress.epoch(1 + step // 2)
        clock.now_s += 1
        progress.step(step, samples=50)
    said = [line.partition("  step ")[2] for line in stream.getvalue().splitlines()]
    assert said == [
        "1/6  50 samples/s  ETA 0:00:05",
        "2/6  50 samples/s  ETA 0:00:04",  # how long the end of an epoch takes is not known yet
        "3/6  14 samples/s  ETA 0:00:19",
        "4/6  17 samples/s  ETA 0:00:18",
        "5/6  12 samples/s  ETA 0:00:09",
        "6/6  14 samples/s  ETA 0:00:08",  # what follows is a test, and a save
    ]


def test_what_happens_once_is_left_out_of_the_rate() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(3, 1, every=1, console=plain(stream), clock=clock)
    progress.epoch(1)
    with progress.pass_over():
        clock.now_s += 60
    clock.now_s += 1
    progress.step(1, samples=50)
    assert stream.getvalue() == "epoch 1/1  step 1/3  50 samples/s  ETA 0:00:02\n"


def test_the_rate_is_that_of_the_last_steps() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(200, 1, every=200, console=plain(stream), clock=clock)
    for step in range(1, 201):
        clock.now_s += 10 if step <= 100 else 0.5
        progress.step(step, samples=50)
    assert "100 samples/s" in stream.getvalue()


def test_a_resumed_run_starts_where_it_was() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(1000, 1, every=20, console=plain(stream), start_step=910, clock=clock)
    for step in range(911, 922):
        clock.now_s += 1
        progress.step(step, loss=0.5)
    assert stream.getvalue().splitlines() == ["epoch 0/1  step 920/1000  loss 0.5000  ETA 0:01:20"]


def test_a_clock_that_stands_still_gives_no_rate() -> None:
    stream = io.StringIO()
    progress = Progress(2, 1, every=1, console=plain(stream), clock=Clock())
    progress.step(1, loss=float("nan"), samples=1)
    assert stream.getvalue() == "epoch 0/1  step 1/2  loss nan\n"


def test_on_a_terminal_it_is_a_bar_with_notes_above_it() -> None:
    stream, clock = io.StringIO(), Clock()
    threads = threading.active_count()
    with Progress(3, 1, console=terminal(stream), clock=clock) as progress:
        assert threading.active_count() == threads
        progress.epoch(1)
        clock.now_s += 1
        progress.step(1, loss=0.5, samples=10)
        progress.note("a note [bold]as it is[/bold]")
        clock.now_s += 1
        progress.step(2, loss=0.25, samples=10)
        progress.step(3)
    progress.close()
    text = stream.getvalue()
    assert "a note [bold]as it is[/bold]\n" in text
    assert "━" in text
    assert "epoch 1/1  step 1/3  loss 0.5000  10 samples/s  ETA 0:00:02" in text
    assert text.rstrip("\x1b[?25h\n").endswith("epoch 1/1  step 3/3  loss 0.2500  10 samples/s  ETA 0:00:00")
    assert text.endswith("\x1b[?25h")  # the cursor is back


def test_a_terminal_is_not_redrawn_for_every_step() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(1000, 1, console=terminal(stream), clock=clock) as progress:
        for step in range(1, 1000):
            clock.now_s += 0.001
            progress.step(step)
    assert stream.getvalue().count("step") < 20


def test_the_terminal_is_left_as_it_was_when_the_run_fails() -> None:
    stream, stdout = io.StringIO(), sys.stdout

    def fail() -> None:
        with Progress(3, 1, console=terminal(stream)):
            raise RuntimeError("the run")

    with pytest.raises(RuntimeError, match="the run"):
        fail()
    assert sys.stdout is stdout
    assert stream.getvalue().endswith("\x1b[?25h")


@pytest.mark.parametrize("console", [plain, terminal])
def test_a_stream_without_the_characters_gets_question_marks(console: object) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with Progress(1, 1, console=console(stream)) as progress:  # type: ignore[operator]
        progress.note("größer → ok")
        progress.step(1, loss=1.0)
    stream.flush()
    text = raw.getvalue().decode("ascii")
    assert "gr??er ? ok\n" in text
    assert "step 1/1" in text


@pytest.mark.parametrize("console", [plain, terminal])
@pytest.mark.parametrize("closed_before", [True, False])
def test_a_closed_stream_is_left_alone(console: object, closed_before: bool) -> None:
    stream, stdout = io.StringIO(), sys.stdout
    progress = Progress(2, 1, every=1, console=console(stream))  # type: ignore[operator]
    if closed_before:
        stream.close()
    with progress:
        progress.step(1, loss=1.0)
        stream.close()
        progress.note("nobody reads this")
        progress.step(2, loss=1.0)
    assert sys.stdout is stdout


def test_a_quiet_console_is_quiet() -> None:
    stream = io.StringIO()
    with Progress(1, 1, console=Console(file=stream, quiet=True)) as progress:
        progress.note("text")
        progress.step(1)
    assert stream.getvalue() == ""


def test_a_broken_pipe_is_the_callers() -> None:
    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    progress = Progress(1, 1, console=plain(Pipe()))
    with pytest.raises(BrokenPipeError):
        progress.note("text")
