"""The history of a run, from the records of its metrics: numbers, curves and events. Pure.

The records are those of ``metrics.jsonl``, so that a run of this process and the folder of another one are followed in
the same way. Memory is bounded, however long the run is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onebox.report.page.state import Curves, EventView, RunNumbers, Severity, TestResult
from onebox.report.run.status import RunState

POINTS = 600
"""The most points of a curve: more than a page has pixels for."""

EVENTS = 200
"""The most events."""

RESULTS = 200
"""The most results of epochs in the curves; of more the newest are shown."""

_WINDOW_S = 10.0
"""Time over which rates are averaged; they follow a change within two seconds, and stay readable."""

_SHORTEST_S = 0.5
"""Time from which on a rate is one: the losses of several steps may be read at once."""

_WINDOW_STEPS = 4096

_TEXT = 2000
"""The most characters of an event."""

_SEVERITIES: Mapping[str, Severity] = {
    "recovery": "warning",
    "unsaved": "failure",
    "left": "warning",
    "late": "warning",
    "redone": "warning",
    "joined": "good",
    "punctual": "good",
}


@dataclass
class _Point:
    """A point of the curves: the sum of the losses of its steps, and the rate at its end."""

    last_step: int
    steps: int
    loss_sum: float
    samples_per_s: float | None

    def absorb(self, later: _Point) -> None:
        self.last_step, self.steps = later.last_step, self.steps + later.steps
        self.loss_sum += later.loss_sum
        self.samples_per_s = later.samples_per_s

    @property
    def loss(self) -> float | None:
        return _rounded(self.loss_sum / self.steps)


class RunHistory:
    """Collects the records of a run; :attr:`numbers`, :attr:`curves` and :attr:`events` are its present state.

    Args:
        total_steps: Steps of the whole run, if known.
        epochs: Epochs of the whole run, if known.

    Example:
        >>> history = RunHistory(total_steps=10, epochs=1)
        >>> for step in (1, 2, 3):
        ...     history.add({"event": "step", "step": step, "epoch": 1, "loss": 0.5, "samples": 8, "time": step / 2})
        >>> history.numbers.samples_per_s, history.numbers.eta_s
        (16.0, 3.5)
    """

    def __init__(self, total_steps: int | None = None, epochs: int | None = None) -> None:
        self.total_steps = total_steps
        self.epochs = epochs
        self._step = 0
        self._epoch = 0
        self._loss: float | None = None
        self._marks: deque[tuple[float, int, int, float]] = deque(maxlen=_WINDOW_STEPS)
        """Time, step, samples so far, and seconds of pauses so far."""
        self._paused_s = 0.0
        self._ended = 0
        self._samples = 0
        self._points: list[_Point] = []
        self._stride = 1
        self._tests: deque[TestResult] = deque(maxlen=RESULTS)
        self._rates: tuple[float | None, float | None] = (None, None)
        self._events: deque[EventView] = deque(maxlen=EVENTS)
        self._feed = ""
        self._account: tuple[str, str] = "", ""

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record; one that is no record of a run is ignored."""
        kind, at_s = record.get("event"), _number(record.get("time"))
        if kind == "step":
            self._add_step(record, at_s)
        elif kind == "epoch":
            self._add_epoch(record, at_s)
        elif kind == "feed":
            self._add_feed(record, at_s)
        elif kind == "account":
            self._add_account(record)
        elif kind == "unsaved":
            text = f"no checkpoint of step {record.get('step')}: {record.get('error')}"
            self.note("unsaved", text, at_s=at_s, step=_whole(record.get("step")))
        elif kind == "recovery":
            self.note("recovery", str(record.get("text", "")), at_s=at_s, step=_whole(record.get("step")))
        elif kind == "island":
            change = str(record.get("kind", "island"))
            self.note(change, str(record.get("text", "")), at_s=at_s, step=_whole(record.get("step")))
        elif kind == "decision":
            worse = record.get("refused") or record.get("kept") is False
            severity: Severity = "warning" if worse else "good" if record.get("kept") else "info"
            text, step = str(record.get("text", "")), _whole(record.get("step"))
            self.note("plan change", text, at_s=at_s, step=step, severity=severity)

    def note(
        self, kind: str, text: str, *, at_s: float | None, step: int | None = None, severity: Severity | None = None
    ) -> None:
        """Add an event.

        Args:
            kind: Its kind.
            text: Its description.
            at_s: Its time, in seconds since 1970.
            step: The step after which it happened.
            severity: Its importance; ``None`` for the usual one of its kind.
        """
        found = severity or _SEVERITIES.get(kind, "info")
        self._events.append(EventView(at_s=at_s, step=step, kind=kind, severity=found, text=text[:_TEXT]))

    def end(self, state: RunState, text: str, *, at_s: float | None) -> None:
        """Add the end of the run as an event.

        Args:
            state: The way in which it ended.
            text: A line about it.
            at_s: Its time, in seconds since 1970.
        """
        severity: Severity = "failure" if state == "failed" else "good"
        self.note("end", text or "the run has ended", at_s=at_s, severity=severity)

    @property
    def events(self) -> tuple[EventView, ...]:
        """The newest events, the newest last."""
        return tuple(self._events)

    @property
    def curves(self) -> Curves:
        """The curves so far."""
        return Curves(
            steps=tuple(point.last_step for point in self._points),
            loss=tuple(point.loss for point in self._points),
            samples_per_s=tuple(point.samples_per_s for point in self._points),
            tests=tuple(self._tests),
        )

    @property
    def numbers(self) -> RunNumbers:
        """The present numbers."""
        interval_s, samples_per_s = self._rates
        eta_s = None
        if self.total_steps is not None and interval_s is not None:
            left_s = max(0, self.total_steps - self._step) * interval_s
            pauses = max(0, (self.epochs or 0) - self._ended) if self._ended else 0
            eta_s = round(left_s + pauses * self._paused_s / max(1, self._ended), 1)
        return RunNumbers(
            step=self._step,
            total_steps=self.total_steps,
            epoch=self._epoch,
            epochs=self.epochs,
            loss=self._loss,
            samples_per_s=samples_per_s,
            eta_s=eta_s,
            interval_s=interval_s,
            bound=self._account[0],
            account=self._account[1],
            feed=self._feed,
            result=self._tests[-1] if self._tests else None,
        )

    def _add_step(self, record: Mapping[str, Any], at_s: float | None) -> None:
        step, samples = _whole(record.get("step")), _whole(record.get("samples")) or 0
        if step is None:
            return
        loss = _number(record.get("loss"))
        self._step, self._epoch = step, _whole(record.get("epoch")) or self._epoch
        self._loss = None if loss is None else _rounded(loss)
        self._samples += samples
        if at_s is not None:
            self._marks.append((at_s, step, self._samples, self._paused_s))
            while len(self._marks) > 2 and self._marks[1][0] < at_s - _WINDOW_S:
                self._marks.popleft()
            begin_s, first, before, paused_s = self._marks[0]
            seconds = at_s - begin_s
            if seconds >= _SHORTEST_S:
                active_s = max(0.0, seconds - self._paused_s + paused_s)
                self._rates = _rounded(active_s / max(1, step - first)), _rounded((self._samples - before) / seconds)
        lost = math.nan if loss is None else loss
        point = _Point(step, 1, lost, self._rates[1])
        if self._points and self._points[-1].steps < self._stride:
            self._points[-1].absorb(point)
        else:
            self._points.append(point)
            self._thin_out()

    def _thin_out(self) -> None:
        """Join neighbouring points where there are too many."""
        if len(self._points) <= POINTS:
            return
        self._stride *= 2
        pairs = [self._points[place : place + 2] for place in range(0, len(self._points), 2)]
        for pair in pairs:
            if len(pair) > 1:
                pair[0].absorb(pair[1])
        self._points = [pair[0] for pair in pairs]

    def _add_epoch(self, record: Mapping[str, Any], at_s: float | None) -> None:
        step, epoch = _whole(record.get("step")), _whole(record.get("epoch"))
        if step is None or epoch is None:
            return
        loss, accuracy = _number(record.get("test_loss")), _number(record.get("test_accuracy"))
        self._tests.append(TestResult(step=step, epoch=epoch, test_loss=loss, test_accuracy=accuracy))
        rate = _number(record.get("samples_per_s"))
        if rate is not None and self._rates[1] is None:  # steps without times
            self._rates = None, _rounded(rate)
        self._ended += 1
        if at_s is not None and self._marks:
            self._paused_s += max(0.0, at_s - self._marks[-1][0])
        said = [f"train loss {record['train_loss']:.4f}"] if _number(record.get("train_loss")) is not None else []
        said += [f"test loss {loss:.4f}"] if loss is not None else []
        said += [f"test accuracy {100 * accuracy:.1f} %"] if accuracy is not None else []
        self.note("epoch", f"epoch {epoch} has ended: {', '.join(said) or 'no result'}", at_s=at_s, step=step)

    def _add_account(self, record: Mapping[str, Any]) -> None:
        self._account = str(record.get("bound") or "")[:_TEXT], str(record.get("text") or "")[:_TEXT]

    def _add_feed(self, record: Mapping[str, Any], at_s: float | None) -> None:
        self._feed = str(record.get("text") or self._feed)[:_TEXT]
        skipped = _whole(record.get("skipped")) or 0
        if skipped:
            text = f"{skipped} broken samples were left out so far"
            self.note("feed", text, at_s=at_s, step=_whole(record.get("step")), severity="warning")


def _rounded(value: float) -> float | None:
    """Return a number with six significant digits; ``None`` for one that is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
