"""The loss of a step: a number that arrives later."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from onebox.engine.results import StepLoss, StepValues
from onebox.errors import OperatorError

CAUSE = OperatorError("it failed")


def pending(count: int = 2) -> tuple[StepLoss, list[Future[Any]], list[Exception]]:
    futures: list[Future[Any]] = [Future() for _ in range(count)]
    failures: list[Exception] = []

    def finish(answers: list[Any]) -> StepValues:
        return StepValues(loss=sum(answers), gradient_norm=2.0)

    def failed(error: Exception) -> None:
        failures.append(error)
        raise error

    loss = StepLoss(7, failed)
    loss.expect(futures, finish)
    return loss, futures, failures


def test_it_arrives_when_all_have_answered() -> None:
    loss, futures, _ = pending()
    assert not loss.done
    assert repr(loss) == "StepLoss(step=7, not asked for yet)"
    futures[0].set_result(0.25)
    assert not loss.done
    futures[1].set_result(0.5)
    assert loss.done
    assert (float(loss), loss.item(), f"{loss:.3f}", loss.gradient_norm) == (0.75, 0.75, "0.750", 2.0)
    assert repr(loss) == "StepLoss(step=7, 0.75)"


def test_it_is_put_together_once() -> None:
    loss, futures, _ = pending(1)
    futures[0].set_result(1.0)
    calls: list[Any] = []
    loss._finish = lambda answers: (calls.append(answers), StepValues(loss=3.0, gradient_norm=None))[1]
    assert [float(loss), loss.item()] == [3.0, 3.0]
    assert loss.gradient_norm is None
    assert len(calls) == 1


def test_a_failure_is_raised_each_time_and_told_once() -> None:
    loss, futures, failures = pending()
    futures[0].set_exception(CAUSE)
    futures[1].set_result(1.0)
    for _ in range(2):
        with pytest.raises(OperatorError) as caught:
            float(loss)
        assert caught.value is CAUSE
    assert failures == [CAUSE]
    assert loss.done


def test_what_fails_when_it_is_put_together_is_told_too() -> None:
    loss, futures, failures = pending(1)
    futures[0].set_result("no number")
    for _ in range(2):
        with pytest.raises(TypeError):
            float(loss)
    assert len(failures) == 1


def test_a_step_that_is_begun_again_waits_for_its_new_answers() -> None:
    lost, again = Future[Any](), Future[Any]()
    lost.set_exception(CAUSE)
    again.set_result(5.0)
    calls: list[Exception] = []

    def failed(error: Exception) -> None:
        calls.append(error)
        loss.expect([again], lambda answers: StepValues(loss=answers[0], gradient_norm=None))

    loss = StepLoss(7, failed)
    loss.expect([lost], lambda answers: StepValues(loss=answers[0], gradient_norm=None))
    assert (loss.item(), loss.ended, calls) == (5.0, True, [CAUSE])
    loss.expect([lost], lambda answers: StepValues(loss=0.0, gradient_norm=None))
    assert loss.item() == 5.0
