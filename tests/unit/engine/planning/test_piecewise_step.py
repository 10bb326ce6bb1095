"""Steps in pieces: where a routine is cut, and that none of its pieces begins once the time is over."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest

from onebox.engine.planning.partial_profile import TimeLimit
from onebox.engine.planning.piecewise_step import PiecewiseStep, ends_of, run_pieces
from onebox.errors import WorkerError
from onebox.wire.protocol.instructions import Ask, Call, Free, OptimizerStep, Step

SECONDS = (1.0, 2.0, 5.0, 0.5)
"""How long the pieces take, of all devices the same."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Pieces:
    """A step of some pieces, each of which takes its time while its reply is waited for."""

    def __init__(self, clock: Clock, devices: int, fails: int = -1) -> None:
        self._clock, self._devices, self._fails = clock, devices, fails
        self.begun: list[float] = []
        self.taken = 0
        self.ended = False

    @property
    def done(self) -> bool:
        return self.taken == len(SECONDS)

    def begin_piece(self) -> None:
        self.begun.append(self._clock.now_s)

    @property
    def pending(self) -> Future[Any]:
        self._clock.now_s += SECONDS[self.taken] / self._devices
        future: Future[Any] = Future()
        if self.taken == self._fails:
            future.set_exception(WorkerError("lost"))
        else:
            future.set_result(None)
        return future

    def end_piece(self, reply: object) -> None:
        self.taken += 1

    def end(self) -> None:
        self.ended = True


def run(limit_s: float, devices: int = 2, fails: int = -1) -> tuple[bool, list[Pieces], Clock]:
    clock = Clock()
    steps = [Pieces(clock, devices, fails if number else -1) for number in range(devices)]
    try:
        done = run_pieces(cast("list[PiecewiseStep]", steps), TimeLimit(limit_s, clock))
    finally:
        assert all(step.ended for step in steps)
    return done, steps, clock


@pytest.mark.parametrize("limit_s", [0.0, 0.5, 1.0, 2.9, 3.0, 3.1, 7.9, 8.0, 8.2, 8.5, 100.0])
def test_no_piece_begins_when_the_time_is_over(limit_s: float) -> None:
    done, steps, clock = run(limit_s)
    starts = [sum(SECONDS[:number]) for number in range(len(SECONDS))]
    expected = [start for start in starts if start < limit_s]
    assert [step.begun for step in steps] == [pytest.approx(expected)] * 2
    assert done == (len(expected) == len(SECONDS))
    assert clock.now_s <= limit_s + max(SECONDS), "by one piece at most"


def test_the_batch_is_freed_if_a_worker_is_lost() -> None:
    with pytest.raises(WorkerError):
        run(100.0, fails=1)


def test_a_piece_has_one_action_and_what_follows_it() -> None:
    call, free, ask = Call(1, (), ()), Free(()), Ask("scalars", ())
    steps: list[Step] = [call, call, free, call, call, OptimizerStep(1, ()), free, ask, free]
    actions = [True, True, False, True, False, False, False, False, False]
    assert ends_of(steps, actions) == (1, 3, 5, 9)
    assert ends_of(steps[:1], [True]) == (1,)
    assert ends_of([free, *steps], [False, *actions]) == (2, 4, 6, 10), "what comes before the first belongs to it"
