"""What workers are asked beside steps without anybody waiting for it, such as what is left of a step.

A worker does what it is told in order, so that the next thing can be asked for at once. The answers are taken in with
those of the next step, or by whoever wants all to have ended: so a failure is told of where it came first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from onebox.plan import Sync
from onebox.pool import Answer, Pool, raise_first

Finish = Callable[[list[Answer]], object]
"""Given the answers, in the order of what was asked."""


class Deferred:
    """Answers that nobody waits for at once.

    Args:
        futures: What the workers will answer.
        finish: Takes their answers in.
    """

    def __init__(self, futures: Sequence[Future[Answer]], finish: Finish) -> None:
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


def formed(pool: Pool, members: Sequence[int], via: Sync, number: int) -> Deferred:
    """Let a group be formed, and tell by what it is known that it is.

    Args:
        pool: The pool.
        members: Its members.
        via: How they exchange what they exchange.
        number: What it is to be called.

    Raises:
        OneboxError: The pool is broken.
    """
    return Deferred(pool.begin_group(members, via, number=number), functools.partial(pool.note_group, members))
