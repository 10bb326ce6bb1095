"""The progress of a worker, and the times and memory of its instructions."""

from __future__ import annotations

import pytest

from onebox.worker.memory.buffers import BufferStore
from onebox.worker.progress import Trace, WorkerProgress


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
