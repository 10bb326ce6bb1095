"""Messages on their way to a worker: how many, what failed, and when there are too many."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any

from onebox.errors import PeerLost
from onebox.vgpu.runtime.request_channel import BYTES, MESSAGES, FailedMessage, InFlight, ScriptErrors, SentMessage

numbers = itertools.count(1)


def sent(
    ahead: InFlight, size_bytes: int = 0, *, awaited: bool = False, number: int = 0, errors: int = 0
) -> Future[Any]:
    future: Future[Any] = Future()
    ahead.add(SentMessage(future, number or next(numbers), size_bytes, awaited, errors))
    return future


def lost() -> PeerLost:
    return PeerLost("rank 0 has left the group", worker=1, host="localhost", device="cpu")


def test_what_is_answered_is_not_on_its_way() -> None:
    ahead = InFlight()
    first, second = sent(ahead), sent(ahead)
    assert len(ahead) == 2
    first.set_result(None)
    assert len(ahead) == 1
    second.set_result(None)
    assert len(ahead) == 0
    assert ahead.failed() is None


def test_the_first_failure_is_told_once() -> None:
    ahead = InFlight()
    errors = [ValueError(str(number)) for number in range(2)]
    for number, error in enumerate(errors, 1):
        sent(ahead, number=number).set_exception(error)
    assert ahead.failed() == FailedMessage(errors[0], 1, 0)
    assert ahead.failed() == FailedMessage(errors[0], 1, 0)
    ahead.mark_told(2)
    assert ahead.failed() is None
    sent(ahead, number=3).set_exception(errors[1])
    ahead.mark_told(3)
    assert ahead.failed() is None


def test_a_later_failure_than_was_told_is_still_to_be_told() -> None:
    ahead = InFlight()
    late = sent(ahead, number=2)
    ahead.mark_told(1)
    late.set_exception(error := ValueError("later"))
    assert ahead.failed() == FailedMessage(error, 2, 0)


def test_a_lack_of_data_is_told_with_the_failure_that_caused_it() -> None:
    errors = ScriptErrors()
    ahead = InFlight(errors)
    sent(ahead, number=1).set_exception(lost())
    assert ahead.failed() is not None
    waiting = sent(ahead, number=2)
    errors.count += 1  # on another device
    waiting.set_exception(lost())
    assert ahead.failed() is None
    sent(ahead, number=3, errors=1).set_exception(lost())
    assert ahead.failed() is not None


def test_a_failure_that_is_waited_for_is_not_told_again() -> None:
    ahead = InFlight()
    future = sent(ahead, awaited=True)
    assert not ahead.busy()
    sent(ahead)
    assert ahead.busy()
    future.set_exception(ValueError("told"))
    assert ahead.failed() is None


def test_the_last_message_that_a_lost_peer_has_failed() -> None:
    ahead = InFlight()
    sent(ahead, number=1).set_exception(ValueError("no peer"))
    assert ahead.lost_peer() == 0
    sent(ahead, number=2).set_exception(lost())
    ahead.mark_told(2)
    assert ahead.lost_peer() == 2
    unanswered = sent(ahead, number=3)
    sent(ahead, number=4, awaited=True).set_exception(lost())
    assert ahead.lost_peer() == 4
    unanswered.set_exception(lost())
    assert ahead.lost_peer() == 4


def test_a_failed_message_is_executed_when_a_later_one_is_answered() -> None:
    ahead = InFlight()
    first, second, third = (sent(ahead, number=number) for number in (1, 2, 3))
    assert ahead.executed() == 0
    first.set_result(None)
    assert ahead.executed() == 1
    second.set_exception(ValueError("the rest of the message is still to come"))
    assert ahead.executed() == 1
    third.set_exception(ValueError("likewise"))
    assert ahead.executed() == 2


def test_too_many_messages() -> None:
    ahead = InFlight()
    messages = [sent(ahead) for _ in range(MESSAGES)]
    assert ahead.too_far() is None
    sent(ahead)
    assert ahead.too_far() is messages[0]
    messages[0].set_result(None)
    assert ahead.too_far() is None


def test_too_many_bytes() -> None:
    ahead = InFlight()
    first = sent(ahead, BYTES - 1)
    assert ahead.too_far() is None
    sent(ahead, 2)
    assert ahead.too_far() is first
    first.set_result(None)
    assert ahead.too_far() is None
