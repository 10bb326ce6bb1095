"""The schedule of a run follows what its devices and links do: what steps took goes in, plans that take over come out.

A thread of its own looks at each step that has ended, lets the follower (:mod:`onebox.plan.replan.controller`) decide,
and makes a new plan ready while steps go on; the thread that begins steps lets it take over between two of them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from onebox.engine.adaptive.measurements import StepContext, measure_step, seconds_between, without_jitter
from onebox.engine.adaptive.migration import Migration, MigrationReport
from onebox.errors import OneboxError
from onebox.plan import Plan
from onebox.plan.model.problem import Problem
from onebox.plan.replan.controller import ReplanController
from onebox.plan.replan.decisions import ReplanDecision, ReplanOutcome
from onebox.plan.replan.measurements import StepMeasurement

_FIRST = 3
"""Steps that are not looked at: workers are still slow."""

_MEASURED = 5
"""Steps that a problem is made of which nobody has measured before."""

_BEHIND = 64
"""Steps that may wait to be looked at; older ones are forgotten."""

_SLICE_S = 0.1
"""How long workers are waited for at a time."""

_WORTH = 0.25
"""What a new plan has to save of a step for the next step to wait for it: to let a pipeline run empty costs less."""

_JOIN_S = 10.0
"""How long a thread is waited for that is to end: a decision, or what makes a plan ready, is in no hurry to stop."""

_LOG = logging.getLogger("onebox")

MakeProblem = Callable[[Plan, list[StepMeasurement]], Problem]
"""From a plan and what its steps took to what a planner is given."""


@dataclass(frozen=True, kw_only=True)
class AppliedDecision:
    """A decision that was carried out, or was to be.

    Args:
        decision: What was seen and decided.
        step: The first step under the new plan.
        moved_bytes: Bytes that travelled from worker to worker.
        seconds: By which the steps around it took longer than they would have under the new plan; 0 until the first
            step under that has ended.
        refused: Why it could not be carried out; empty where it was.
        outcome: What was measured of it; ``None`` as long as that is open.
    """

    decision: ReplanDecision
    step: int
    moved_bytes: int = 0
    seconds: float = 0.0
    refused: str = ""
    outcome: ReplanOutcome | None = None

    @property
    def line(self) -> str:
        """One line for a person."""
        if self.refused:
            return f"{self.decision.line}; not done: {self.refused}"
        moved = f"{self.moved_bytes / 1e6:.1f} MB moved" + (f", {self.seconds:.2f} s lost" if self.seconds else "")
        return f"{self.decision.line}; {moved}" + (f"; {self.outcome.line}" if self.outcome else "")


class AdaptableRun(Protocol):
    """What follows asks of the run."""

    steps_done: int

    def prepare(self, plan: Plan) -> Migration | None:
        """Make all ready for another plan; any thread may call this."""

    def adopt(self, plan: Plan, prepared: Migration | None = None) -> MigrationReport:
        """Let another plan take over."""


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step that has ended, and the plan that it ran under."""

    whole: StepContext
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """A decision whose plan may take over."""

    decision: ReplanDecision
    migration: Migration | None


@dataclass(frozen=True, kw_only=True)
class _Done:
    """A decision that was carried out, and whether workers were busy with a step just then."""

    decision: ReplanDecision
    under_way: bool


