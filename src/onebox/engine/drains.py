"""What is left of a step, asked for behind it because what follows is no window of the same kind.

Nobody waits for it: a worker does what it is told in order, so that the next thing can be asked for at once. Answers
are taken in with those of the next step, or by whoever wants all to have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from onebox.pool import Answer, raise_first

Finish = Callable[[list[Answer]], object]
"""Given the answers, in the order of what was asked."""


class Drain:
    """What is left of a step, under way.

    Args:
        futures: What the workers will answer.
        finish: Takes their answers in.
    """

    def __init__(self, futures: Sequence[Future[Answer]], finish: Finish) -> None:
        self.futures = tuple(futures)
        self._finish: Finish | None = finish

    @property
    def open(self) -> bool:
        """Whether its answers have not been taken in."""
        return self._finish is not None

    def take(self) -> None:
        """Wait for the answers and take them in, once.

        Raises:
            OneboxError: It failed.
        """
        if self._finish is None:
            return
        answers = raise_first(self.futures)
        finish, self._finish = self._finish, None
        finish(answers)
