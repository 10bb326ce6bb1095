"""Requests to workers outside steps that are not waited for, such as freeing the remains of a step or a plan.

A worker executes requests in order, so that the next request can follow at once. The replies are processed with those
of the next step, or by the first caller that needs all requests completed: so the earliest failure is reported first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future

from onebox.plan import Sync
from onebox.pool import Pool, WorkerReply, raise_first

Finish = Callable[[list[WorkerReply]], object]
"""Processes the replies, given in the order of the requests."""


class DeferredReplies:
    """Pending replies that are not waited for at once.

    Args:
        futures: The workers' replies.
        finish: Processes the replies.
    """

    def __init__(self, futures: Sequence[Future[WorkerReply]], finish: Finish) -> None:
        self.futures = tuple(futures)
        self._finish: Finish | None = finish

    @property
    def open(self) -> bool:
        """True if the replies have not been processed yet."""
        return self._finish is not None

    def told(self, error: Exception) -> None:
        """Let the replies count as processed if they are this failure."""
        if any(future.done() and future.exception() is error for future in self.futures):
            self._finish = None

    def take(self) -> None:
        """Wait for the replies and process them, once.

        Raises:
            OneboxError: A worker failed.
        """
        if self._finish is None:
            return
        finish, self._finish = self._finish, None
        finish(raise_first(self.futures))


class RetiredGroups:
    """Groups of earlier plans, left once steps of the newest plan have read the data received through them.

    The first exact step reads all such data. Steps with stale weights compute with data distributed one step before,
    and read the newest data in the second step. A member leaves when all of them have ended these steps: one that has
    only sent would else be gone while a slow link still carries what another one waits for.

    Args:
        pool: The pool.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._groups: dict[int, tuple[Sequence[int], int]] = {}
        self._read: dict[int, tuple[Sequence[int], list[Future[WorkerReply]]]] = {}
        """Groups whose data these steps read, and the replies that show that they have ended."""

    def add(self, groups: Mapping[int, Sequence[int]], steps: int) -> None:
        """Schedule groups to be left after a number of further steps.

        Args:
            groups: Members by group.
            steps: Number of steps.
        """
        self._groups.update({group: (members, steps) for group, members in groups.items()})

    @property
    def left(self) -> bool:
        """True if there are groups to leave."""
        return bool(self._groups or self._read)

    def step(self) -> None:
        """Record that a step has begun, and leave the groups that are no longer read; those that are not formed yet are
        left later.

        Raises:
            OneboxError: The pool is broken.
        """
        self.leave([group for group, (_, read) in self._read.items() if all(future.done() for future in read)])
        self._groups = {group: (members, steps - 1) for group, (members, steps) in self._groups.items()}
        due = [group for group, (_, steps) in self._groups.items() if steps <= 0]
        for group in filter(self._pool.is_formed, due):
            members, _ = self._groups.pop(group)
            there = [member for member in members if member not in self._pool.gone]
            self._read[group] = members, [self._pool.post(member, (), answer=True) for member in there]

    def leave(self, groups: Collection[int] | None = None) -> None:
        """Leave some groups, or all.

        Raises:
            OneboxError: The pool is broken.
        """
        retired = {group: members for known in (self._groups, self._read) for group, (members, _) in known.items()}
        for group in list(retired if groups is None else groups):
            self._groups.pop(group, None)
            self._read.pop(group, None)
            self._pool.leave_group(group, retired[group])


def begin_group_formation(
    pool: Pool, members: Sequence[int], via: Sync, number: int, *, aside: bool = False, tagged: bool = False
) -> DeferredReplies:
    """Form a group; return its pending replies.

    Args:
        pool: The pool.
        members: Its members.
        via: Transport of its exchanges.
        number: Number of the group.
        aside: Whether it is for background transfers.
        tagged: Whether its messages match by channel, which NCCL's do not.

    Raises:
        OneboxError: The pool is broken.
    """
    asked = pool.begin_group(members, via, number=number, aside=aside, tagged=tagged)
    return DeferredReplies(asked, functools.partial(pool.note_group, members))
