"""The supervisor of a run without snapshots: what fails is stored where the state is void, and only there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from onebox.engine.recovery.manager import RecoverableRun, RecoveryManager
from onebox.engine.steps.overlap_scheduler import OverlapScheduler
from onebox.errors import OneboxError, OperatorError, ReplicasParted, UsageError, WorkerDied
from onebox.pool import Pool

LOSS = WorkerDied("worker 1 is gone")
REFUSED = UsageError("not like this")


class FakePool:
    """A pool that others may have recovered."""

    devices = ()
    order = threading.RLock()

    def __init__(self) -> None:
        self.recoveries = 0
        self.lost: dict[int, OneboxError] = {}

    def losses(self, seen: int) -> dict[int, OneboxError]:
        return self.lost if self.recoveries > seen else {}


def manager(located: list[Exception] | None = None, pool: FakePool | None = None) -> RecoveryManager:
    return RecoveryManager(
        cast(Pool, pool or FakePool()),
        cast(RecoverableRun, None),
        cast(OverlapScheduler, None),
        None,
        (located if located is not None else []).append,
        in_flight=1,
        deterministic=False,
        checkpoint=None,
    )


def failing(error: BaseException) -> Callable[[], Any]:
    def action() -> None:
        raise error

    return action


def test_a_run_that_cannot_recover_ends_when_another_has_replaced_the_workers() -> None:
    """Its state has gone with them, whatever the new ones say of what it asks for."""
    pool = FakePool()
    recovery = manager(pool=pool)
    pool.recoveries = 1
    assert recovery.run(lambda: 3) == 3, "nobody was lost"

    def unknown() -> None:
        pool.lost = {1: LOSS}
        raise OperatorError("there is no such program")

    with pytest.raises(WorkerDied) as caught:
        recovery.once(unknown)
    assert caught.value is LOSS
    assert recovery.error is LOSS
    with pytest.raises(WorkerDied):
        manager(pool=FakePool()).run(failing(LOSS))


def test_the_result_of_an_action_is_handed_back() -> None:
    recovery = manager()
    assert (recovery.run(lambda: 3), recovery.once(lambda: 4), recovery.error) == (3, 4, None)


@pytest.mark.parametrize("error", [LOSS, REFUSED])
def test_an_action_that_changes_nothing_leaves_the_state_valid(error: OneboxError) -> None:
    located: list[Exception] = []
    recovery = manager(located)
    for call in (recovery.run, lambda action: recovery.once(action, void=False)):
        with pytest.raises(type(error)) as caught:
            call(failing(error))
        assert caught.value is error
    assert recovery.error is None
    assert located == [error, error]


@pytest.mark.parametrize("error", [LOSS, REFUSED, TypeError("no number")])
def test_the_first_failure_of_a_step_is_stored(error: Exception) -> None:
    recovery = manager()
    with pytest.raises(type(error)):
        recovery.once(failing(error))
    with pytest.raises(OperatorError):
        recovery.run(failing(OperatorError("later")), void=True)
    assert recovery.error is error


def test_an_interrupted_message_makes_the_state_void_and_an_error_of_its_own_is_left_to_the_caller() -> None:
    recovery = manager()
    with pytest.raises(UsageError), recovery.poisoning("step 3"):
        raise REFUSED
    assert recovery.error is None
    with pytest.raises(KeyboardInterrupt), recovery.poisoning("step 3"):
        raise KeyboardInterrupt
    assert isinstance(recovery.error, ReplicasParted)
    assert str(recovery.error).startswith("step 3 was interrupted when some devices had it and others not")


def test_an_interruption_outside_of_messages_leaves_the_state_valid() -> None:
    recovery = manager()
    for call in (recovery.run, recovery.once):
        with pytest.raises(KeyboardInterrupt):
            call(failing(KeyboardInterrupt()))
    assert recovery.error is None
