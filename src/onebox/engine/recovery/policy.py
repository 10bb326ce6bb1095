"""What a run keeps so that it can go on after a loss: its newest snapshot and the steps since.

Pure: what happened goes in, what is to be done comes out; no clock, no socket, no tensor is looked at.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")

SHARE = 0.02
"""The part of the time of a step that snapshots are to take: with what is measured wrong it stays below 3 %."""

FIRST_AFTER = 5
"""Steps until the first snapshot is taken, from which it is known what one costs."""

MOST_STEPS_APART = 1000
"""The most steps between two snapshots: what they keep, and what is redone after a loss, has a bound."""

_REMEMBERED = 21
_COSTS = 7

_TRUST = 4
"""With each snapshot that has been taken the next ones may be so many times further apart than before: what the first
ones cost is no measure, as they are the first."""


@dataclass(frozen=True, kw_only=True)
class RestartPoint(Generic[S, T]):
    """From where to go on.

    Args:
        step: Steps done in the snapshot.
        snapshot: The state after them.
        replay: What was given to the steps since, in order.
    """

    step: int
    snapshot: S
    replay: tuple[T, ...]


class StepHistory(Generic[S, T]):
    """The newest whole snapshot, and what was given to every step since.

    Args:
        step: Steps done at the beginning.
        snapshot: The state then.
        limit_bytes: How much the steps since may take before another snapshot is due.
    """

    def __init__(self, step: int, snapshot: S, *, limit_bytes: int) -> None:
        self._step = step
        self._snapshot = snapshot
        self._limit_bytes = limit_bytes
        self._kept: deque[tuple[T, int]] = deque()
        self._asked: int | None = None

    @property
    def steps(self) -> int:
        """Steps begun so far."""
        return self._step + len(self._kept)

    @property
    def snapshot_step(self) -> int:
        """Steps done in the newest whole snapshot."""
        return self._step

    @property
    def snapshot(self) -> S:
        """The newest whole snapshot."""
        return self._snapshot

    @property
    def asked(self) -> bool:
        """Whether a snapshot is under way."""
        return self._asked is not None

    def begin(self, what: T, size_bytes: int) -> None:
        """Take note of what the next step is given, before anybody begins with it."""
        self._kept.append((what, size_bytes))

    def due(self, every: int) -> bool:
        """Tell whether a snapshot is to be asked for now, when one is wanted every so many steps."""
        return self._asked is None and self._over(self._step, every)

    def must_wait(self, every: int) -> bool:
        """Tell whether the snapshot under way has to come before another step begins, so that what is kept has a bound.

        It has as long as snapshots are apart.
        """
        return self._asked is not None and self._over(self._asked, every)

    def ask(self, *, again: bool = False) -> None:
        """Take note that a snapshot of the state after all steps begun has been asked for.

        Args:
            again: Whether it is of the state that the newest whole snapshot has, which has been brought back.
        """
        assert self._asked is None
        self._asked = self._step if again else self.steps

    def arrive(self, snapshot: S) -> S:
        """Take the snapshot that was asked for; what came before it is no longer needed, and is returned."""
        assert self._asked is not None
        before = self._snapshot
        while self._step < self._asked:
            self._kept.popleft()
            self._step += 1
        self._snapshot, self._asked = snapshot, None
        return before

    def give_up(self) -> None:
        """Take note that the snapshot that was asked for will not come; the one before it stays."""
        self._asked = None

    def restart(self) -> RestartPoint[S, T]:
        """Return from where to go on after a loss."""
        return RestartPoint(step=self._step, snapshot=self._snapshot, replay=tuple(what for what, _ in self._kept))

    def _over(self, step: int, every: int) -> bool:
        """Tell whether what came since a step is as much as may come between two snapshots."""
        since = [size for _, size in list(self._kept)[step - self._step :]]
        return len(since) >= every or (bool(since) and sum(since) > self._limit_bytes)


class SnapshotCadence:
    """How many steps apart snapshots are.

    Args:
        given: What the user asks for; ``None`` for as many as keep their cost below :data:`SHARE`.
    """

    def __init__(self, given: int | None = None) -> None:
        self._given = given
        self._steps_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._costs_s: deque[float] = deque(maxlen=_COSTS)
        self._beside_s: list[float] = []
        self._most = FIRST_AFTER

    def step_took(self, seconds: float, *, beside: bool = False) -> None:
        """Take the time between the ends of two steps.

        Args:
            seconds: It.
            beside: Whether a snapshot was sent meanwhile, so that what it took longer is part of the cost of that.
        """
        (self._beside_s if beside else self._steps_s).append(seconds)

    def snapshot_took(self, seconds: float) -> None:
        """Take for how long a snapshot kept this process and a worker from their next step, at most."""
        if self._steps_s and self._beside_s:
            seconds += sum(self._beside_s) - len(self._beside_s) * statistics.fmean(self._steps_s)
        self._beside_s.clear()
        self._costs_s.append(seconds)
        self._most = min(_TRUST * self._most, MOST_STEPS_APART)

    def pass_over(self) -> None:
        """Take note that a snapshot has come whose cost says nothing of others: one of a state just brought to workers,
        which are still slow."""
        self._beside_s.clear()

    @property
    def every(self) -> int:
        """Steps from one snapshot to the next."""
        if self._given is not None:
            return self._given
        if not self._steps_s or not self._costs_s:
            return FIRST_AFTER
        step_s = statistics.median(self._steps_s)
        wanted = max(0.0, statistics.median(self._costs_s)) / (SHARE * step_s) if step_s > 0 else math.inf
        return max(1, math.ceil(min(wanted, self._most)))

    @property
    def apart_s(self) -> float:
        """Seconds from one snapshot to the next; 0 where that is not known yet."""
        return self.every * statistics.median(self._steps_s) if self._steps_s else 0.0


@dataclass(frozen=True, kw_only=True)
class RecoveryRecord:
    """The story of one recovery.

    Args:
        at_s: When the loss was noticed, in seconds since the epoch.
        failure: What was noticed, in a line.
        lost: Workers that were lost, by their numbers in the pool.
        replaced: Those of them that were started again.
        gone: Those that could not be.
        plan: What the new plan is, where one was needed.
        step: Steps that the run had begun.
        snapshot_step: Steps done in the snapshot that it went on from.
        redone: Steps that had been begun since, and were done again.
        attempts: How many it took.
        seconds: From the notice until all steps that had ended before were done again, and the others begun.
    """

    at_s: float
    failure: str
    lost: tuple[int, ...]
    replaced: tuple[int, ...]
    gone: tuple[int, ...]
    plan: str | None
    step: int
    snapshot_step: int
    redone: int
    attempts: int
    seconds: float

    def __str__(self) -> str:
        found = [f"lost {_workers(self.lost)}" if self.lost else "a group of workers fell apart"]
        found += [f"started {_workers(self.replaced)} again"] if self.replaced else []
        found += [f"{_workers(self.gone)} gone"] if self.gone else []
        found += [f"new plan: {self.plan}"] if self.plan else []
        found += [f"redid {self.redone} steps from the snapshot after step {self.snapshot_step}"]
        tries = f" in {self.attempts} attempts" if self.attempts > 1 else ""
        return f"recovered at step {self.step} in {self.seconds:.1f} s{tries}: {', '.join(found)} ({self.failure})"


def _workers(numbers: tuple[int, ...]) -> str:
    return f"worker{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
