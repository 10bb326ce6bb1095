"""Options, decisions and outcomes of the re-plan controller. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onebox.errors import UsageError
from onebox.plan.model.plan import Plan

ReplanKind = Literal["reorder", "recut", "reshare", "back"]
"""Order of actions; placement of segments or devices; shares of replicas; return to the plan before."""


@dataclass(frozen=True, kw_only=True)
class ReplanOptions:
    """Thresholds of the re-plan controller. Steps shorter than ``look_s`` are combined and count as one throughout.

    Args:
        look_s: Minimum seconds of measurements evaluated together. A shorter disturbance is no change, however many
            steps it affects: an operating system may take a core away for so long.
        gain: Minimum expected saving of a decision, as a part of a step.
        horizon: Steps over which its cost has to be recovered.
        dwell: Minimum steps from the evaluation of a decision to the next decision; doubled by each one that yields
            less than half of its expected saving, until one yields more.
        settle: Steps after a change of plan that are ignored: the first ones are slower, or still of the plan before.
        trial: Steps after those by which a decision is evaluated.
        worse: Slowdown, as a part of a step, above which a decision is undone.
        back_off: Steps for which an undone change is not tried again; doubled each time.
        pause_s: Assumed seconds of any change of plan, until one has been measured.
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
    """A change to be made between two steps.

    Args:
        kind: Its kind.
        step: The last measured step.
        plan: The plan from now on, with the same micro-batches; for ``back`` the one before the undone decision.
        why: The observation, as text.
        what: The change, as text.
        before_s: Expected seconds of a step without it.
        after_s: Expected seconds of a step with it.
        cost_s: Expected one-time cost in seconds.
        moved_bytes: Bytes moved between devices.
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
        """A one-line description."""
        told = f"{milliseconds(self.after_s)} expected instead of {milliseconds(self.before_s)} a step"
        return f"step {self.step}: {self.why} → {self.what}; {told}"


@dataclass(frozen=True, kw_only=True)
class ReplanOutcome:
    """The evaluated result of a decision.

    Args:
        decision: The decision.
        step: The step after which it was evaluated.
        paid_s: Seconds that the change took.
        before_s: Measured seconds of a step before it.
        after_s: Measured seconds of a step after it.
        kept: Whether it stays; ``None`` where devices changed again, which makes the two incomparable.
    """

    decision: ReplanDecision
    step: int
    paid_s: float
    before_s: float
    after_s: float
    kept: bool | None

    @property
    def line(self) -> str:
        """A one-line description."""
        end = {True: "kept", False: "taken back", None: "kept; devices or links changed meanwhile"}[self.kept]
        measured = f"{milliseconds(self.after_s)} measured, {milliseconds(self.decision.after_s)} expected"
        return f"step {self.step}: {measured}, {milliseconds(self.before_s)} before: {end}"


def milliseconds(seconds: float) -> str:
    """Format the time of a step."""
    shown = seconds * 1e3
    return f"{shown:.0f} ms" if shown >= 20 else f"{shown:.2g} ms"
