"""Recovery history of a run: its newest snapshot and the steps since.

Pure: events in, decisions out; no clock, no socket, no tensor contents.
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
"""Target fraction of step time spent on snapshots; with measurement errors it stays below 3 %."""

FIRST_AFTER = 5
"""Steps until the first snapshot, which measures the cost of one."""

MOST_STEPS_APART = 1000
"""Most steps between two snapshots, which bounds memory and repeated work."""

_REMEMBERED = 21
_COSTS = 7

_TRUST = 4
"""Largest growth factor of the interval after each snapshot: the first costs are unrepresentative."""


@dataclass(frozen=True, kw_only=True)
class RestartPoint(Generic[S, T]):
    """Starting point of a recovery.

    Args:
        step: Number of steps in the snapshot.
        snapshot: The state after them.
        replay: Inputs of the steps since, in order.
    """

    step: int
    snapshot: S
    replay: tuple[T, ...]


class StepHistory(Generic[S, T]):
    """The newest complete snapshot, and the inputs of every step since.

    Where snapshots cannot be had, both are given up when they exceed their bound: then there is no starting point of a
    recovery until the next snapshot.

    Args:
        step: Number of completed steps at the beginning.
        snapshot: The state then.
        limit_bytes: Bytes of inputs since the snapshot after which another one is due; twice as many are kept.
        limit_steps: Steps kept.
    """

    def __init__(self, step: int, snapshot: S, *, limit_bytes: int, limit_steps: int = 2 * MOST_STEPS_APART) -> None:
        self._step = step
        self._snapshot: S | None = snapshot
        self._limit_bytes = limit_bytes
        self._limit_steps = limit_steps
        self._kept: deque[tuple[T, int]] = deque()
        self._kept_bytes = 0
        self._asked: int | None = None
        self._not_before = step
        self.complete = True
        """True while there is a starting point of a recovery."""

    @property
    def steps(self) -> int:
        """Number of steps begun."""
        return self._step + len(self._kept)

    @property
    def snapshot_step(self) -> int:
        """Number of steps in the newest complete snapshot."""
        return self._step

    @property
    def snapshot(self) -> S | None:
        """The newest complete snapshot; ``None`` where there is none."""
        return self._snapshot

    @property
    def asked(self) -> bool:
        """True if a snapshot is under way."""
        return self._asked is not None

    def begin(self, what: T, size_bytes: int) -> None:
        """Record the inputs of the next step before it begins."""
        if not self.complete and self._asked is None:
            self._step += 1
            return
        self._kept.append((what, size_bytes))
        self._kept_bytes += size_bytes

    def due(self, every: int) -> bool:
        """Return whether a snapshot is due, given the interval in steps."""
        if self._asked is not None or self.steps < self._not_before:
            return False
        return not self.complete or self._over(self._step, every)

    def must_wait(self, every: int) -> bool:
        """Return whether the snapshot under way must arrive before another step begins, so that the history stays
        bounded.

        It may take as long as the interval between snapshots, and until twice as many steps would be repeated.
        """
        return self._asked is not None and (self._over(self._asked, every) or len(self._kept) >= 2 * every)

    def ask(self, *, again: bool = False) -> None:
        """Record the request of a snapshot of the state after all steps begun.

        Args:
            again: Whether its state is that of the newest complete snapshot, which has been restored.
        """
        assert self._asked is None
        self._asked = self._step if again else self.steps

    def arrive(self, snapshot: S) -> S | None:
        """Record that the requested snapshot is complete; return the one that it replaces."""
        assert self._asked is not None
        before = self._snapshot
        while self._step < self._asked:
            self._forget_step()
        self._snapshot, self._asked, self.complete = snapshot, None, True
        return before

    def give_up(self) -> None:
        """Record that the requested snapshot will not arrive; the previous one stays."""
        self._asked = None
        if not self.complete:
            self._forget_steps()

    def put_off(self, every: int) -> None:
        """Give up the requested snapshot, for which there is no room; another one is due only after so many steps."""
        self.give_up()
        self._not_before = self.steps + every

    @property
    def full(self) -> bool:
        """True if the steps since the snapshot exceed their bound."""
        return len(self._kept) >= self._limit_steps or self._kept_bytes > 2 * self._limit_bytes

    def forget(self) -> S | None:
        """Give up the newest snapshot, which is returned, and the steps since."""
        before, self._snapshot, self.complete = self._snapshot, None, False
        if self._asked is None:
            self._forget_steps()
        else:
            while self._step < self._asked:
                self._forget_step()
        return before

    def restart(self) -> RestartPoint[S | None, T]:
        """Return the starting point of a recovery."""
        assert self.complete
        return RestartPoint(step=self._step, snapshot=self._snapshot, replay=tuple(what for what, _ in self._kept))

    def _forget_steps(self) -> None:
        while self._kept:
            self._forget_step()

    def _forget_step(self) -> None:
        self._kept_bytes -= self._kept.popleft()[1]
        self._step += 1

    def _over(self, step: int, every: int) -> bool:
        """Return whether the limit between two snapshots has been reached since a step."""
        since = [size for _, size in list(self._kept)[step - self._step :]]
        return len(since) >= every or (bool(since) and sum(since) > self._limit_bytes)


class SnapshotCadence:
    """Interval between snapshots.

    Args:
        given: Requested number of steps; ``None`` keeps the cost below :data:`SHARE`.
    """

    def __init__(self, given: int | None = None) -> None:
        self._given = given
        self._steps_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._costs_s: deque[float] = deque(maxlen=_COSTS)
        self._beside_s: list[float] = []
        self._most = FIRST_AFTER

    def step_took(self, seconds: float, *, beside: bool = False) -> None:
        """Record the time between the ends of two steps.

        Args:
            seconds: The time.
            beside: Whether a snapshot was sent meanwhile, so that additional time counts as its cost.
        """
        (self._beside_s if beside else self._steps_s).append(seconds)

    def snapshot_took(self, seconds: float) -> None:
        """Record the longest time for which a snapshot delayed this process or a worker."""
        if self._steps_s and self._beside_s:
            seconds += sum(self._beside_s) - len(self._beside_s) * statistics.fmean(self._steps_s)
        self._beside_s.clear()
        self._costs_s.append(seconds)
        self._most = min(_TRUST * self._most, MOST_STEPS_APART)

    def pass_over(self) -> None:
        """Record a snapshot whose cost is not representative: one of a state just uploaded to workers, which are still
        slow.
        """
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
        """Seconds from one snapshot to the next; 0 if not known yet."""
        return self.every * statistics.median(self._steps_s) if self._steps_s else 0.0


@dataclass(frozen=True, kw_only=True)
class RecoveryRecord:
    """Record of one recovery.

    Args:
        at_s: Time at which the loss was detected, in seconds since 1970.
        failure: One-line description of the failure.
        lost: Numbers of the lost workers in the pool.
        replaced: Lost workers that were restarted.
        gone: Lost workers that could not be restarted.
        plan: Description of the new plan, if one was needed.
        step: Number of steps that the run had begun.
        snapshot_step: Number of steps in the snapshot.
        redone: Number of steps that had begun since the snapshot and were repeated.
        attempts: Number of attempts.
        seconds: From detection until all completed steps were repeated and the others begun.
        exact: Whether repeated steps are bitwise the same: on a GPU only with deterministic operators.
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
    exact: bool = True

    def __str__(self) -> str:
        operator = self.failure.startswith(("OperatorError", "DeviceMemoryError"))
        otherwise = "an operator failed" if operator else "a group of workers fell apart"
        found = [f"lost {_workers(self.lost)}" if self.lost else otherwise]
        found += [f"started {_workers(self.replaced)} again"] if self.replaced else []
        found += [f"{_workers(self.gone)} gone"] if self.gone else []
        found += [f"new plan: {self.plan}"] if self.plan else []
        found += [f"redid {self.redone} steps from the snapshot after step {self.snapshot_step}"]
        inexact = self.redone and not self.exact
        found += ["which may differ in the last bits (onebox.Numerics(deterministic=True) prevents it)"] * inexact
        tries = f" in {self.attempts} attempts" if self.attempts > 1 else ""
        return f"recovered at step {self.step} in {self.seconds:.1f} s{tries}: {', '.join(found)} ({self.failure})"


def _workers(numbers: tuple[int, ...]) -> str:
    return f"worker{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
