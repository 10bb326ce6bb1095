"""Windows: overlapping steps, as one routine for each worker and step. Pure.

A window is a worker's work from the first forward of a step to the first one of the next: its row of the schedule, in
which micro-batches of the previous step have negative numbers, and the update with the gradients of that step. The
first window, and each one after a drain, has no part of a previous step; a drain has nothing else.

Every micro-batch of a step uses, forward and backward, the weights at the beginning of the previous step (Narayanan et
al. 2021, arXiv:2006.09503, PipeDream-2BW). Until the update of a window these are the newest version for its own step,
and the previous version for the rest of the previous step; the update turns the newest into the previous version. In a
window without a predecessor they are the previous version from the start.

If exact steps overlap, only the update of a step remains for the next window, divided into parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from onebox.engine.compile.batch_job import BufferNumbers
from onebox.engine.compile.routine import StepRoutine
from onebox.engine.compile.update.optimizer_update import WorkerUpdate
from onebox.plan import Action

Window = Literal["fill", "steady", "drain"]


@dataclass(frozen=True, kw_only=True)
class WorkerWindows:
    """The routines of one worker.

    Args:
        fill: The window of a step without a predecessor.
        steady: The window of any other step, which continues from ``fill``.
        drain: The rest of a step without a successor.
    """

    fill: StepRoutine
    steady: StepRoutine
    drain: StepRoutine


class WindowWeights:
    """The version of each parameter that the actions of a window read.

    Args:
        numbers: Shared numbers.
        window: The window.
    """

    def __init__(self, numbers: BufferNumbers, window: Window) -> None:
        self._numbers = numbers
        self._updated = window == "fill"

    def update(self) -> None:
        """Record that the parameters have been updated."""
        self._updated = True

    def number(self, name: str, action: Action) -> int:
        """Return the buffer that the next action reads a parameter from."""
        numbers = self._numbers
        if name not in numbers.previous:  # it is not trained
            return numbers.state[name]
        if self._updated or action.micro_batch < 0:
            assert not self._updated or action.micro_batch >= 0, "an update comes before a backward that it is for"
            return numbers.previous[name]
        return numbers.ahead.get(name, numbers.state[name])


class LateUpdate:
    """The update of a window with versions of weights, and the vote before it: after the last action of the previous
    step, or at the end if it waits for other workers.

    Args:
        update: The update with the gradients of the previous step; ``None`` if there is none.
        vote: Adds the vote on that step.
        weights: Notified of the update.
        actions: The worker's row.
        early: Whether the vote begins after that action in any case.
    """

    def __init__(
        self,
        update: WorkerUpdate | None,
        vote: Callable[[], None],
        weights: WindowWeights,
        actions: Sequence[Action],
        *,
        early: bool,
    ) -> None:
        self._update = update
        self._early = early
        self._voted = False
        self._vote = vote
        self._weights = weights
        self._left = sum(action.micro_batch < 0 for action in actions)

    def begin(self) -> None:
        """Add it if nothing is left of the previous step."""
        self._at_once()

    def before(self, action: Action) -> None:
        """Add the instructions before an action."""

    def after(self, action: Action) -> None:
        """Add it after the last action of the previous step."""
        if action.micro_batch < 0:
            self._left -= 1
            self._at_once()

    def finish(self) -> None:
        """Add it if it has not been added."""
        if self._update is not None:
            self._vote_once()
            self._update.finish()
            self._update = None
            self._weights.update()

    def _at_once(self) -> None:
        if self._update is None or self._left:
            return
        if self._early:
            self._vote_once()
        if not self._update.waits:
            self.finish()

    def _vote_once(self) -> None:
        if not self._voted:
            self._vote()
            self._voted = True


class DueUpdate:
    """The update of a window that uses the new weights: each part before its first reader.

    Args:
        update: The update with the gradients of the previous step; ``None`` if there is none.
        read: Returns the parameters that an action reads.
    """

    def __init__(self, update: WorkerUpdate | None, read: Callable[[Action], Collection[str]]) -> None:
        self._update = update
        self._read = read

    def before(self, action: Action) -> None:
        """Add the parts that an action needs."""
        if self._update is not None:
            self._update.before(self._read(action))

    def after(self, action: Action) -> None:
        """Add the instructions after an action."""

    def finish(self) -> None:
        """Add the remaining parts."""
        if self._update is not None:
            self._update.finish()
            self._update = None
