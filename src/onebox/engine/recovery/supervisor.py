"""Supervisor of what a run does on its workers: the common part, which stores the first failure for good."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from onebox.errors import OneboxError, OperatorError, PeerLost, ReplicasParted, WorkerDied, WorkerHung
from onebox.pool import Pool

RECOVERABLE = (WorkerDied, WorkerHung, PeerLost)
"""Errors from which a run can recover."""


class Supervisor:
    """Base of the supervisors of runs.

    Args:
        pool: The pool.
        locate: Adds the location in the step to an error.
        checkpoint: Path of the latest checkpoint.
    """

    def __init__(self, pool: Pool, locate: Callable[[Exception], None], checkpoint: Path | None) -> None:
        self.error: Exception | None = None
        """The first failure for good: the state on the workers is void."""
        self.checkpoint = checkpoint
        """Path of the latest checkpoint."""
        self._pool = pool
        self._locate = locate

    @contextlib.contextmanager
    def poisoning(self, what: str) -> Iterator[None]:
        """Fail for good if the context is interrupted while only some devices may have received a message.

        All of them get it in the same order with those of other trainers.

        Args:
            what: Description of the message.
        """
        try:
            with self._pool.order:
                yield
        except OneboxError:
            raise
        except BaseException:  # such as KeyboardInterrupt
            self.fail(interrupted(what))
            raise

    @contextlib.contextmanager
    def _failing(self, what: str, *, unless: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Fail for good if the context fails or is interrupted.

        Args:
            what: Description of the context.
            unless: Errors with which it does not.
        """
        try:
            yield
        except Exception as error:
            if not isinstance(error, unless):
                self.fail(error)
            raise
        except BaseException:  # such as KeyboardInterrupt
            self.fail(interrupted(what))
            raise

    def fail(self, error: Exception) -> None:
        """Store the first failure: the state on the workers is void, and every later call raises it."""
        self._locate(error)
        if self.error is None:
            self.error = error
            if isinstance(error, OperatorError):
                error.add(
                    "weights, the optimizer's state and buffers on the devices may be those after the step in part, so "
                    f"that this trainer cannot go on: resume from {self._resumable}{self._advice}"
                )

    def saved(self, checkpoint: Path) -> None:
        """Record that a checkpoint has been written, for the errors that refer to it."""
        self.checkpoint = checkpoint

    @property
    def _advice(self) -> str:
        """Further advice after a failed operator, for errors."""
        return ""

    @property
    def _resumable(self) -> str:
        """Description of the checkpoint to resume from, for errors."""
        return f"the last checkpoint, {self.checkpoint}" if self.checkpoint else "a checkpoint, if there is one"


def interrupted(what: str) -> ReplicasParted:
    """Return the error of something that was interrupted when only some workers may have had it."""
    return ReplicasParted(
        f"{what} was interrupted when some devices had it and others not; make another trainer, or resume from the "
        "last checkpoint"
    )


def cost_nothing(error: BaseException) -> bool:
    """Return whether an error has left the state on the workers as it was."""
    return isinstance(error, OperatorError) and error.kept


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"
