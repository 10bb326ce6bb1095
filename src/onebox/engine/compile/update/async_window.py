"""Windows: steps that overlap, one routine for each worker and step. Pure.

A window holds what a worker does from the first forward of a step to the first one of the next: its schedule's row, in
which micro-batches of the step before have negative numbers, and the update with the gradients of that step. The first
window, and each behind a drain, has nothing of a step before; a drain has nothing else.

Every micro-batch of a step is computed, forward and backward, with the weights that were there when the step before
began (Narayanan et al. 2021, arXiv:2006.09503, PipeDream-2BW). Until the update of a window those are the newest ones
for its own step, and the previous ones for what is left of the step before; the update makes them the previous ones. A
window with nothing before it has them as the previous ones from the start.

Where steps are exact and overlap all the same, nothing but the update is left of a step for the next window, and comes
there in parts.
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
        fill: The window of a step that has none before it.
        steady: The window of any other step; it is given what ``fill`` is.
        drain: What is left of a step that has none behind it.
    """

    fill: StepRoutine
    steady: StepRoutine
    drain: StepRoutine


class WindowWeights:
    """Which version of a parameter the actions of a window read.

    Args:
        numbers: Shared numbers.
        window: The window.
    """

    def __init__(self, numbers: BufferNumbers, window: Window) -> None:
        self._numbers = numbers
        self._updated = window == "fill"

    def update(self) -> None:
        """Take note that the parameters have been updated."""
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
    """The update of a window in which weights have versions: behind the last action of the step before, or at the end
    where it waits for other workers.

    Args:
        update: With the gradients of the step before; ``None`` where there is none.
        weights: Told of it.
        actions: The worker's row.
    """

    def __init__(self, update: WorkerUpdate | None, weights: WindowWeights, actions: Sequence[Action]) -> None:
        self._update = update
        self._weights = weights
        self._left = sum(action.micro_batch < 0 for action in actions)

    def begin(self) -> None:
        """Add it where nothing is left of the step before."""
        self._at_once()

    def before(self, action: Action) -> None:
        """Add what comes before an action."""

    def after(self, action: Action) -> None:
        """Add it behind the last action of the step before."""
        if action.micro_batch < 0:
            self._left -= 1
            self._at_once()

    def finish(self) -> None:
        """Add it if it has not been."""
        if self._update is not None:
            self._update.finish()
            self._update = None
            self._weights.update()

    def _at_once(self) -> None:
        if self._update is not None and not self._left and not self._update.waits:
            self.finish()


class DueUpdate:
    """The update of a window that is to be computed with the new weights: each part of it before the first reader.

    Args:
        update: With the gradients of the step before; ``None`` where there is none.
        read: Returns the parameters that an action reads.
    """

    def __init__(self, update: WorkerUpdate | None, read: Callable[[Action], Collection[str]]) -> None:
        self._update = update
        self._read = read

    def before(self, action: Action) -> None:
        """Add what an action needs of it."""
        if self._update is not None:
            self._update.before(self._read(action))

    def after(self, action: Action) -> None:
        """Add what comes behind an action."""

    def finish(self) -> None:
        """Add what is left of it."""
        if self._update is not None:
            self._update.finish()
            self._update = None
