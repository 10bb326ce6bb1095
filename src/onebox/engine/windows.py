"""Windows: steps that overlap, one routine for each worker and step. Pure.

A window holds what a worker does from the first forward of a step to the first one of the next: its schedule's row, in
which micro-batches of the step before have negative numbers, and the update with the gradients of that step. The first
window, and each behind a drain, has nothing of a step before; a drain has nothing else.

Every micro-batch of a step is computed, forward and backward, with the weights that were there when the step before
began (Narayanan et al. 2021, arXiv:2006.09503, PipeDream-2BW). Until the update of a window those are the newest ones
for its own step, and the previous ones for what is left of the step before; the update makes them the previous ones. A
window with nothing before it has them as the previous ones from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from onebox.engine.gradients import WorkerGradients
from onebox.engine.job import Numbers
from onebox.engine.routine import StepRoutine
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


class Weights:
    """Which version of a parameter the actions of a window read.

    Args:
        numbers: Shared numbers.
        window: The window.
    """

    def __init__(self, numbers: Numbers, window: Window) -> None:
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


class Update:
    """The update of a window: behind the last action of the step before, or at the end where sums are waited for.

    Args:
        gradients: Of the step before; ``None`` where there is none.
        weights: Told of the update.
        actions: The worker's row.
    """

    def __init__(self, gradients: WorkerGradients | None, weights: Weights, actions: Sequence[Action]) -> None:
        self._gradients = gradients
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
        if self._gradients is not None:
            self._gradients.finish()
            self._gradients = None
            self._weights.update()

    def _at_once(self) -> None:
        if self._gradients is not None and not self._left and not self._gradients.exchanged:
            self.finish()
