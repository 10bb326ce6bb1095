"""Command queues: what a collective left unwaited is written before the next use, by one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from onebox.vgpu.core.metadata import dense
from onebox.vgpu.registration import install
from onebox.vgpu.runtime.command_queue import CALLS, SOON, CommandQueue, RecordedOp
from onebox.wire import KernelSpec
from tests.unit.house import threads_for_processes


@pytest.fixture
def queue() -> Iterator[CommandQueue]:
    install()
    with threads_for_processes() as opening:
        yield CommandQueue(opening(1), 0, lambda queue: None)


def test_a_use_waits_for_a_write_of_another_thread(queue: CommandQueue) -> None:
    """Also where that has begun with the last one; what a write itself uses does not wait, and begins no other."""
    begun, go_on, log = threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        begun.set()
        go_on.wait(60)
        queue.write_unwaited()
        log.append("first")

    def use() -> None:
        if queue.unwaited:
            queue.write_unwaited()
        log.append("use")

    queue.write_before_use(first)
    writing, using = threading.Thread(target=queue.write_unwaited), threading.Thread(target=use)
    writing.start()
    assert begun.wait(60)
    queue.write_before_use(lambda: log.append("second"))
    using.start()
    using.join(0.3)
    assert using.is_alive() and not log
    go_on.set()
    writing.join(60)
    using.join(60)
    assert log == ["first", "second", "use"]


def test_the_last_write_counts_until_it_is_recorded(queue: CommandQueue) -> None:
    seen: list[int] = []
    queue.write_before_use(lambda: seen.append(len(queue.unwaited)))
    queue.write_unwaited()
    assert seen == [1] and not queue.unwaited


def test_an_error_of_a_write_is_raised_and_the_others_follow(queue: CommandQueue) -> None:
    log: list[str] = []
    queue.write_before_use(lambda: log[5])
    queue.write_before_use(lambda: log.append("second"))
    with pytest.raises(IndexError):
        queue.write_unwaited()
    queue.write_unwaited()
    assert log == ["second"] and not queue.unwaited


def test_a_batch_is_full_of_calls_whatever_it_frees(queue: CommandQueue) -> None:
    """The first one after a wait is short, and each next one twice as long."""
    counting = RecordedOp(KernelSpec("aten.arange.default", (4,), {}, 0, 0, (dense(torch.int64, (4,)).strided(),)), 1)
    queue.synchronize()
    queue.read(queue.record(counting, [], []))
    sizes: list[int] = []
    size, sent = 0, queue.channel.messages
    while len(sizes) < 5:
        queue.native.drop(queue.record(counting, [], []))
        size += 1
        if queue.channel.messages > sent:
            sizes.append(size)
            size, sent = 0, queue.channel.messages
    queue.synchronize()
    assert sizes == [SOON, CALLS, CALLS, CALLS, CALLS]
