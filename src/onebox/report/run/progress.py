"""Progress of a training run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import NamedTuple, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

from onebox.report.tables.text import loss_text, rate_text

_WINDOW_STEPS = 50  # steps of the rate's average: steady enough to read, soon right after a change
_REFRESH_S = 0.1  # rich's own default


class Progress:
    """Shows the progress of a training run; a context manager.

    On a terminal a bar with epoch, step, loss, samples per second and the remaining time; elsewhere the same as one
    plain line every ``every`` steps, and at the last. It starts no thread. Characters that the stream's encoding lacks
    become ``?``; after the stream is closed nothing is written. Plain lines raise BrokenPipeError for a broken pipe,
    which the caller handles.

    The rate is that of wall time, with tests and saves. The remaining time has one more pause for each end of an epoch
    that is left, as long as those so far.

    Args:
        total_steps: Steps of the whole run, over all epochs.
        epochs: Epochs of the whole run.
        every: Steps between two lines, on a stream that is not a terminal.
        console: Destination; standard output by default. For another stream, ``Console(file=stream)``.
        start_step: Steps that a resumed run has already done.
        clock: A monotonic clock in seconds; for tests.

    Example:
        >>> with Progress(total_steps=40, epochs=1) as progress:  # doctest: +SKIP
        ...     progress.epoch(1)
        ...     for step in range(1, 41):
        ...         progress.step(step, loss=0.5, samples=64)
        epoch 1/1  step 20/40  loss 0.5000  1,234 samples/s  ETA 0:00:01
        epoch 1/1  step 40/40  loss 0.5000  1,234 samples/s  ETA 0:00:00
    """

    def __init__(
        self,
        total_steps: int,
        epochs: int,
        every: int = 20,
        console: Console | None = None,
        *,
        start_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._epochs = epochs
        self._every = max(1, every)
        self._console = console or Console()
        self._clock = clock
        self._epoch = 0
        self._step = start_step
        self._loss: float | None = None
        self._pace = _Pace(start_step, clock())
        self._line_step = start_step
        self._drawn_s = float("-inf")
        self._bar: RichProgress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            bar = RichProgress(BarColumn(), TextColumn("{task.description}"), console=self._console, auto_refresh=False)
            bar.add_task("", total=self._total_steps, completed=self._step)
            self._bar = bar
            with self._unless_closed():
                bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def epoch(self, number: int) -> None:
        """Begin an epoch; the time since the last step was that of its end.

        Args:
            number: Number of the epoch, from 1.
        """
        self._epoch = number
        self._pace.pause(self._clock())

    @contextmanager
    def pass_over(self) -> Iterator[None]:
        """Leave the time of the context out of rates: that of something which happens once."""
        begin_s = self._clock()
        yield
        self._pace.pass_over(self._clock() - begin_s)

    def step(self, step: int, *, loss: float | None = None, samples: int = 0) -> None:
        """Record a finished step.

        Args:
            step: Number of the step in the whole run, from 1.
            loss: Its loss; None keeps showing the last one.
            samples: Training samples since the last call.
        """
        self._step = step
        self._loss = self._loss if loss is None else loss
        self._pace.step(step, samples, self._clock())
        if self._bar is not None:
            self._draw(self._bar)
        elif step // self._every > self._line_step // self._every or step == self._total_steps:
            self._line_step = step
            self._print(self._text())

    def note(self, text: str) -> None:
        """Print a separate line, above the bar where there is one.

        Args:
            text: The line, printed literally, including square brackets.
        """
        self._print(text)

    def close(self) -> None:
        """Show the last state and restore the terminal. Idempotent."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with self._unless_closed():
                bar.update(bar.task_ids[0], completed=self._step, description=self._text())
            with self._unless_closed():
                bar.stop()

    def _draw(self, bar: RichProgress) -> None:
        now_s = self._clock()
        if now_s - self._drawn_s < _REFRESH_S and self._step < self._total_steps:
            return
        self._drawn_s = now_s
        with self._unless_closed():
            bar.update(bar.task_ids[0], completed=self._step, description=self._text(), refresh=True)

    def _print(self, text: str) -> None:
        encoding = self._console.encoding
        text = text.encode(encoding, errors="replace").decode(encoding)
        with self._unless_closed():
            if self._bar is not None:
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            elif not self._console.quiet:
                # Not by console.print, which turns a broken pipe into SystemExit.
                self._console.file.write(text + "\n")
                self._console.file.flush()

    @contextmanager
    def _unless_closed(self) -> Iterator[None]:
        try:
            yield
        except ValueError:
            if not getattr(self._console.file, "closed", False):
                raise

    def _text(self) -> str:
        parts = [f"epoch {self._epoch}/{self._epochs}", f"step {self._step}/{self._total_steps}"]
        if self._loss is not None:
            parts.append(f"loss {loss_text(self._loss)}")
        if self._pace.samples_per_s:
            parts.append(rate_text(self._pace.samples_per_s))
        if self._pace.steps_per_s:
            left_s = max(0, self._total_steps - self._step) / self._pace.steps_per_s
            left_s += self._pace.pause_s * max(0, self._epochs - self._epoch + 1)
            parts.append(f"ETA {timedelta(seconds=round(left_s))}")
        return "  ".join(parts)


class _Mark(NamedTuple):
    time_s: float
    step: int
    samples: int
    paused_s: float


class _Pace:
    """Steps per second between pauses and samples per second of wall time, over the last steps; 0 while unknown."""

    def __init__(self, step: int, time_s: float) -> None:
        self.steps_per_s = 0.0
        self.samples_per_s = 0.0
        self._begun = False
        self._pauses = 0
        self._marks = deque([_Mark(time_s, step, 0, 0.0)], maxlen=_WINDOW_STEPS + 1)

    @property
    def pause_s(self) -> float:
        """Mean seconds from the last step of an epoch to the beginning of the next."""
        return self._marks[-1].paused_s / self._pauses if self._pauses else 0.0

    def pause(self, time_s: float) -> None:
        last = self._marks[-1]
        if not self._begun:
            self._marks[-1] = last._replace(time_s=time_s)
            return
        self._pauses += 1
        self._marks.append(last._replace(time_s=time_s, paused_s=last.paused_s + time_s - last.time_s))

    def pass_over(self, seconds: float) -> None:
        self._marks = deque((mark._replace(time_s=mark.time_s + seconds) for mark in self._marks), self._marks.maxlen)

    def step(self, step: int, samples: int, time_s: float) -> None:
        before, self._begun = self._marks[-1], True
        self._marks.append(_Mark(time_s, step, before.samples + samples, before.paused_s))
        first, last = self._marks[0], self._marks[-1]
        seconds = last.time_s - first.time_s
        if seconds > 0:
            self.samples_per_s = (last.samples - first.samples) / seconds
        if seconds > last.paused_s - first.paused_s:
            self.steps_per_s = (last.step - first.step) / (seconds - last.paused_s + first.paused_s)
