"""The progress of a worker, and the times and memory of its instructions."""

from __future__ import annotations

import time

import pytest

from onebox.worker import progress as module
from onebox.worker.memory.buffers import BufferStore
from onebox.worker.progress import Trace, WorkerProgress, wait_until


def test_a_wait_is_marked_until_the_outermost_one_ends() -> None:
    progress, seen = WorkerProgress(), []
    with pytest.raises(KeyError), progress.wait():
        with progress.wait():
            seen.append(progress.waiting)
        seen.append(progress.waiting)
        raise KeyError
    assert seen == [True, True]
    assert not progress.waiting


def test_each_instruction_has_its_own_peak_and_the_peak_of_all_stays() -> None:
    store = BufferStore()
    store.charge(100)
    store.reserve(900)  # before the trace
    trace = Trace(store)
    for passing_bytes in (50, 7):
        trace.begin()
        store.reserve(passing_bytes)
        store.charge(1)
        trace.end()
    assert trace.used_bytes == [150, 101, 108, 102]
    assert store.peak_bytes == 1000


def test_an_instruction_ends_when_what_it_sent_has_arrived() -> None:
    trace = Trace(BufferStore())
    trace.begin()
    trace.until(1 << 62)
    trace.end()
    trace.begin()
    trace.end()
    start, end, next_start, next_end = trace.times_ns()
    assert start <= next_start <= next_end < end == 1 << 62


def test_a_receive_ends_when_its_tensor_has_come_but_not_before_it_began() -> None:
    trace = Trace(BufferStore())
    trace.begin()
    done = trace.later()
    trace.end()
    begin, _ = trace.times_ns()
    done(1)
    assert trace.times_ns() == (begin, begin)
    done(begin + 5)
    done(begin + 3)
    assert trace.times_ns() == (begin, begin + 5)
    trace.close()
    done(begin + 9)
    assert trace.times_ns() == (begin, begin + 5)


# ---- the work of an emulated device

LATE_NS = 7


@pytest.fixture
def now_ns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time, which stands still but for sleeps; these end too late."""
    now = [1_000]

    def sleep_until(end_ns: int) -> None:
        now[0] = max(now[0], end_ns) + LATE_NS

    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    monkeypatch.setattr(module, "sleep_until", sleep_until)
    return now


def test_what_others_can_see_waits_for_the_end_of_the_work(now_ns: list[int]) -> None:
    progress, done = WorkerProgress(), []
    progress.after_work(lambda: done.append(now_ns[0]))
    assert done == [1_000], "without work there is nothing to wait for"
    progress.work(5_000)
    progress.after_work(lambda: done.append(now_ns[0]))
    progress.after_work(lambda: done.append(-1))
    progress.begin()
    assert (len(done), now_ns) == (1, [1_000]), "the host goes on"
    with progress.wait():
        assert done[1:] == [5_000 + LATE_NS, -1]
    assert progress.settle() == 0


def test_a_host_that_comes_late_does_what_is_due_at_its_next_instruction(now_ns: list[int]) -> None:
    progress, done = WorkerProgress(), []
    for late in (progress.begin, lambda: progress.after_work(lambda: done.append(2))):
        progress.work(now_ns[0] + 100)
        progress.after_work(lambda: done.append(1))
        now_ns[0] += 500
        late()
    assert done == [1, 1, 2]
    assert progress.ready_ns() == now_ns[0], "the device has had to wait for the host"


def test_a_device_begins_when_all_is_there_that_the_host_waited_for(now_ns: list[int]) -> None:
    progress = WorkerProgress()

    def began(awaited_ns: int = 0, came_ns: int = 0, until_ns: int = 0) -> int:
        progress.work(now_ns[0] + 100)
        progress.begin()
        if awaited_ns:
            since_ns = progress.settle()
            with progress.wait():
                now_ns[0] = max(now_ns[0], start_ns + awaited_ns) + LATE_NS
            progress.awaited(max(since_ns, start_ns + awaited_ns))
        if came_ns:
            progress.came(start_ns + came_ns)
        if until_ns:
            wait_until(start_ns + until_ns, progress)
        return progress.ready_ns() - start_ns

    for arguments, expected in [
        ({}, 100),
        ({"came_ns": 90}, 100),
        ({"awaited_ns": 50}, 100),
        ({"awaited_ns": 150}, 150),
        ({"awaited_ns": 150, "came_ns": 155}, 155),
        ({"awaited_ns": 150, "until_ns": 180}, 180),
        ({"until_ns": 40}, 100),
        ({"until_ns": 180}, 180),
    ]:
        start_ns = now_ns[0]
        assert began(**arguments) == expected, arguments


def test_after_a_wait_of_unknown_length_a_device_begins_with_the_host(now_ns: list[int]) -> None:
    progress = WorkerProgress()
    progress.work(2_000)
    with progress.wait():
        now_ns[0] += 300
    assert progress.ready_ns() == now_ns[0] == 2_300 + LATE_NS
    progress.work(5_000)
    progress.settle()
    progress.begin()
    assert progress.ready_ns() == now_ns[0], "what another instruction has waited for says nothing of this one"
