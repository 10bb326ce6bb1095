"""What workers are asked beside steps: answers are taken in once, and groups are left when nobody needs them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

import pytest

from onebox.engine.install.deferred_replies import DeferredReplies, RetiredGroups
from onebox.errors import PeerLost
from onebox.pool import Pool, WorkerReply


class Leaving:
    """A pool of which groups are left."""

    def __init__(self) -> None:
        self.left: list[tuple[int, Sequence[int]]] = []
        self.forming: set[int] = set()
        self.gone: set[int] = set()
        self.asked: list[tuple[int, Future[WorkerReply]]] = []

    def post(self, worker: int, instructions: Sequence[Any], *, answer: bool) -> Future[WorkerReply]:
        assert answer and not instructions
        self.asked.append((worker, Future()))
        return self.asked[-1][1]

    def reply(self) -> None:
        for _, future in self.asked:
            if not future.done():
                future.set_result(WorkerReply((), (), ()))

    def is_formed(self, group: int) -> bool:
        return group not in self.forming

    def leave_group(self, group: int, members: Sequence[int]) -> None:
        self.left.append((group, members))


def test_groups_are_left_when_steps_have_read_what_came_by_them() -> None:
    pool = Leaving()
    groups = RetiredGroups(cast(Pool, pool))
    groups.add({7: (0, 1)}, 1)
    groups.add({8: (1, 2), 9: (0, 2)}, 2)
    assert not pool.left
    groups.step()
    pool.reply()
    assert not pool.left
    groups.add({10: (0, 1)}, 2)
    groups.step()
    assert pool.left == [(7, (0, 1))]
    pool.reply()
    groups.step()
    assert pool.left[1:] == [(8, (1, 2)), (9, (0, 2))]
    assert groups.left
    groups.leave()
    assert not groups.left
    groups.leave()
    groups.step()
    assert pool.left[3:] == [(10, (0, 1))]


def test_a_group_is_left_only_when_all_members_that_are_there_have_read() -> None:
    pool = Leaving()
    pool.gone = {2}
    groups = RetiredGroups(cast(Pool, pool))
    groups.add({7: (0, 1, 2)}, 1)
    groups.step()
    assert [worker for worker, _ in pool.asked] == [0, 1]
    pool.asked[0][1].set_result(WorkerReply((), (), ()))
    for _ in range(3):
        groups.step()
    assert not pool.left
    pool.asked[1][1].set_exception(PeerLost("of a step that failed"))
    groups.step()
    assert pool.left == [(7, (0, 1, 2))]
    assert not groups.left


def test_nobody_leaves_a_group_that_others_are_about_to_join() -> None:
    pool = Leaving()
    groups = RetiredGroups(cast(Pool, pool))
    pool.forming = {7}
    groups.add({7: (0, 1)}, 1)
    for _ in range(3):
        groups.step()
    assert not pool.left
    pool.forming = set()
    groups.step()
    pool.reply()
    groups.step()
    assert pool.left == [(7, (0, 1))]


def test_answers_are_taken_in_once() -> None:
    asked: Future[WorkerReply] = Future()
    taken: list[list[WorkerReply]] = []
    deferred = DeferredReplies([asked], taken.append)
    assert deferred.open
    answer: Any = WorkerReply((), (), ())
    asked.set_result(answer)
    deferred.take()
    deferred.take()
    assert not deferred.open
    assert taken == [[answer]]


def test_what_failed_is_told_to_who_takes_it_in() -> None:
    asked: Future[WorkerReply] = Future()
    asked.set_exception(PeerLost("worker 1 is gone"))
    deferred = DeferredReplies([asked], lambda answers: pytest.fail("nothing to take in"))
    with pytest.raises(PeerLost, match="worker 1"):
        deferred.take()
    assert not deferred.open
