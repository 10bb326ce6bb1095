"""What workers are asked beside steps without anybody waiting for it, such as what is left of a step or of a plan.

A worker does what it is told in order, so that the next thing can be asked for at once. The answers are taken in with
those of the next step, or by whoever wants all to have ended: so a failure is told of where it came first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future

from onebox.plan import Sync
from onebox.pool import Pool, WorkerReply, raise_first

Finish = Callable[[list[WorkerReply]], object]
"""Given the answers, in the order of what was asked."""


class DeferredReplies:
    """Answers that nobody waits for at once.

    Args:
        futures: What the workers will answer.
        finish: Takes their answers in.
    """

    def __init__(self, futures: Sequence[Future[WorkerReply]], finish: Finish) -> None:
        self.futures = tuple(futures)
        self._finish: Finish | None = finish

    @property
    def open(self) -> bool:
        """Whether the answers have not been taken in."""
        return self._finish is not None

    def take(self) -> None:
        """Wait for the answers and take them in, once.

        Raises:
            OneboxError: A worker failed.
        """
        if self._finish is None:
            return
        answers = raise_first(self.futures)
        finish, self._finish = self._finish, None
        finish(answers)


class RetiredGroups:
    """Groups of earlier plans, which are left when steps of the newest one have read what came by them.

    The first step reads all that it computes with. Late ones compute with what was handed out a step before, and read
    what is handed out now with the second.

    Args:
        pool: The pool.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._groups: dict[int, tuple[Sequence[int], int]] = {}

    def add(self, groups: Mapping[int, Sequence[int]], steps: int) -> None:
        """Let groups be left when some more steps have begun.

        Args:
            groups: Their members, by group.
            steps: How many.
        """
        self._groups.update({group: (members, steps) for group, members in groups.items()})

    def step(self) -> None:
        """Take note that a step has begun; what is not even formed yet is left later.

        Raises:
            OneboxError: The pool is broken.
        """
        self._groups = {group: (members, steps - 1) for group, (members, steps) in self._groups.items()}
        self.leave([group for group, (_, steps) in self._groups.items() if steps <= 0 and self._pool.is_formed(group)])

    def leave(self, groups: Collection[int] | None = None) -> None:
        """Leave some groups, or all.

        Raises:
            OneboxError: The pool is broken.
        """
        for group in list(self._groups if groups is None else groups):
            members, _ = self._groups.pop(group)
            self._pool.leave_group(group, members)


def begin_group_formation(
    pool: Pool, members: Sequence[int], via: Sync, number: int, *, aside: bool = False
) -> DeferredReplies:
    """Let a group be formed, and tell by what it is known that it is.

    Args:
        pool: The pool.
        members: Its members.
        via: How they exchange what they exchange.
        number: What it is to be called.
        aside: Whether it is for what travels in the background.

    Raises:
        OneboxError: The pool is broken.
    """
    return DeferredReplies(
        pool.begin_group(members, via, number=number, aside=aside), functools.partial(pool.note_group, members)
    )
