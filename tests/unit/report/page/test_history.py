"""The history of a run, from its records."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.report.page.history import EVENTS, POINTS, RunHistory


def step(number: int, *, loss: float | None = 0.5, samples: int = 8, time: float | None = None) -> dict[str, Any]:
    return {"event": "step", "step": number, "epoch": 1, "loss": loss, "samples": samples, "time": time}


def test_rates_are_of_the_last_seconds() -> None:
    history = RunHistory(total_steps=1000, epochs=2)
    for number in range(1, 101):  # one a second, then ten
        history.add(step(number, time=float(number)))
    for number in range(101, 301):
        history.add(step(number, time=100 + (number - 100) / 10))
    numbers = history.numbers
    assert numbers.samples_per_s == pytest.approx(80.0)
    assert numbers.interval_s == pytest.approx(0.1)
    assert numbers.eta_s == pytest.approx(70.0)
    assert (numbers.step, numbers.total_steps, numbers.epoch, numbers.epochs) == (300, 1000, 1, 2)


def test_the_end_of_an_epoch_counts_for_the_rate_and_the_remaining_time_and_not_for_a_step() -> None:
    history = RunHistory(total_steps=9, epochs=3)
    for number in (1, 2, 3):
        history.add(step(number, time=float(number)))
    assert (history.numbers.samples_per_s, history.numbers.eta_s) == (8.0, 6.0)
    history.add({"event": "epoch", "step": 3, "epoch": 1, "test_loss": 0.25, "test_accuracy": 0.9, "time": 5.0})
    history.add(step(4, time=6.0))
    history.add(step(5, time=7.0))
    numbers = history.numbers
    assert numbers.samples_per_s == history.curves.samples_per_s[-1] == pytest.approx(8 * 4 / 6, rel=1e-5)
    assert (numbers.interval_s, numbers.eta_s) == (1.0, 4 * 1.0 + 2 * 2.0)
    assert history.numbers.result is not None and history.numbers.result.test_accuracy == 0.9
    assert "test accuracy 90.0 %" in history.events[-1].text


@given(st.integers(1, 5 * POINTS), st.sampled_from([1, 3]))
def test_curves_keep_their_means_in_a_bounded_number_of_points(count: int, samples: int) -> None:
    history = RunHistory()
    losses = [1 / (1 + number) for number in range(count)]
    for number, loss in enumerate(losses, start=1):
        history.add(step(number, loss=loss, samples=samples, time=float(number)))
    curves = history.curves
    assert len(curves.steps) <= POINTS
    assert curves.steps[-1] == count and list(curves.steps) == sorted(set(curves.steps))
    weights = [end - begin for begin, end in zip((0, *curves.steps), curves.steps, strict=False)]
    mean = sum(weight * (loss or 0.0) for weight, loss in zip(weights, curves.loss, strict=True)) / count
    assert mean == pytest.approx(sum(losses) / count, rel=1e-4)


def test_a_loss_that_is_no_number_leaves_a_gap() -> None:
    history = RunHistory()
    history.add(step(1))
    history.add(step(2, loss=None))
    assert history.curves.loss == (0.5, None)
    assert history.numbers.loss is None


def test_events_are_as_on_the_terminal() -> None:
    history = RunHistory()
    history.add({"event": "recovery", "step": 7, "text": "worker 1 was lost", "time": 5.0})
    history.add({"event": "decision", "step": 9, "text": "layers move", "kept": True})
    history.add({"event": "decision", "step": 11, "text": "not done", "refused": "no room"})
    history.add({"event": "island", "kind": "left", "step": 12, "text": "island 1 left"})
    history.add({"event": "unsaved", "step": 13, "error": "the disk is full"})
    history.add({"event": "feed", "step": 14, "skipped": 2, "text": "bound by read (98 % busy): 2 threads would do"})
    found = [(event.kind, event.severity, event.step) for event in history.events]
    assert found == [
        ("recovery", "warning", 7),
        ("plan change", "good", 9),
        ("plan change", "warning", 11),
        ("left", "warning", 12),
        ("unsaved", "failure", 13),
        ("feed", "warning", 14),
    ]
    assert history.events[0].text == "worker 1 was lost" and history.events[0].at_s == 5.0
    assert history.numbers.feed.startswith("bound by read")


def test_events_are_bounded() -> None:
    history = RunHistory()
    for number in range(EVENTS + 50):
        history.note("note", "x" * 10_000, at_s=None, step=number)
    assert len(history.events) == EVENTS
    assert history.events[-1].step == EVENTS + 49
    assert max(len(event.text) for event in history.events) <= 2000


@pytest.mark.parametrize(
    "record",
    [{}, {"event": "step"}, {"event": "step", "step": "7"}, {"event": 3}, {"event": "epoch", "step": None}],
    ids=str,
)
def test_what_is_no_record_is_ignored(record: dict[str, Any]) -> None:
    history = RunHistory()
    history.add(record)
    assert history.numbers.step == 0 and not history.curves.steps and not history.events


def test_the_account_of_the_last_epoch_is_kept() -> None:
    history = RunHistory()
    history.add({"event": "account", "epoch": 1, "bound": "computing (62 % of the time)", "text": "computing 62 %"})
    assert (history.numbers.bound, history.numbers.account) == ("computing (62 % of the time)", "computing 62 %")
    history.add({"event": "account", "bound": 3, "text": None})
    assert (history.numbers.bound, history.numbers.account) == ("3", "")
