"""Adaptive replanning of a running plan: measured step times go in, plans that take over come out.

A separate thread examines each completed step, asks the replan controller (:mod:`onebox.plan.replan.controller`) for a
decision, and prepares a new plan while steps go on; the thread that begins steps switches plans between two steps.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from onebox.engine.adaptive.measurements import StepContext, measure_step, seconds_between, without_jitter
from onebox.engine.adaptive.migration import Migration, MigrationReport
from onebox.engine.steps.observer import EndedStep, StepObserver
from onebox.engine.steps.results import StepTrace
from onebox.errors import OneboxError
from onebox.plan import Plan
from onebox.plan.model.problem import Problem
from onebox.plan.replan.controller import ReplanController
from onebox.plan.replan.decisions import ReplanDecision, ReplanOutcome
from onebox.plan.replan.measurements import StepMeasurement
from onebox.plan.replan.network_rates import LinkProbe, ProbeResult

_FIRST = 3
"""Initial steps to ignore, while workers are still slow."""

_MEASURED = 5
"""Measured steps from which a problem is built when there is no earlier measurement."""

_BEHIND = 64
"""Most completed steps that may wait to be examined; older ones are dropped."""

_SLICE_S = 0.1
"""Interval at which a wait for workers is checked."""

_WORTH = 0.25
"""Least fraction of a step's time that a new plan must save for the next step to wait for it. Draining a pipeline costs
less."""

_JOIN_S = 10.0
"""Most seconds to wait for a thread that is to end: a decision or the preparation of a plan does not stop at once."""

_LOG = logging.getLogger("onebox")

MakeProblem = Callable[[Plan, list[StepMeasurement]], Problem]
"""Builds the planner's problem from a plan and the measurements of its steps."""


@dataclass(frozen=True, kw_only=True)
class AppliedDecision:
    """A decision that was carried out or attempted.

    Args:
        decision: The change that was detected and the decision about it.
        step: The first step under the new plan.
        moved_bytes: Bytes that travelled from worker to worker.
        seconds: Extra time of the steps around it, compared with steps under the new plan; 0 until the first step under
            the new plan has ended.
        refused: The reason that it could not be carried out; empty if it was.
        outcome: The measured effect; ``None`` while it is open.
    """

    decision: ReplanDecision
    step: int
    moved_bytes: int = 0
    seconds: float = 0.0
    refused: str = ""
    outcome: ReplanOutcome | None = None

    @property
    def line(self) -> str:
        """Return a one-line summary."""
        if self.refused:
            return f"{self.decision.line}; not done: {self.refused}"
        moved = f"{self.moved_bytes / 1e6:.1f} MB moved" + (f", {self.seconds:.2f} s lost" if self.seconds else "")
        return f"{self.decision.line}; {moved}" + (f"; {self.outcome.line}" if self.outcome else "")


