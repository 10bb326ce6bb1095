"""Options, decisions and outcomes of the re-plan controller, and decisions as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from onebox.errors import UsageError
from onebox.plan.model.plan import Plan
from onebox.plan.model.shares import apportion
from onebox.plan.model.stage import Stage

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


_FEW_NAMES = 3
"""Maximum number of segments that are listed; more are given by the first, the last and their number."""

_FEW_WAYS = 3
"""Maximum number of listed moves of segments; more are given by their number."""


def describe_change(before: Plan, after: Plan, names: Sequence[str], batch: int) -> str:
    """Describe the change from one plan to another.

    Args:
        before: The plan in force.
        after: The plan from then on.
        names: All segments in order, for a plan of one stage.
        batch: Samples of a step.
    """
    parts = _segments_text(_holders(before, names), _holders(after, names))
    for number, (one, other) in enumerate(zip(before.stages, after.stages, strict=False)):
        if one.shares != other.shares and not parts:
            parts.append(_shares_text(number, other, after, batch))
    if before.micro_batch != after.micro_batch:
        parts.append(f"micro-batches are of {max(part.size for part in after.micro_batches(batch))} samples")
    if (before.schedule, before.table) != (after.schedule, after.table) and not parts:
        named = "a new order" if after.schedule == "table" else f"the order of {after.schedule}"
        parts.append(f"actions go in {named}")
    if before.in_flight != after.in_flight and not parts:
        depth = ", ".join(map(str, after.in_flight)) or "as few as can be"
        parts.append(f"stages have other numbers of micro-batches in flight ({depth})")
    return "; ".join(parts)


def describe_cost(moved_bytes: int, cost_s: float) -> str:
    """Describe the cost of a change."""
    size = f"{moved_bytes / 1e6:.0f} MB" if moved_bytes >= 1e6 else f"{moved_bytes / 1e3:.0f} kB"
    return f"({size}, about {cost_s:.1f} s)" if moved_bytes else f"(about {cost_s:.1f} s)"


def _holders(plan: Plan, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the devices of each segment."""
    return {
        name: tuple(device for replica in stage.replicas for device in replica)
        for stage in plan.stages
        for name in (stage.segments or names)
    }


def _segments_text(before: dict[str, tuple[int, ...]], after: dict[str, tuple[int, ...]]) -> list[str]:
    ways: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name, devices in after.items():
        left = tuple(device for device in before[name] if device not in devices)
        come = tuple(device for device in devices if device not in before[name])
        if come or left:
            ways.setdefault((left, come), []).append(name)
    if len(ways) > _FEW_WAYS:
        touched = sorted({device for left, come in ways for device in (*left, *come)})
        return [f"{sum(map(len, ways.values()))} segments move between devices {', '.join(map(str, touched))}"]
    return [_move_text(names, left, come) for (left, come), names in ways.items()]


def _move_text(names: Sequence[str], left: Sequence[int], come: Sequence[int]) -> str:
    what = ", ".join(names) if len(names) <= _FEW_NAMES else f"{names[0]} … {names[-1]} ({len(names)})"
    one = len(names) == 1
    subject = f"{'segment' if one else 'segments'} {what}"
    if not come:
        return f"{subject} {'leaves' if one else 'leave'} {_devices(left)}"
    if not left:
        return f"{subject} {'comes' if one else 'come'} to {_devices(come)}, too"
    return f"{subject} {'moves' if one else 'move'} from {_devices(left)} to {_devices(come)}"


def _shares_text(number: int, stage: Stage, plan: Plan, batch: int) -> str:
    units = len(plan.micro_batches(batch)) if plan.micro_batch is not None else batch
    dealt = apportion(units, stage.shares)
    what = "micro-batches" if plan.micro_batch is not None else "samples"
    each = ", ".join(f"{replica[0]}: {many}" for replica, many in zip(stage.replicas, dealt, strict=True))
    where = f"the replicas of stage {number}" if len(plan.stages) > 1 else "the devices"
    return f"{where} compute other shares of {units} {what} ({each})"


def _devices(numbers: Sequence[int]) -> str:
    return ("device " if len(numbers) == 1 else "devices ") + ", ".join(map(str, numbers))
