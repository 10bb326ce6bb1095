"""Recording of wall time: nesting, threads, long epochs, and steps that are sent again."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from onebox.engine.compile.routine import InstructionLabel
from onebox.engine.steps.account import COMPUTING, FEED, SAVING, STEPS
from onebox.engine.steps.results import StepTrace
from onebox.engine.steps.wall_time import WallTime

MS = 1_000_000
DEVICES = [SimpleNamespace(host="localhost"), SimpleNamespace(host="lab1")]


class Clock:
    """A clock that moves when told to."""

    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def pass_ms(self, milliseconds: int) -> None:
        self.now_ns += milliseconds * MS


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def wall(clock: Clock) -> WallTime:
    return WallTime(cast(Any, DEVICES), clock)


def sent(wall: WallTime, step: int, *workers: int) -> None:
    wall.began(cast(Any, SimpleNamespace(answers=dict.fromkeys(workers), work=SimpleNamespace(number=step))))


def ended(wall: WallTime, step: int, **times: tuple[int, int]) -> None:
    work = (InstructionLabel("forward 0", "compute"),)
    workers = {int(name[1:]): (work, (begin * MS, end * MS), ()) for name, (begin, end) in times.items()}
    wall.add(StepTrace(step=step, workers=workers))


def rounded(shares: Any) -> dict[str, float]:
    return {cause: round(share, 6) for cause, share in shares.items()}


def test_what_is_counted_inside_is_its_own(wall: WallTime, clock: Clock) -> None:
    with wall.during(SAVING):
        clock.pass_ms(10)
        with wall.during(FEED):
            clock.pass_ms(30)
        clock.pass_ms(20)
    clock.pass_ms(40)
    account = wall.take()
    assert account.seconds == 0.1
    assert rounded(account.shares) == {"client": 0.4, SAVING: 0.3, FEED: 0.3}
    assert wall.take().seconds == 0.0


def test_the_time_of_other_threads_is_not_counted(wall: WallTime, clock: Clock) -> None:
    with wall.during(FEED):
        clock.pass_ms(10)

    def other() -> None:
        with wall.during(SAVING):
            clock.pass_ms(10)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert rounded(wall.take().shares) == {"client": 0.5, FEED: 0.5}


def test_a_span_that_goes_on_counts_in_both_accounts(wall: WallTime, clock: Clock) -> None:
    with wall.during(SAVING):
        clock.pass_ms(10)
        assert rounded(wall.take().shares) == {SAVING: 1.0}
        clock.pass_ms(10)
    assert rounded(wall.take().shares) == {SAVING: 1.0}


def test_steps_and_the_way_to_them(wall: WallTime, clock: Clock) -> None:
    sent(wall, 0, 0, 1)
    with wall.during(STEPS):
        clock.pass_ms(100)
        ended(wall, 0, d0=(0, 80), d1=(20, 80))
    assert rounded(wall.present().shares) == {COMPUTING: 0.875, "link lab1–this client": 0.125}  # until all have ended
    account = wall.take()
    assert rounded(account.shares) == {COMPUTING: 0.7, "link lab1–this client": 0.3}
    assert rounded(account.computing) == {0: 0.8, 1: 0.6}


def test_a_step_that_is_sent_again_was_not_on_its_way(wall: WallTime, clock: Clock) -> None:
    sent(wall, 0, 1)
    with wall.during("recovery"):
        clock.pass_ms(50)
        wall.reset()
    clock.pass_ms(50)
    ended(wall, 0, d1=(50, 100))
    assert rounded(wall.take().shares) == {"recovery": 0.5, COMPUTING: 0.5}


def test_a_long_epoch_is_summed_up_meanwhile(wall: WallTime, clock: Clock) -> None:
    for step in range(2000):
        sent(wall, step, 0)
        clock.pass_ms(10)
        ended(wall, step, d0=(10 * step + 4, 10 * step + 10))
    assert len(wall._lines[0].launches) < 300  # bounded
    account = wall.take()
    assert account.seconds == pytest.approx(20.0)
    assert rounded(account.shares) == {COMPUTING: 0.6, "client": 0.4}