class AdaptableRun(Protocol):
    """Interface of a run that replanning needs."""

    steps_done: int

    def prepare(self, plan: Plan) -> Migration | None:
        """Prepare another plan; callable from any thread."""

    def adopt(self, plan: Plan, prepared: Migration | None = None) -> MigrationReport:
        """Switch to another plan."""

    def probe(self, probe: LinkProbe) -> ProbeResult:
        """Measure a link while steps go on; callable from any thread."""


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A completed step and the plan that it ran under."""

    whole: StepContext
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """A decision whose plan is ready to take over."""

    decision: ReplanDecision
    migration: Migration | None


@dataclass(frozen=True, kw_only=True)
class _Done:
    """A decision that was carried out, and whether workers were busy with a step at that moment."""

    decision: ReplanDecision
    under_way: bool


class AdaptiveController(StepObserver):
    """Adaptive replanning of one run.

    Args:
        run: The run.
        make_problem: Builds the problem from measurements.
        batch: Returns the number of samples of a typical batch.
        context: Returns the times of a step with their context.
        beside: Surrounds what the thread does until the given event; the user's model is captured by that of the steps.
    """

    def __init__(
        self,
        run: AdaptableRun,
        make_problem: MakeProblem,
        batch: Callable[[], int],
        context: Callable[[EndedStep, StepTrace], StepContext],
        beside: Callable[[threading.Event], AbstractContextManager[None]],
    ) -> None:
        self.decisions: tuple[AppliedDecision, ...] = ()
        self.step_s = 0.0
        """Seconds of the last step that was examined; 0 before."""
        self._run = run
        self._make_problem = make_problem
        self._batch = batch
        self._context = context
        self._beside = beside
        self._told: queue.Queue[_Step | _Done | None] = queue.Queue()
        self._ready: _Ready | None = None
        self._changed = threading.Condition()
        self._patience_s = 0.0
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    # ---- the thread that begins steps

    def ended(self, step: EndedStep) -> None:
        """Record the times of a step that has ended."""
        if step.trace is None or self._stopped.is_set() or self._told.qsize() > _BEHIND:
            return
        if self._thread is None:
            work = _Work(self, self._told, self._stopped)
            self._thread = threading.Thread(target=work.run, name="onebox-adaptive", daemon=True)
            self._thread.start()
        self._told.put(_Step(whole=self._context(step, step.trace), plan=step.plan))

    def between_steps(self, *, under_way: bool = False) -> bool:
        """Switch to a plan that is ready, or about to be because a change is certain.

        Args:
            under_way: Whether workers are busy with a step, so that the next one may wait.

        Returns:
            Whether a switch of plans was attempted.

        Raises:
            OneboxError: A worker was lost, and the run cannot continue.
        """
        with self._changed:
            if under_way:
                self._wait()
            ready, self._ready = self._ready, None
        if ready is None:
            return False
        told = self._told
        moved = self._run.adopt(ready.decision.plan, ready.migration)
        if self._told is not told:  # a worker was lost meanwhile; everything starts afresh
            return True
        self.note(AppliedDecision(decision=ready.decision, step=self._run.steps_done, moved_bytes=moved.size_bytes))
        self._told.put(_Done(decision=ready.decision, under_way=under_way))
        return True

    def _wait(self) -> None:
        """Wait, holding the lock, until the thread is idle or a plan is ready; once for each suspected change."""
        begin_s = time.monotonic()
        while self._ready is None and self._told.unfinished_tasks:
            left_s = begin_s + self._patience_s - time.monotonic()
            if left_s <= 0:
                break
            self._changed.wait(left_s)
        self._patience_s = 0.0

    def reset(self) -> None:
        """Discard all measurements and decisions: the run continues after a loss, perhaps with another plan and other
        devices.
        """
        self.close()
        self._told, self._stopped, self._thread = queue.Queue(), threading.Event(), None
        with self._changed:
            self._ready, self._patience_s = None, 0.0

    def close(self) -> None:
        """End the thread; a pending decision is not carried out. Idempotent."""
        self._stopped.set()
        self._told.put(None)
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    # ---- the replanning thread

    def beside(self, stopped: threading.Event) -> AbstractContextManager[None]:
        """Return the surroundings of what the thread does until an event."""
        return self._beside(stopped)

    def begin(self, plan: Plan, steps: list[StepMeasurement]) -> tuple[ReplanController, Problem]:
        """Return a replan controller for a plan, given the measurements of its first steps, and the problem that it
        uses.
        """
        problem = self._make_problem(plan, steps)
        return ReplanController(problem, plan, self._batch()), problem

    def samples(self) -> int:
        """Return the number of samples of a typical batch."""
        return self._batch()

    def looked(self, told: queue.Queue[_Step | _Done | None], patience_s: float) -> None:
        """Record that a queued event has been processed.

        Args:
            told: The event queue.
            patience_s: Longest time that the step after the next one may wait for the decision about the next.
        """
        told.task_done()
        with self._changed:
            if told is self._told:
                self._patience_s = patience_s
                self._changed.notify_all()

    def offer(self, decision: ReplanDecision, stopped: threading.Event) -> str:
        """Prepare a plan and let it take over before the next step; return the reason if it cannot."""
        saved_s = decision.before_s - decision.after_s
        with self._changed:  # waiting for the step under way is free; after it, wait as long as another step would lose
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

    def saw(self, seen: StepMeasurement) -> None:
        """Record that a step has been examined."""
        self.step_s = seen.step_s

    def probe(self, probe: LinkProbe) -> ProbeResult:
        """Measure a link that no step uses."""
        return self._run.probe(probe)

    def remark(self, line: str) -> None:
        """Report what is not followed by a decision."""
        _LOG.warning("adaptive: %s", line)

    def note(self, made: AppliedDecision) -> None:
        """Record a decision."""
        with self._changed:
            self.decisions = (*self.decisions, made)
        _LOG.warning("adaptive: %s", made.line)

    def judged(self, outcome: ReplanOutcome) -> None:
        """Record the outcome of a decision."""
        self._add(outcome.decision, outcome=outcome)
        _LOG.warning("adaptive: %s", outcome.line)

    def took(self, decision: ReplanDecision, seconds: float) -> None:
        """Record the cost of carrying out a decision."""
        self._add(decision, seconds=seconds)

    def _add(self, decision: ReplanDecision, **known: Any) -> None:
        with self._changed:
            self.decisions = tuple(
                replace(made, **known) if made.decision is decision else made for made in self.decisions
            )


class _Work:
    """Body of the replanning thread.

    Args:
        owner: The object that it works for.
        told: Its events; ``None`` ends it.
        stopped: Set to end it.
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
        self._judged = self._remarked = 0
        self._doubt_s = 0.0  # how long a step may wait for the decision about the next one

    def run(self) -> None:
        """Process events until the end."""
        with self._owner.beside(self._stopped):
            self._run()

    def _run(self) -> None:
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
        """Process a step that follows another one; the interval between steps is not known otherwise."""
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
        self._owner.saw(seen)
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
        for line in self._follower.unmended[self._remarked :]:
            self._owner.remark(line)
        self._remarked = len(self._follower.unmended)
        if decision is not None and self._owner.offer(decision, self._stopped):
            self._follower.refused(decision)
        if (probe := self._follower.probe) is not None:
            self._follower.probed(self._owner.probe(probe))
        if self._follower.doubts:
            self._doubt_s = seen.step_s


def _took_s(made: _Done, last: _Step, step: _Step) -> float:
    """Return the seconds of the first step under a new plan, with all that delayed it.

    If workers were busy until then, this is the time from end to end. Otherwise the client did something else in
    between, and only the step itself is known.
    """
    return (
        seconds_between(last.whole, step.whole) if made.under_way else measure_step(step.whole, last.whole.trace).step_s
    )
