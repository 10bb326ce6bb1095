"""The loss of a step: a number that arrives later."""

from __future__ import annotations

import copy
import json
import math
import numbers
import operator
import pickle
import statistics
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from onebox.engine.steps.results import StepLoss, StepValues
from onebox.errors import OperatorError, UsageError

CAUSE = OperatorError("it failed")


def pending(count: int = 2) -> tuple[StepLoss, list[Future[Any]], list[Exception]]:
    futures: list[Future[Any]] = [Future() for _ in range(count)]
    failures: list[Exception] = []

    def finish(answers: list[Any]) -> StepValues:
        return StepValues(loss=sum(answers), gradient_norm=2.0)

    def retry(read: Callable[[], StepValues]) -> StepValues:
        try:
            return read()
        except Exception as error:
            failures.append(error)
            raise

    loss = StepLoss(7, retry)
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

    def retry(read: Callable[[], StepValues]) -> StepValues:
        try:
            return read()
        except OperatorError as error:
            calls.append(error)
            loss.expect([again], lambda answers: StepValues(loss=answers[0], gradient_norm=None))
            return read()

    loss = StepLoss(7, retry)
    loss.expect([lost], lambda answers: StepValues(loss=answers[0], gradient_norm=None))
    assert (loss.item(), loss.ended, calls) == (5.0, True, [CAUSE])
    loss.expect([lost], lambda answers: StepValues(loss=0.0, gradient_norm=None))
    assert loss.item() == 5.0


def arrived(value: float) -> StepLoss:
    """Return the loss of a step that one worker has answered to."""
    loss, futures, _ = pending(1)
    futures[0].set_result(value)
    return loss


NUMBER_USES: dict[str, Callable[[Any], Any]] = {
    "less": lambda x: (x < 3, operator.lt(3, x), x <= 2.5, x > 3, x >= 2.5, operator.ge(3, x)),
    "equal": lambda x: (x == 2.5, operator.eq(2.5, x), x != 2.5, x == 3, x == "2.5", x in {2.5}, {x: 1}[2.5]),
    "add": lambda x: (x + 1, 1 + x, x - 1, 1 - x, x + x),
    "multiply": lambda x: (x * 2, 2 * x, x / 2, 2 / x, x // 2, 7 // x, x % 2, 7 % x, divmod(x, 2), divmod(7, x)),
    "power": lambda x: (x**2, 2**x, -x, +x, abs(x), pow(x, 2)),
    "sum": lambda x: (sum([x, x]), max([x, 1.0]) + 0, min([x, x]) + 0, sorted([x, 1])[0]),
    "round": lambda x: (round(x), round(x, 1), int(x), bool(x), math.trunc(x), math.floor(x), math.ceil(x)),
    "math": lambda x: (math.isnan(x), math.exp(x), math.isfinite(x), complex(x), math.fsum([x, x])),
    "ratio": lambda x: (x.as_integer_ratio(), x.is_integer(), x.real + 0, x.imag, x.conjugate() + 0),
    "statistics": lambda x: (statistics.fmean([x, 1]), statistics.mean([x, x]), statistics.stdev([x, x])),
    "numpy": lambda x: (np.mean([x, x]), np.float64(x), np.asarray(x).dtype, np.asarray([x, x]).dtype, np.isnan(x)),
    "array": lambda x: ((np.ones(2) * x).tolist(), (x * np.ones(2)).tolist(), np.float32(1) + x, x + np.float64(1)),
    "format": lambda x: (f"{x:.3f}", f"{x}", str(x), "%.2f" % x, json.dumps({"loss": x}, default=float)),  # noqa: UP031
    "torch": lambda x: (torch.ones(2) * x, x * torch.ones(2), torch.ones(2) < x, torch.full((2,), x)),
    "torch_functions": lambda x: (torch.ones(2).clamp(min=x), torch.tensor([x, x], dtype=torch.float64)),
    "copies": lambda x: (copy.copy(x) + 0, copy.deepcopy([x])[0] + 0, pickle.loads(pickle.dumps(x))),
}


@pytest.mark.feature("Trainer: Read a loss later")
@pytest.mark.parametrize("use", NUMBER_USES)
def test_a_loss_behaves_like_a_float(use: str) -> None:
    found, expected = NUMBER_USES[use](arrived(2.5)), NUMBER_USES[use](2.5)
    assert [type(one) for one in found] == [type(one) for one in expected]
    torch.testing.assert_close(
        [one for one in found if isinstance(one, torch.Tensor)],
        [one for one in expected if isinstance(one, torch.Tensor)],
        rtol=0,
        atol=0,
    )
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, torch.Tensor) or one == other


def test_functions_of_tensors_take_a_loss_for_a_tensor() -> None:
    loss = arrived(0.1)
    assert isinstance(loss, numbers.Real)
    untyped: Any = loss
    assert torch.stack([untyped, untyped]).tolist() == [0.1, 0.1]
    assert torch.isnan(untyped).item() is False
    assert (torch.ones(2, dtype=torch.float32) * loss).dtype == torch.float32


def test_hash_and_equality_are_those_of_the_value() -> None:
    first, second = arrived(0.75), arrived(0.75)
    assert first == second
    assert hash(first) == hash(second) == hash(0.75)
    assert first.detach() is first.cpu() is copy.deepcopy(first) is first


def test_a_scheduler_takes_it() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for value in (1.0, 2.0, 0.5):
        scheduler.step(arrived(value))
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_backward_of_it_says_that_the_step_has_done_it() -> None:
    with pytest.raises(UsageError, match="the step has computed the gradients and updated the parameters already"):
        arrived(1.0).backward()


def test_what_cannot_be_compared_is_a_type_error() -> None:
    for use in (lambda x: x < "a", lambda x: x + None, lambda x: [] - x):
        with pytest.raises(TypeError, match=r"float|not supported"):
            use(arrived(1.0))
