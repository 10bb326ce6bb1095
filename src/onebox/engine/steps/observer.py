"""Observers of a run's steps: the session calls each of them at the events of a step and of the plan in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.steps.launch import LaunchedStep, StepRequest
from onebox.engine.steps.results import StepTrace
from onebox.plan import MicroBatch, Plan


@dataclass(frozen=True, kw_only=True)
class EndedStep:
    """A completed step.

    Args:
        number: Its number.
        plan: The plan that it ran under.
        current: Whether that plan is still in use.
        micro_batches: Micro-batches of its batch.
        trace: Times and memory of its instructions; ``None`` if workers do not report them.
    """

    number: int
    plan: Plan
    current: bool
    micro_batches: Sequence[MicroBatch]
    trace: StepTrace | None


class StepObserver:
    """Base of observers; an event that is not overridden is ignored.

    All events come from the thread that begins steps.
    """

    def installed(self, plan: InstalledPlan) -> None:
        """Handle the installation of a plan: the state is on the workers.

        Raises:
            OneboxError: A worker failed; the plan is closed.
        """

    def requested(self, work: StepRequest) -> None:
        """Handle a step that is about to be launched."""

    def began(self, step: LaunchedStep) -> None:
        """Handle a launched step; one that a recovery repeats is not reported again.

        Raises:
            OneboxError: A worker failed; the session recovers, or the state is void.
        """

    def ended(self, step: EndedStep) -> None:
        """Handle a completed step."""

    def replaced(self, before: InstalledPlan, after: InstalledPlan) -> None:
        """Handle a change of plan between two steps.

        Raises:
            OneboxError: A worker failed; the session recovers, or the state is void.
        """

    def reset(self) -> None:
        """Handle the loss of the state on the workers, which is about to be restored."""

    def close(self) -> None:
        """Free what the observer has on the workers, and end its threads; the run ends.

        Raises:
            OneboxError: The pool is broken.
        """