class AdaptiveController:
    """Follows a run.

    Args:
        run: The run.
        make_problem: Makes the problem of what was measured.
        batch: Returns the samples of a batch that is as most are.
    """

    def __init__(self, run: AdaptableRun, make_problem: MakeProblem, batch: Callable[[], int]) -> None:
        self.decisions: tuple[AppliedDecision, ...] = ()
        self._run = run
        self._make_problem = make_problem
        self._batch = batch
        self._told: queue.Queue[_Step | _Done | None] = queue.Queue()
        self._ready: _Ready | None = None
        self._changed = threading.Condition()
        self._patience_s = 0.0
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    # ---- the thread that begins steps

    def ended(self, whole: StepContext, plan: Plan) -> None:
        """Take the times of a step that has ended."""
        if self._stopped.is_set() or self._told.qsize() > _BEHIND:
            return
        if self._thread is None:
            work = _Work(self, self._told, self._stopped)
            self._thread = threading.Thread(target=work.run, name="onebox-adaptive", daemon=True)
            self._thread.start()
        self._told.put(_Step(whole=whole, plan=plan))

    def between_steps(self, *, under_way: bool = False) -> bool:
        """Let a plan take over that is ready to, or is about to be because something has plainly changed.

        Args:
            under_way: Whether workers are busy with a step, so that the next one may wait.

        Returns:
            Whether a plan was to take over.

        Raises:
            OneboxError: A worker was lost, and the run cannot go on after that.
        """
        with self._changed:
            if under_way:
                self._wait()
            ready, self._ready = self._ready, None
        if ready is None:
            return False
        told = self._told
        moved = self._run.adopt(ready.decision.plan, ready.migration)
        if self._told is not told:  # a worker was lost meanwhile, and all begins anew
            return True
        self.note(AppliedDecision(decision=ready.decision, step=self._run.steps_done, moved_bytes=moved.size_bytes))
        self._told.put(_Done(decision=ready.decision, under_way=under_way))
        return True

    def _wait(self) -> None:
        """Wait, with the lock, until the thread has nothing to do any more or a plan is ready; once for each doubt."""
        begin_s = time.monotonic()
        while self._ready is None and self._told.unfinished_tasks:
            left_s = begin_s + self._patience_s - time.monotonic()
            if left_s <= 0:
                break
            self._changed.wait(left_s)
        self._patience_s = 0.0

    def restart(self) -> None:
        """Forget what was seen and decided: the run goes on after a loss, maybe with another plan and other devices."""
        self.close()
        self._told, self._stopped, self._thread = queue.Queue(), threading.Event(), None
        with self._changed:
            self._ready, self._patience_s = None, 0.0

    def close(self) -> None:
        """End the thread; what it is about to decide is not done. Idempotent."""
        self._stopped.set()
        self._told.put(None)
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    # ---- its own thread

    def begin(self, plan: Plan, steps: list[StepMeasurement]) -> tuple[ReplanController, Problem]:
        """Return a follower of a plan, given what its first steps took, and the problem that it goes by."""
        problem = self._make_problem(plan, steps)
        return ReplanController(problem, plan, self._batch()), problem

    def samples(self) -> int:
        """Return the samples of a batch that is as most are."""
        return self._batch()

    def looked(self, told: queue.Queue[_Step | _Done | None], patience_s: float) -> None:
        """Say that something that was told has been looked at.

        Args:
            told: Where it was.
            patience_s: How long the step after the next one may wait for what is found about the next.
        """
        told.task_done()
        with self._changed:
            if told is self._told:
                self._patience_s = patience_s
                self._changed.notify_all()

    def offer(self, decision: ReplanDecision, stopped: threading.Event) -> str:
        """Make a plan ready, and let it take over before the next step; return why not, where it cannot."""
        saved_s = decision.before_s - decision.after_s
        with self._changed:  # the step under way is waited for at no cost, and then as long as another one would lose
            self._patience_s = decision.before_s + saved_s if saved_s > _WORTH * decision.before_s else 0.0
            self._changed.notify_all()
        try:
            migration = self._run.prepare(decision.plan)
            if migration is not None:
                migration.ask()
                while not migration.write(_SLICE_S):
                    if stopped.is_set():
                        return ""
        except OneboxError as error:
            why = str(error).splitlines()[0]
            if not stopped.is_set():
                self.note(AppliedDecision(decision=decision, step=decision.step, refused=why))
            return why
        with self._changed:
            if not stopped.is_set():
                self._ready = _Ready(decision=decision, migration=migration)
                self._changed.notify_all()
        return ""

    def note(self, made: AppliedDecision) -> None:
        """Add a decision to those that were made."""
        with self._changed:
            self.decisions = (*self.decisions, made)
        _LOG.warning("adaptive: %s", made.line)

    def judged(self, outcome: ReplanOutcome) -> None:
        """Add to a decision what became of it."""
        self._add(outcome.decision, outcome=outcome)
        _LOG.warning("adaptive: %s", outcome.line)

    def took(self, decision: ReplanDecision, seconds: float) -> None:
        """Add to a decision what carrying it out took."""
        self._add(decision, seconds=seconds)

    def _add(self, decision: ReplanDecision, **known: Any) -> None:
        with self._changed:
            self.decisions = tuple(
                replace(made, **known) if made.decision is decision else made for made in self.decisions
            )


