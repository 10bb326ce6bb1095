"""Healing a pool: who is ended, who is started again, and who is waited for; no sockets."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import pytest

from onebox.errors import OneboxError, WorkerDied, WorkerHung
from onebox.pool import recovery as healing_module
from onebox.pool.errors import WorkerLocation
from onebox.pool.recovery import RecoveredWorkers, recover_workers
from onebox.wire.protocol.groups import LeaveGroup
from onebox.wire.protocol.requests import Instruction

DIED = WorkerDied("it ended")


class FakeMember:
    """A worker's process that only notes its end."""

    def __init__(self, worker: int) -> None:
        self.place = WorkerLocation(worker=worker, host="here", device="cpu")
        self.closed = False

    def close(self, *, grace_s: float) -> None:
        self.closed = True


class FakeBoard:
    """A switchboard of workers that answer at once, but for those that are late."""

    def __init__(self, lost: dict[int, OneboxError], late: set[int]) -> None:
        self.lost = lost
        self.late = late
        self.missed: dict[int, OneboxError] = {}
        self.dropped: list[int] = []
        self.posted: dict[int, list[Instruction]] = {}
        self.refuses: set[int] = set()
        self.interrupted: dict[int, list[int]] = {}
        self.always_late: set[int] = set()
        self.futures: dict[int, Future[Any]] = {}
        self.executed: dict[int, int] = {}
        self.domain = [0, 0, 0]
        self.together: tuple[int, ...] = (0, 1, 2)
        """Members of each worker's group."""
        self.until: dict[int, int] = {}
        """How often those that are late are told again before they are done, getting on all the time."""

    def affected(self, worker: int, lost: Collection[int]) -> bool:
        return not lost or self.domain[worker] in {self.domain[each] for each in lost}

    def drop(self, worker: int) -> dict[int, tuple[int, ...]]:
        self.dropped.append(worker)
        self.lost.pop(worker, None)
        self.late = (self.late - {worker}) | self.always_late
        return {100 + worker: self.together}

    def connect(self, member: Any, key: str) -> Future[Any]:
        if member.place.worker in self.refuses:
            raise DIED
        return Future()

    def give_up(self, worker: int, error: OneboxError) -> None:
        self.lost[worker] = error
        self.futures[worker].set_exception(error)

    def interrupt(self, worker: int, groups: list[int]) -> None:
        assert worker in self.late
        self.interrupted.setdefault(worker, groups)
        if worker in self.until:
            self.executed[worker] = self.executed.get(worker, 0) + 1
            if self.executed[worker] == self.until[worker]:
                self.futures[worker].set_result(None)

    def miss(self, worker: int, error: OneboxError) -> None:
        self.missed[worker] = error

    def mend(self) -> bool:
        return not self.lost

    def post(self, worker: int, instructions: list[Instruction], *, answer: bool) -> Future[Any]:
        self.posted[worker] = instructions
        done = self.futures[worker] = Future()
        if worker not in self.late:
            done.set_result(None)
        return done


class Case:
    """A pool of three workers.

    Args:
        lost: What befell those that are lost.
        late: Those that are not done in time.
        replaceable: Those that can be started again.
    """

    def __init__(self, *, lost: set[int], late: Collection[int] = (), replaceable: set[int]) -> None:
        self.board = FakeBoard(dict.fromkeys(sorted(lost), DIED), set(late))
        self.first = [FakeMember(worker) for worker in range(3)]
        self.members: list[Any] = list(self.first)
        self.started: list[int] = []
        self.noted: dict[int, OneboxError] = {}
        self._replaceable = replaceable

    def replace(self, worker: int) -> Any:
        self.started.append(worker)
        return (FakeMember(worker), "key") if worker in self._replaceable else None

    def recover_workers(self) -> RecoveredWorkers:
        board: Any = self.board
        return recover_workers(
            board, self.members, self.replace, self.noted.__setitem__, present=(0, 1, 2), patience_s=0.01
        )


@pytest.fixture(autouse=True)
def welcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing_module, "welcome", lambda member, _: f"device {member.place.worker}")


def test_a_lost_worker_is_ended_and_another_takes_its_place() -> None:
    case = Case(lost={1}, replaceable={1})
    found = case.recover_workers()
    assert (case.noted, tuple(found.devices), found.gone) == ({1: DIED}, (1,), ())
    assert found.devices == {1: "device 1"}
    assert [member.closed for member in case.first] == [False, True, False]
    assert case.members[1] is not case.first[1]
    assert all(LeaveGroup(101) in case.board.posted[worker] for worker in (0, 2))


def test_one_that_cannot_be_started_again_has_gone() -> None:
    case = Case(lost={0, 1}, replaceable={1})
    found = case.recover_workers()
    assert (tuple(found.devices), found.gone) == ((1,), (0,))
    assert case.board.missed == {0: DIED}
    assert set(case.board.posted) == {1, 2}


def test_a_survivor_that_is_not_done_in_time_is_lost_too() -> None:
    case = Case(lost={1}, late={2}, replaceable={1, 2})
    found = case.recover_workers()
    assert tuple(found.devices) == (1, 2)
    assert isinstance(case.noted[2], WorkerHung)
    assert case.board.interrupted == {2: [101]}, "it may wait for who was lost"
    assert case.first[2].closed
    assert case.started == [1, 2]


def test_a_survivor_that_gets_on_is_waited_for() -> None:
    """A step may take longer than anybody's patience, and the survivor may be the only one with a snapshot."""
    case = Case(lost={1}, late={2}, replaceable={1, 2})
    case.board.until = {2: 50}
    found = case.recover_workers()
    assert tuple(found.devices) == (1,)
    assert set(case.noted) == {1}
    assert not case.first[2].closed


def test_nobody_lost_means_nobody_started() -> None:
    case = Case(lost=set(), replaceable={0, 1, 2})
    found = case.recover_workers()
    assert (case.noted, tuple(found.devices), found.gone, case.started) == ({}, (), (), [])
    assert set(case.board.posted) == {0, 1, 2}


def test_one_that_never_starts_has_gone_after_some_tries() -> None:
    case = Case(lost={1}, replaceable={1})
    case.board.refuses = {1}
    found = case.recover_workers()
    assert (tuple(found.devices), found.gone) == ((), (1,))
    assert len(case.started) == 2


def test_one_that_is_lost_whenever_it_is_asked_has_gone_after_some_tries() -> None:
    case = Case(lost=set(), late={1}, replaceable={1})
    case.board.always_late = {1}
    found = case.recover_workers()
    assert (tuple(found.devices), found.gone) == ((), (1,))
    assert set(case.board.missed) == {1}


def test_other_fault_domains_are_waited_for_only_in_groups_with_the_lost_worker() -> None:
    case = Case(lost={0}, late={2}, replaceable={0})
    case.board.domain, case.board.together = [0, 1, 2], (0, 1)
    found = case.recover_workers()
    assert set(case.noted) == {0} and tuple(found.devices) == (0,)
    assert LeaveGroup(100) in case.board.posted[1]
    assert 2 not in case.board.posted, "it goes on with what it has"
