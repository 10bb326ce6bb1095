"""What the run-time scheduler is told, what it decides, and what became of that. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onebox.errors import UsageError
from onebox.plan.model.plan import Plan

ReplanKind = Literal["reorder", "recut", "reshare", "back"]
"""Actions change their order; segments or devices change places; replicas change shares; the plan before is back."""


@dataclass(frozen=True, kw_only=True)
class ReplanOptions:
    """How eager the run-time scheduler is. Of steps shorter than ``look_s`` several count as one in all of this.

    Args:
        look_s: Seconds that are looked at together, at least. What lasts no longer tells no change, however many steps
            it befalls: an operating system gives a core to somebody else for so long.
        gain: A decision must be expected to save at least this part of a step.
        horizon: Steps over which what it costs to get there has to come back.
        dwell: Steps from the judgement of a decision to the next one, at least; doubled by each one that brings less
            than half of what was expected, until one brings more.
        settle: Steps after a change of plan that are not looked at: the first ones are slower, or still of the plan
            before.
        trial: Steps after those by which a decision is judged.
        worse: By this part of a step it may get slower before it is taken back.
        back_off: Steps for which what was taken back is not tried again; doubled each time.
        pause_s: Seconds that any change of plan is assumed to cost, until one has been measured.
        budget_actions: Actions that may be simulated for one decision; about 1 µs each.
    """

    look_s: float = 0.1
    gain: float = 0.05
    horizon: int = 100
    dwell: int = 2
    settle: int = 2
    trial: int = 5
    worse: float = 0.03
    back_off: int = 50
    pause_s: float = 0.2
    budget_actions: int = 120_000

    def __post_init__(self) -> None:
        for name in ("look_s", "gain", "worse", "pause_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(f"{name}={getattr(self, name)}: it is finite, from 0 up")
        for name in ("horizon", "trial", "back_off", "budget_actions"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: it is at least 1")
        if self.dwell < 0 or self.settle < 0:
            raise UsageError(f"dwell={self.dwell}, settle={self.settle}: both are from 0 up")


@dataclass(frozen=True, kw_only=True)
class ReplanDecision:
    """What is to be done between two steps.

    Args:
        kind: What it is.
        step: The last step that was seen.
        plan: The plan from now on, with the same micro-batches; for ``back`` the one before the decision taken back.
        why: What was seen.
        what: What is done.
        before_s: Seconds of a step that are expected without it.
        after_s: Seconds of a step that are expected with it.
        cost_s: Seconds that the change is expected to cost, once.
        moved_bytes: Bytes that go from device to device for it.
    """

    kind: ReplanKind
    step: int
    plan: Plan
    why: str
    what: str
    before_s: float
    after_s: float
    cost_s: float
    moved_bytes: int = 0

    @property
    def line(self) -> str:
        """One line for a person."""
        told = f"{milliseconds(self.after_s)} expected instead of {milliseconds(self.before_s)} a step"
        return f"step {self.step}: {self.why} → {self.what}; {told}"


@dataclass(frozen=True, kw_only=True)
class ReplanOutcome:
    """What a decision turned out to be.

    Args:
        decision: The decision.
        step: The step after which it was judged.
        paid_s: Seconds that the change took.
        before_s: Seconds of a step before it, measured.
        after_s: Seconds of a step after it, measured.
        kept: Whether it stays; ``None`` where nothing can be said, because the machines changed again.
    """

    decision: ReplanDecision
    step: int
    paid_s: float
    before_s: float
    after_s: float
    kept: bool | None

    @property
    def line(self) -> str:
        """One line for a person."""
        end = {True: "kept", False: "taken back", None: "kept; devices or links changed meanwhile"}[self.kept]
        measured = f"{milliseconds(self.after_s)} measured, {milliseconds(self.decision.after_s)} expected"
        return f"step {self.step}: {measured}, {milliseconds(self.before_s)} before: {end}"


def milliseconds(seconds: float) -> str:
    """Return a time of a step for a person."""
    shown = seconds * 1e3
    return f"{shown:.0f} ms" if shown >= 20 else f"{shown:.2g} ms"
