"""Waits of a receiver of shared memory: busy ones after short ones, asleep after long ones."""

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
    assert wait() == ["asleep"]
    assert wait() == ["busy"]
    seconds = itertools.count(time.monotonic())
    with monkeypatch.context() as slow:
        slow.setattr(module.time, "monotonic", lambda: next(seconds))
        assert wait() == ["asleep"], "it did not come in the first moments"
    assert wait() == ["asleep"], "the one before was long"
    assert wait() == ["busy"]
    receiver.close()
    sender.leave()
