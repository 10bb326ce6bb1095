"""Receivers of shared memory: waits, busy after short ones and asleep after long ones; messages that are prepared."""

from __future__ import annotations

import itertools
import time

import pytest

from onebox.wire import TensorSpec
from onebox.worker.comm.shm import receiver as module
from onebox.worker.comm.shm.receiver import ShmReceiver
from onebox.worker.comm.shm.segment import SharedMemory, supported
from onebox.worker.comm.shm.sender import ShmSender

pytestmark = pytest.mark.skipif(not supported(), reason="groups through shared memory need Linux on x86-64")

SPEC = TensorSpec("float32", (1,))


def test_only_a_wait_after_a_short_one_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory.make()
    sender, receiver = ShmSender(memory, 2), ShmReceiver(memory, 0, 1, lambda rank, begin_s: None)
    came: list[str] = []

    def wait() -> list[str]:
        """Receive a message that comes in the first moment of a wait of either kind; return of which."""
        came.clear()
        expected = receiver.expect(0)
        expected.wait()
        expected.give_back()
        return list(came)

    def come(wait: str) -> None:
        came.append(wait)
        sender.post(1, 0, None, SPEC)

    monkeypatch.setattr(module.os, "sched_yield", lambda: come("busy"))
    monkeypatch.setattr(memory, "sleep", lambda word, value: come("asleep"))
    now_s = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    assert wait() == ["asleep"]
    assert wait() == ["busy"]
    seconds = itertools.count(now_s)
    with monkeypatch.context() as slow:
        slow.setattr(module.time, "monotonic", lambda: next(seconds))
        assert wait() == ["asleep"], "it did not come in the first moments"
    assert wait() == ["asleep"], "the one before was long"
    assert wait() == ["busy"]
    receiver.close()
    sender.leave()


def test_a_message_says_since_when_it_is_available() -> None:
    memory = SharedMemory.make()
    sender, receiver = ShmSender(memory, 2), ShmReceiver(memory, 0, 1, lambda rank, begin_s: None)
    due_ns = time.monotonic_ns() + 3600 * 10**9
    begin_ns = time.monotonic_ns()
    sent_ns = sender.post(1, 0, None, SPEC)
    assert begin_ns <= sent_ns <= time.monotonic_ns()
    assert sender.post(1, 0, None, SPEC, at_ns=due_ns) == due_ns
    found = [receiver.expect(0).find() for _ in range(2)]
    assert [one and (one.spec, one.at_ns) for one in found] == [(SPEC, sent_ns), (SPEC, due_ns)]
    receiver.close()
    sender.leave()
