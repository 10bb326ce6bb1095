"""Messages on their way to a worker: how many, what failed, and when there are too many."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from onebox.errors import PeerLost
from onebox.vgpu.runtime.in_flight import BYTES, MESSAGES, InFlight


def sent(ahead: InFlight, size_bytes: int = 0) -> Future[Any]:
    message: Future[Any] = Future()
    ahead.add(message, size_bytes)
    return message


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
    for error in errors:
        sent(ahead).set_exception(error)
    assert ahead.failed() is errors[0]
    assert ahead.failed() is errors[0]
    ahead.mark_reported()
    assert ahead.failed() is None
    sent(ahead).set_exception(errors[1])
    ahead.mark_reported()
    assert ahead.failed() is None


def test_a_lost_peer_is_noted_until_it_is_taken() -> None:
    ahead = InFlight()
    sent(ahead).set_exception(ValueError("no peer"))
    assert not ahead.take_lost_peer()
    sent(ahead).set_exception(PeerLost("rank 0 has left the group", worker=1, host="localhost", device="cpu"))
    ahead.mark_reported()
    assert ahead.take_lost_peer()
    assert not ahead.take_lost_peer()
    ahead.note(PeerLost("rank 0 has left the group", worker=1, host="localhost", device="cpu"))
    assert ahead.take_lost_peer()


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
