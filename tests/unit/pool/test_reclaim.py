"""Devices that were given up: when they are tried again, and what comes of it."""

from __future__ import annotations

import threading

import pytest

from onebox.errors import PoolError
from onebox.pool import reclaim
from onebox.pool.backends.base import WorkerHandle
from onebox.pool.reclaim import FIRST_S, MOST_S, Reclaimer, RetryTimes
from tests.kit.waiting import until


def test_intervals_grow_with_refusals_and_not_while_nobody_can_be_asked() -> None:
    times = RetryTimes()
    assert times.wait_s(0.0) is None and times.due(0.0) is None and not times
    times.add(3, 0.0)
    times.add(3, 0.5)
    assert (times.due(FIRST_S / 2), times.wait_s(FIRST_S / 2), times.due(FIRST_S)) == (None, FIRST_S / 2, 3)
    now_s, waits = FIRST_S, []
    for _ in range(9):
        times.refused(3, now_s)
        wait_s = times.wait_s(now_s)
        assert wait_s is not None
        waits.append(wait_s)
        now_s += wait_s
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, MOST_S, MOST_S, MOST_S, MOST_S]
    times.unreachable(3, now_s)
    assert times.wait_s(now_s) == FIRST_S
    times.remove(3)
    assert not times


def test_the_device_that_is_due_for_the_longest_time_is_first() -> None:
    times = RetryTimes()
    times.add(1, 5.0)
    times.add(2, 3.0)
    assert times.due(9.0) == 2
    times.refused(2, 9.0)
    assert times.due(9.0) == 1


class Handle:
    """A worker that is only closed."""

    closed = False

    def close(self, *, grace_s: float) -> None:
        self.closed = True


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "FIRST_S", 0.01)


@pytest.mark.usefixtures("quick")
def test_a_device_is_tried_until_a_worker_was_started() -> None:
    handles, tries = {4: Handle(), 5: Handle()}, []

    def replace(device: int) -> tuple[WorkerHandle, str] | None:
        tries.append(device)
        if tries.count(device) == 1:
            return None
        if tries.count(device) == 2:
            raise PoolError("somebody else has it")
        return handles[device], "key"  # type: ignore[return-value]

    made = Reclaimer(replace)
    assert not made.ready
    made.seek([4, 5])
    until(lambda: made.ready)
    taken = made.take()
    assert {device: (each.handle, each.key) for device, each in taken.items()} == {
        device: (handle, "key") for device, handle in handles.items()
    }, "both of a host come together"
    assert all(each.away_s > 0 for each in taken.values())
    assert sorted(tries) == [4] * 3 + [5] * 3
    assert not made.ready and not made.take()
    made.close()
    assert not any(handle.closed for handle in handles.values()), "they belong to who took them"


@pytest.mark.usefixtures("quick")
def test_an_attempt_under_way_ends_with_its_source_and_what_nobody_took_is_closed() -> None:
    begun, ended, handle = threading.Event(), threading.Event(), Handle()

    def replace(device: int) -> tuple[WorkerHandle, str] | None:
        begun.set()
        assert ended.wait(30)
        return handle, "key"  # type: ignore[return-value]

    made = Reclaimer(replace)
    made.seek([1])
    assert begun.wait(30)
    assert not made.ready
    made.stop()
    ended.set()
    made.close()
    assert handle.closed
    made.seek([2])
    assert not made.take(), "it is closed"


def test_a_device_that_was_back_and_of_no_use_is_tried_after_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def add(self: RetryTimes, device: int, now_s: float, interval_s: float = FIRST_S) -> None:
        waits.append(interval_s)

    monkeypatch.setattr(RetryTimes, "add", add)
    made = Reclaimer(lambda device: None)
    made.seek([1])
    for _ in range(7):
        made.seek([1], doubtful=True)
    made.seek([1])
    made.close()
    assert waits == [FIRST_S, 2.0, 4.0, 8.0, 16.0, 32.0, MOST_S, MOST_S, FIRST_S]


@pytest.mark.usefixtures("quick")
def test_after_an_error_that_nobody_expected_a_device_is_tried_again() -> None:
    tries, handle = [], Handle()

    def replace(device: int) -> tuple[WorkerHandle, str] | None:
        tries.append(device)
        if len(tries) == 1:
            raise RuntimeError("can't start new thread")
        return handle, "key"  # type: ignore[return-value]

    made = Reclaimer(replace)
    made.seek([3])
    until(lambda: made.ready)
    made.close()
    assert tries == [3, 3] and handle.closed
