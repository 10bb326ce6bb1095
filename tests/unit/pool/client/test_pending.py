"""Answers that are waited for, and what becomes of them when something is wrong."""

from __future__ import annotations

import pytest

from onebox.errors import OperatorError, PeerLost, PoolError, WireError, WorkerDied
from onebox.pool.client.pending import PendingReplies
from onebox.pool.errors import CAUSE_S, WorkerLocation
from onebox.wire.protocol.responses import MessageTimes, Reply, WorkerFailure

PLACE = WorkerLocation(worker=0, host="h", device="cpu")
DIED = WorkerDied("worker 1 died", worker=1, host="h", device="cpu")


def test_an_answer_goes_to_who_asked_and_to_nobody_else() -> None:
    pending = PendingReplies()
    first, second = pending.promise(0, 1, answer=True), pending.promise(0, 2, answer=True)
    assert pending.promise(0, 3, answer=False).done()
    pending.reply(PLACE, Reply(2, times_ns=(4, 5)), [b"x"], 0.0)
    assert not first.done()
    assert (second.result(0).frames, second.result(0).times_ns) == ([b"x"], (4, 5))
    pending.reply(PLACE, Reply(9), (), 0.0)  # nobody waits for it
    assert list(pending.futures) == [(0, 1)]


def test_a_failure_is_that_of_its_message_and_the_pool_goes_on() -> None:
    pending = PendingReplies()
    asked = pending.promise(0, 1, answer=True)
    pending.reply(PLACE, Reply(1, (), WorkerFailure("operator", "aten.mm", "shapes")), (), 0.0)
    assert isinstance(asked.exception(0), OperatorError)
    assert pending.broken is None


def test_what_could_not_be_read_breaks_all() -> None:
    pending = PendingReplies()
    asked = pending.promise(1, 1, answer=True)
    pending.reply(PLACE, Reply(0, (), WorkerFailure("protocol", "receive", "junk")), (), 0.0)
    assert isinstance(asked.exception(0), WireError)
    with pytest.raises(WireError):
        pending.promise(0, 2, answer=False)


def test_who_complains_of_a_peer_hears_what_befell_it_or_the_complaint_after_a_while() -> None:
    for lost in (True, False):
        pending = PendingReplies()
        asked = pending.promise(0, 1, answer=True)
        pending.reply(PLACE, Reply(1, (), WorkerFailure("peer", "receive", "gone")), (), 0.0)
        pending.release(CAUSE_S / 2)
        assert not asked.done()
        if lost:
            pending.lose(1, DIED)
        pending.release(CAUSE_S)
        assert isinstance(asked.exception(0), WorkerDied if lost else PeerLost)


def test_a_lost_worker_is_mended_when_it_has_been_dropped_and_nothing_else_is() -> None:
    pending = PendingReplies()
    asked = pending.promise(0, 1, answer=True)
    pending.lose(1, DIED)
    assert asked.exception(0) is DIED
    assert not pending.mend()
    with pytest.raises(WorkerDied):
        pending.promise(0, 2, answer=True)
    pending.lost.pop(1)
    assert pending.mend()
    assert not pending.promise(0, 3, answer=True).done()
    pending.give_up(PoolError("the thread failed"))
    with pytest.raises(PoolError):
        pending.mend()


def test_after_the_end_nothing_is_promised_and_what_was_may_still_come() -> None:
    pending = PendingReplies()
    asked = pending.promise(0, 1, answer=True)
    pending.close(PoolError("closed"))
    with pytest.raises(PoolError, match="closed"):
        pending.promise(0, 2, answer=False)
    pending.reply(PLACE, Reply(1), (), 0.0)
    assert asked.result(0).results == ()


def test_a_loss_fails_what_its_fault_domain_waits_for_and_other_errors_fail_all() -> None:
    pending = PendingReplies()
    pending.domains = {1: 1, 2: 2}
    asked = {worker: pending.promise(worker, 1, answer=True) for worker in (0, 1, 2)}
    pending.lose(1, DIED)
    assert isinstance(asked[1].exception(0), WorkerDied)
    assert not asked[0].done() and not asked[2].done()
    with pytest.raises(WorkerDied):
        pending.promise(1, 2, answer=False)
    assert pending.promise(2, 2, answer=False).done()
    assert pending.broken is DIED and not pending.mend()
    pending.lost.clear()
    assert pending.mend() and pending.promise(1, 3, answer=False).done()
    pending.give_up(PoolError("the thread failed"))
    assert isinstance(asked[0].exception(0), PoolError) and isinstance(asked[2].exception(0), PoolError)


def test_times_of_messages_are_of_this_clock() -> None:
    pending = PendingReplies()
    near, far = pending.promise(0, 1, answer=True), pending.promise(0, 2, answer=True)
    times = (MessageTimes(7, 1000, 1500, 100),)
    pending.reply(PLACE, Reply(1, messages=times), (), 0.0)
    pending.reply(PLACE, Reply(2, messages=times), (), 0.0, clock_ns=900)
    assert near.result(0).messages == times
    assert far.result(0).messages == (MessageTimes(7, 100, 600, 100),)