class _Work:
    """What the thread does.

    Args:
        owner: For whom.
        told: What it is told; ``None`` to end.
        stopped: Set when it is to end.
    """

    def __init__(
        self, owner: AdaptiveController, told: queue.Queue[_Step | _Done | None], stopped: threading.Event
    ) -> None:
        self._owner = owner
        self._told = told
        self._stopped = stopped
        self._follower: ReplanController | None = None
        self._problem: Problem | None = None
        self._last: _Step | None = None
        self._made: _Done | None = None
        self._passed = self._samples = 0
        self._first: deque[StepMeasurement] = deque(maxlen=_MEASURED)
        self._judged = 0
        self._doubt_s = 0.0  # how long a step may wait for what is found about the next one

    def run(self) -> None:
        """Take what is told until the end."""
        while (told := self._told.get()) is not None and not self._stopped.is_set():
            self._doubt_s = 0.0
            try:
                if isinstance(told, _Done):
                    self._made = told
                else:
                    self._take(told)
            except OneboxError as error:
                if not self._stopped.is_set():
                    _LOG.warning("adaptive: the schedule does not follow this run: %s", error)
                return
            finally:
                self._owner.looked(self._told, self._doubt_s)

    def _take(self, step: _Step) -> None:
        """Take a step that has another one before it, or the pace of steps is not known."""
        last, self._last = self._last, step
        made = self._made
        if made is not None and self._follower is not None and step.plan == made.decision.plan:
            self._made = None
            seconds = 0.0 if last is None else max(0.0, _took_s(made, last, step) - made.decision.after_s)
            self._follower.applied(made.decision, seconds)
            self._owner.took(made.decision, seconds)
            return
        if last is None or last.plan != step.plan:
            return
        if sum(part.size for part in step.whole.micro_batches) != (self._samples or self._owner.samples()):
            return
        seen = measure_step(step.whole, last.whole.trace)
        if self._follower is None or self._problem is None:
            self._passed += 1
            if self._passed > _FIRST:
                self._first.append(seen)
            if len(self._first) == _MEASURED:
                self._samples = self._owner.samples()
                self._follower, self._problem = self._owner.begin(step.plan, list(self._first))
            return
        if last.plan != self._follower.plan:
            return
        decision = self._follower.see(without_jitter(seen, self._problem.links))
        for outcome in self._follower.outcomes[self._judged :]:
            self._owner.judged(outcome)
        self._judged = len(self._follower.outcomes)
        if decision is not None and self._owner.offer(decision, self._stopped):
            self._follower.refused(decision)
        if self._follower.doubts:
            self._doubt_s = seen.step_s


def _took_s(made: _Done, last: _Step, step: _Step) -> float:
    """Return the seconds of the first step under a new plan, with all that delayed it.

    Where workers were busy until then, that is from end to end. Where they were not, the user was at something else,
    and only the step itself is known.
    """
    return (
        seconds_between(last.whole, step.whole) if made.under_way else measure_step(step.whole, last.whole.trace).step_s
    )
