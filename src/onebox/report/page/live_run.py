"""The page of a run in this process.

Everything here is called by the page's thread, but for what the run tells: its records and completed steps, each of
which costs the run less than a microsecond or two.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from onebox.engine import Trainer
from onebox.engine.steps.link_use import LinkUse, used_links
from onebox.engine.steps.observer import EndedStep, StepObserver
from onebox.engine.steps.results import TraceEvent
from onebox.pool import DeviceInfo, Pool
from onebox.pool.discovery import LOCAL_HOST
from onebox.report.figures.worker_timeline import timeline_of
from onebox.report.page.history import RunHistory
from onebox.report.page.plan_view import plan_view
from onebox.report.page.pool_watch import PoolWatch
from onebox.report.page.schedule import schedule_view
from onebox.report.page.state import (
    Curves,
    Head,
    Island,
    LinkView,
    PageState,
    PlanView,
    ScheduleView,
)
from onebox.report.run.status import RunState
from onebox.report.tables.comparison import PlanComparison, compare

_LOG = logging.getLogger("onebox")

_SHARE = 0.002
"""Part of a core that the newest step's details may take: they are made so much less often where they take long."""

_OFTEN_S = 1.9
"""Least time between two details of steps, and between two curves: most of what a browser does is to draw them."""

_SELDOM_S = 10.0
"""Longest time between two details of steps."""


class LiveRun(StepObserver):
    """A training run of this process, for the page: an observer of its steps, and a listener to its records.

    Args:
        name: Its model and data.
        trainer: The trainer; it is subscribed to.
        folder: Folder of the run, as text.
        total_steps: Steps of the whole run.
        epochs: Epochs of the whole run.
        outer_every: Steps between two outer steps of islands; 0 for a run without.
    """

    def __init__(
        self, name: str, trainer: Trainer, *, folder: str, total_steps: int, epochs: int, outer_every: int = 0
    ) -> None:
        self._name = name
        self._trainer = trainer
        self._folder = folder
        self._outer_every = outer_every
        self._lock = threading.Lock()
        self._history = RunHistory(total_steps, epochs)
        self._ended: tuple[RunState, str] | None = None
        self._newest: EndedStep | None = None
        self._pool = PoolWatch(trainer.pool)
        self._details = _Details()
        self._curves: Curves | None = None
        self._next_s = 0.0
        self._failed = ""
        self._names = {device.number: _process(device) for device in trainer.pool.devices}
        trainer.subscribe(self)

    # ---- called by the run

    def ended(self, step: EndedStep) -> None:
        """Remember the newest step."""
        if step.trace is not None:
            self._newest = step

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record of the run's metrics."""
        with self._lock:
            self._history.add(record)

    def finish(self, state: RunState, text: str) -> None:
        """Record the end of the run.

        Args:
            state: The way in which it ended.
            text: A line about it.
        """
        with self._lock:
            self._ended = state, text
            self._history.end(state, text, at_s=time.time())

    # ---- called by the page

    def state(self) -> PageState:
        """Return the present state."""
        renewed = self._renew_details()
        details, trainer = self._details, self._trainer
        with self._lock:
            for event in self._pool.news():
                self._history.note(event.kind, event.text, at_s=event.at_s, severity=event.severity)
            numbers, events, ended = self._history.numbers, self._history.events, self._ended
            if renewed or ended or self._curves is None:
                self._curves = self._history.curves
        if trainer.plan is None:
            state: RunState = "waiting"
            text = "the model is captured, measured and planned with the first batch"
        else:
            state, text = "running", self._pool.recovering
        found, account = details.comparison, trainer.wall.present()
        plan = trainer.plan
        predicted = plan.predicted if plan is not None else None
        numbers = msgspec.structs.replace(
            numbers,
            predicted_s=predicted.step_s if predicted else None,
            predicted_bubble=predicted.bubble if predicted else None,
            step_s=found.step_s.measured if found else None,
            bubble=found.bubble.measured if found else None,
            bound=account.bound or numbers.bound,
            account=account.text if account.shares else numbers.account,
            staleness=_staleness(trainer),
            islands=_islands(trainer, self._outer_every),
        )
        return PageState(
            head=Head(
                kind="run",
                name=self._name,
                state=ended[0] if ended else state,
                text=ended[1] if ended else text,
                folder=self._folder,
                trace=self._newest is not None,
            ),
            run=numbers,
            curves=self._curves,
            hosts=self._pool.hosts(details.used_bytes, details.peak_bytes, details.busy, _budgets(trainer)),
            links=details.links_now(numbers.interval_s, self._pool),
            plan=plan_view(plan) if details.plan is None and plan is not None else details.plan,
            schedule=details.schedule,
            events=events,
        )

    def trace(self) -> bytes | None:
        """Return the Chrome trace of the last steps; ``None`` before the first."""
        if self._newest is None:
            return None
        return timeline_of(self._trainer.events(), self._names, self._trainer.link_events()).to_json()

    def close(self) -> None:
        """Do nothing: the run belongs to others."""

    def _renew_details(self) -> bool:
        """Make the details of the newest step, if the last ones are old enough; return whether they are.

        Where that fails, the old ones stay.
        """
        newest, now_s = self._newest, time.monotonic()
        if newest is None or now_s < self._next_s:
            return False
        if newest is self._details.step:
            return True
        begin_s = time.thread_time()
        try:
            self._details = _details_of(newest, self._trainer.pool, self._names)
        except Exception as error:  # the rest of the page goes on
            if self._failed != repr(error):
                self._failed = repr(error)
                _LOG.warning("the details of steps cannot be shown: %s", self._failed, exc_info=True)
        cost_s = time.thread_time() - begin_s
        self._next_s = now_s + min(_SELDOM_S, max(_OFTEN_S, cost_s / _SHARE))
        return True


