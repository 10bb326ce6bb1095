"""The re-plan controller: measurements of steps in, decisions out. Pure: no clock, no device.

The estimate of each device and link moves only when its measurements have clearly changed
(:mod:`onebox.plan.replan.change_detection`). Then the plan and changes of it are simulated with the present estimates
(:mod:`onebox.plan.replan.change_search`), and the best change is decided on if it saves enough of a step for long
enough to pay for itself. A few steps later it is evaluated by the measured step times: a change that made steps slower
is undone, and not tried again for a while.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from onebox.plan.model.layout import layout_of
from onebox.plan.model.plan import Plan
from onebox.plan.model.problem import Problem
from onebox.plan.replan.change_detection import RateChange
from onebox.plan.replan.change_search import ChangeSearch, ChangeTerms
from onebox.plan.replan.changes import PlanEdit, ProposedChange, changed_plan, edits_of, replan_kind_of
from onebox.plan.replan.decisions import (
    ReplanDecision,
    ReplanOptions,
    ReplanOutcome,
    describe_change,
    describe_cost,
    milliseconds,
)
from onebox.plan.replan.estimates import RateEstimator
from onebox.plan.replan.measurements import StepMeasurement, together
from onebox.plan.replan.network_rates import LinkProbe, ProbeResult

_PROBE = 200
"""Initial number of unused steps after which a slow device or link is estimated to be as planned again."""

_PATIENCE = 3
"""Maximum steps for which a decision waits while other estimates are about to change."""

_HOME = 0.5
"""Part of the required gain that suffices for going back to the first plan, which took a longer search."""

_SLOWER = 1.5
"""Factor by which an estimate has become worse if that is reported also where nothing can be done."""

_PACES = 32
"""Number of steps whose seconds are kept."""

_DEFAULTS = ReplanOptions()


@dataclass
class _Trial:
    """A decision that is not evaluated yet.

    Args:
        decision: The decision.
        before: The plan before it.
        before_s: Measured seconds of a step before it.
        moves: Its changes.
        devices: The devices whose work it changes.
        believed: The estimates before it.
        paid_s: Seconds that it took.
        steps_s: Seconds of the steps since.
    """

    decision: ReplanDecision
    before: Plan
    before_s: float
    moves: frozenset[PlanEdit]
    devices: frozenset[int]
    believed: Any
    paid_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)


class ReplanController:
    """Re-plan controller: estimates the state of devices and links, and decides on changes between two steps.

    The caller passes each step's measurements to :meth:`see` and carries out the decision that it returns, if any; then
    it calls :meth:`applied`, or :meth:`refused` if that was impossible. Until then there is no further decision.

    Args:
        problem: The problem that the plan was made for: segments, devices, links as measured.
        plan: The plan in force.
        batch: Samples of a step.
        options: Thresholds and limits.

    Raises:
        UsageError: The plan does not match the problem, or splits layers over devices, for which there are no times.
    """

    def __init__(self, problem: Problem, plan: Plan, batch: int, options: ReplanOptions = _DEFAULTS) -> None:
        sizes = {min(plan.micro_batch or batch, batch), *(problem.micro_batches if problem.regroupable else ())}
        allowed = tuple(sorted(size for size in sizes if size <= batch))
        self._problem = replace(problem, batch=batch, micro_batches=allowed, splits={})
        self._options, self._plan, self._home = options, plan, plan
        self._rates = RateEstimator(self._problem, plan, _PROBE)
        self._changes: dict[str, RateChange] = {}
        self._paces: deque[tuple[int, float]] = deque(maxlen=_PACES)
        self._skip, self._next, self._waited = options.settle, 0, 0
        self._dwell, self._pause_s = options.dwell, options.pause_s
        self._barred: dict[PlanEdit, tuple[int, int]] = {}
        self._retries: set[int] = set()
        self._open: _Trial | None = None
        self._trial: _Trial | None = None
        self._outcomes: list[ReplanOutcome] = []
        self._unmended: list[str] = []
        self._look: list[StepMeasurement] = []
        self._looks = self._step = 0
        self._last_s = 0.0
        self._due = False

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._plan

    @property
    def outcomes(self) -> tuple[ReplanOutcome, ...]:
        """Outcomes of the decisions that have been evaluated."""
        return tuple(self._outcomes)

    @property
    def unmended(self) -> tuple[str, ...]:
        """Descriptions of the slowdowns for which no change of plan was found."""
        return tuple(self._unmended)

    @property
    def probe(self) -> LinkProbe | None:
        """The measurement of an unused slow link that is due, for :meth:`probed`; ``None`` for none."""
        return None if self._open is not None or self._trial is not None else self._rates.probe()

    def probed(self, result: ProbeResult) -> None:
        """Process the result of :attr:`probe`; a change is decided on after the next step."""
        for change in self._rates.probed(result, self._step):
            self._changes[change.what] = change
            self._next, self._due = self._looks, True

    @property
    def doubts(self) -> bool:
        """Return whether one more step like the last may lead to a decision."""
        pending_s = math.fsum(seen.step_s for seen in self._look)
        if pending_s + self._last_s < self._options.look_s:
            return False
        return self._open is None and self._trial is None and self._rates.doubted

    def see(self, seen: StepMeasurement) -> ReplanDecision | None:
        """Process the measurements of a step; steps are passed once each, in order.

        Args:
            seen: The measurements.

        Returns:
            The change to make before the next step; usually ``None``.
        """
        self._step, self._last_s = seen.step, seen.step_s
        if self._open is not None:
            return None
        if self._skip:
            self._skip -= 1
            return None
        self._look.append(seen)
        if math.fsum(each.step_s for each in self._look) < self._options.look_s:
            return None
        look, self._look = together(self._look), []
        return self._see(look)

    def _see(self, look: StepMeasurement) -> ReplanDecision | None:
        """Process the measurements of a step, or of several combined."""
        self._looks += 1
        changes = self._rates.see(look)
        for change in changes:
            self._changes[change.what] = change
            self._next = min(self._next, self._looks + self._options.dwell)
        self._due = self._due or bool(changes) or self._unbarred()
        self._paces.append((look.step, look.step_s))
        if self._trial is not None:
            return self._evaluate_trial(self._trial, look.step_s, changes)
        if not self._due or self._looks < self._next:
            return None
        self._waited += 1
        if self._rates.alarmed and self._waited < _PATIENCE:
            return None
        self._due, self._waited = False, 0
        return self._decide()

    def applied(self, decision: ReplanDecision, seconds: float) -> None:
        """Record that a decision has been carried out.

        Args:
            decision: The decision that :meth:`see` returned.
            seconds: Seconds that this took, while no step could begin.
        """
        trial = self._taken(decision)
        self._plan = decision.plan
        self._rates.follow(decision.plan)
        self._skip = self._options.settle
        self._paces.clear()
        trial.paid_s = seconds
        moving_s = max(0.0, decision.cost_s - self._pause_s)
        self._pause_s += (max(0.0, seconds - moving_s) - self._pause_s) / 2
        if decision.kind == "back":
            self._rates.restore(trial.believed, trial.devices)
            self._due = True  # another change may help
        else:
            self._trial = trial

    def refused(self, decision: ReplanDecision) -> None:
        """Record that a decision could not be carried out: the plan stays, and the change is barred for a while."""
        self._bar(self._taken(decision).moves)
        self._due = True

    def _taken(self, decision: ReplanDecision) -> _Trial:
        trial, self._open = self._open, None
        assert trial is not None and trial.decision is decision, "it is the last decision, and told of once"
        return trial

    def _decide(self) -> ReplanDecision | None:
        """Return the change that pays, or ``None``."""
        options = self._options
        terms = ChangeTerms(
            horizon=options.horizon,
            pause_s=self._pause_s,
            budget_actions=options.budget_actions,
            barred=lambda move: self._barred.get(move, (-math.inf, 0))[0] > self._looks,
        )
        moves = ChangeSearch(self._rates.problem(), self._plan, terms)
        before_s, found = moves.before_s, moves.best((self._home,))
        saved_s = before_s - found.step_s
        now, first = (layout_of(self._problem, plan).parts for plan in (self._plan, self._home))
        home = found.layout.parts == first != now  # another order of the first plan's stages does not go back
        wanted = options.gain * (_HOME if home else 1.0)
        if not before_s or saved_s < wanted * before_s or saved_s * options.horizon <= found.cost_s:
            slower = [change.text for change in self._changes.values() if change.by > _SLOWER]
            if slower:
                stays = f"no other plan is quicker: {milliseconds(self._pace_s())} a step"
                self._unmended.append(f"step {self._step}: {', '.join(slower)}; {stays}")
            self._changes.clear()
            return None
        plan = changed_plan(self._plan, self._problem, found)
        measured_s = self._pace_s()
        return self._given(found, plan, measured_s, found.step_s / before_s * measured_s)

    def _pace_s(self) -> float:
        """Return the seconds of a step since the last change of devices and links."""
        since = max((change.since for change in self._changes.values()), default=self._step)
        last = [step_s for step, step_s in self._paces if step >= since]
        return median(last or [self._paces[-1][1]])

    def _given(self, found: ProposedChange, plan: Plan, before_s: float, after_s: float) -> ReplanDecision:
        """Return a decision, and record what its evaluation needs."""
        now, moved_bytes = layout_of(self._problem, self._plan), sum(found.moved.values())
        names = [segment.name for segment in self._problem.segments]
        told = describe_change(self._plan, plan, names, self._problem.batch)
        seen = {change.what: change for change in self._rates.slow_links()} | self._changes
        reasons = list(seen.values()) if self._changes else self._rates.differing()
        decision = ReplanDecision(
            kind=replan_kind_of(now, found.layout),
            step=self._step,
            plan=plan,
            why=", ".join(change.text for change in reasons) or "times of segments were learned",
            what=f"{told} {describe_cost(moved_bytes, found.cost_s)}",
            before_s=before_s,
            after_s=after_s,
            cost_s=found.cost_s,
            moved_bytes=moved_bytes,
        )
        same = set(now.parts) & set(found.layout.parts)
        devices = frozenset(d for one in {*now.parts, *found.layout.parts} - same for d in one.devices)
        moves = edits_of(now, found.layout)
        self._changes.clear()
        self._open = _Trial(decision, self._plan, before_s, moves, devices, self._rates.kept())
        return decision

    def _evaluate_trial(self, trial: _Trial, step_s: float, changes: list[RateChange]) -> ReplanDecision | None:
        """Evaluate a decision once enough steps were measured: keep or undo it."""
        trial.steps_s.append(step_s)
        if any(change.plain and (change.rate or not change.touches(trial.devices)) for change in changes):
            self._close(trial, kept=None)
            return None
        if len(trial.steps_s) < self._options.trial:
            return None
        after_s = median(trial.steps_s)
        if after_s <= trial.before_s * (1 + self._options.worse):
            self._close(trial, kept=True)
            return None
        self._close(trial, kept=False)
        self._bar(trial.moves)
        decision = ReplanDecision(
            kind="back",
            step=self._step,
            plan=trial.before,
            why=f"steps take {after_s / trial.before_s:.2f} × as long as before step {trial.decision.step}",
            what=f"what was done then is undone {describe_cost(trial.decision.moved_bytes, trial.decision.cost_s)}",
            before_s=after_s,
            after_s=trial.before_s,
            cost_s=trial.decision.cost_s,
            moved_bytes=trial.decision.moved_bytes,
        )
        self._open = replace(trial, decision=decision)
        return decision

    def _close(self, trial: _Trial, kept: bool | None) -> None:
        """Record the outcome of a decision; a small gain makes the next decision wait longer."""
        self._trial, after_s = None, median(trial.steps_s)
        half = (trial.before_s + trial.decision.after_s) / 2
        if kept is not None:
            self._dwell = self._options.dwell if after_s <= half else max(1, 2 * self._dwell)
            self._next = self._looks + self._dwell
        outcome = ReplanOutcome(
            decision=trial.decision,
            step=self._step,
            paid_s=trial.paid_s,
            before_s=trial.before_s,
            after_s=after_s,
            kept=kept,
        )
        self._outcomes.append(outcome)

    def _bar(self, moves: frozenset[PlanEdit]) -> None:
        """Bar some changes for a while, and for twice as long the next time."""
        for move in moves:
            looks = self._barred.get(move, (0, self._options.back_off))[1]
            self._barred[move] = (self._looks + looks, 2 * looks)
            self._retries.add(self._looks + looks)
        self._changes.clear()

    def _unbarred(self) -> bool:
        """Return whether a barred change may be tried again from now on."""
        over = {look for look in self._retries if look <= self._looks}
        self._retries -= over
        return bool(over)