class _Details:
    """The details of a step.

    Args:
        step: The step.
    """

    def __init__(self, step: EndedStep | None = None) -> None:
        self.step = step
        self.comparison: PlanComparison | None = None
        self.plan: PlanView | None = None
        self.schedule: ScheduleView | None = None
        self.used_bytes: dict[int, int] = {}
        self.peak_bytes: dict[int, int] = {}
        self.busy: dict[int, float] = {}
        self.links: tuple[LinkUse, ...] = ()

    def links_now(self, interval_s: float | None, pool: PoolWatch) -> tuple[LinkView, ...]:
        """Return the links between hosts, and those from the client."""
        between = (
            LinkView(
                source=use.source,
                target=use.target,
                measured_bps=float(f"{use.size_bytes / use.busy_s:.4g}") if use.busy_s > 0 else None,
                now_bps=float(f"{use.size_bytes / interval_s:.4g}") if interval_s else None,
                step_bytes=use.size_bytes,
            )
            for use in self.links
        )
        return (*between, *pool.uplinks())


def _details_of(step: EndedStep, pool: Pool, names: Mapping[int, str]) -> _Details:
    assert step.trace is not None, "a step with a trace"
    found = _Details(step)
    events = step.trace.events()
    samples = sum(part.size for part in step.micro_batches)
    by_device = [device.host for device in pool.devices]
    found.comparison = compare(step.plan, events, batch=samples)
    emulated = [device.number for device in pool.devices if device.emulated]
    found.plan = plan_view(step.plan, found.comparison.stages, emulated)
    hosts = {names[device.number]: device.host for device in pool.devices}
    found.schedule = schedule_view(timeline_of(events, names), step.number + 1, hosts)
    for worker, (_, _, memory) in step.trace.workers.items():
        if memory:
            found.peak_bytes[worker], found.used_bytes[worker] = max(memory[::2]), memory[-1]
    found.busy = _busy(events)
    found.links = used_links(step.trace.traffic, by_device)
    return found


def _busy(events: Sequence[TraceEvent]) -> dict[int, float]:
    """Return the part of a step in which each device computes, by the span of its own events."""
    sums: dict[int, list[int]] = {}
    for event in events:
        own = sums.setdefault(event.worker, [0, event.start_ns, event.end_ns])
        own[1], own[2] = min(own[1], event.start_ns), max(own[2], event.end_ns)
        if event.track == "compute":
            own[0] += event.end_ns - event.start_ns
    return {
        worker: round(min(1.0, busy / (end - begin)), 3) for worker, (busy, begin, end) in sums.items() if end > begin
    }


def _staleness(trainer: Trainer) -> str:
    stale = trainer.stale
    if stale is None:
        return "exact steps"
    return f"gradients one step late, correction {stale.correction}, after {stale.warm_up or 0} exact steps"


def _islands(trainer: Trainer, every: int) -> tuple[Island, ...]:
    """Return the islands of a run; empty without."""
    away: set[int | None] = set()
    for change in trainer.island_changes:
        if change.kind in ("left", "late"):
            away.add(change.island)
        elif change.kind in ("joined", "punctual"):
            away.discard(change.island)
    return tuple(
        Island(
            number=number,
            devices=", ".join(map(str, plan.devices)),
            state="gone" if number in away else "present",
            age_steps=trainer.steps_done % every if every else 0,
            every_steps=every,
        )
        for number, plan in enumerate(trainer.island_plans)
    )


def _budgets(trainer: Trainer) -> dict[int, int]:
    plan = trainer.plan
    if plan is None or not plan.memory_bytes:
        return {}
    return {device: limit for device, limit in zip(plan.devices, plan.memory_bytes, strict=True) if limit}


def _process(device: DeviceInfo) -> str:
    star = ", emulated" if device.emulated else ""
    where = "" if device.host == LOCAL_HOST else f" on {device.host}"
    return f"device {device.number} ({device.device}{where}{star})"
