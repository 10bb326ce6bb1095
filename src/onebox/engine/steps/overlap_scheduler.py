"""Overlap: which window of a step is launched, what is left of the newest one, and versions of the weights."""

from __future__ import annotations

import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onebox.engine.compile.compiler import CompiledStep
from onebox.engine.compile.update.async_window import Window
from onebox.engine.install.deferred_replies import DeferredReplies
from onebox.engine.partition.sharding_spec import Members
from onebox.engine.partition.weight_versions import WeightVersions, weight_versions
from onebox.engine.state.remote import RemoteState
from onebox.engine.steps.launch import StepRequest, StepSettings
from onebox.engine.steps.results import StepValues, step_values
from onebox.engine.workload.delay_compensation import DELAYS, choose_delays, delays_of
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.errors import UsageError
from onebox.plan import ASYNC, Plan
from onebox.pool import Pool, WorkerReply
from onebox.wire.protocol.instructions import Free, GroupDelays
from onebox.wire.protocol.requests import Run
from onebox.wire.protocol.responses import Delays


def choose_compensation(optimizer: Optimizers, asked: str) -> GroupDelays:
    """Return what is done about gradients that are a step late, and log why, and what is to be feared.

    Raises:
        UsageError: An optimizer cannot have what is asked for.
    """
    for choice, _ in choose_delays(optimizer, asked):
        if asked == "auto":
            _LOG.info("delay=%r: %s", choice.delay, choice.why)
        if choice.warning is not None:
            _LOG.warning("staleness=1, delay=%r: %s", choice.delay, choice.warning)
    return delays_of(optimizer, asked)


def check_overlap(settings: StepSettings, delay: str, plan: Plan | None) -> None:
    """Refuse what steps cannot be like.

    Args:
        settings: What is asked for.
        delay: What is asked to be done about late gradients.
        plan: The plan, if one is given.

    Raises:
        UsageError: What is wrong.
    """
    staleness, warm_up = settings.staleness, settings.warm_up
    if staleness not in (0, 1):
        raise UsageError(f"staleness={staleness}: allowed are 0, for exact steps, and 1")
    if delay not in DELAYS:
        raise UsageError(f"delay={delay!r}: allowed are {', '.join(map(repr, DELAYS))}")
    if warm_up < 0:
        raise UsageError(f"warm_up={warm_up}: so many steps are exact at the beginning, at least 0")
    if plan is not None:
        check_overlap_of(plan, staleness, overlap=settings.overlap)


def check_overlap_of(plan: Plan, staleness: int, *, overlap: bool) -> None:
    """Refuse a plan whose steps cannot overlap as they are to.

    Raises:
        UsageError: What is wrong.
    """
    if plan.schedule == ASYNC and not staleness:
        raise UsageError(f"the plan's schedule is {ASYNC}, which needs staleness=1; or give it another schedule")
    if staleness and len(plan.stages) > 1 and plan.schedule != ASYNC:
        raise UsageError(
            f"staleness=1 with the schedule {plan.schedule}: a plan of several stages needs the schedule {ASYNC!r}; "
            "make_plan(staleness=1) makes one"
        )
    if not staleness and not overlap:
        return
    refused = {
        "stages offloaded or swapped": any(stage.policy in ("offload", "swap") for stage in plan.stages),
        "update='host'": not staleness and plan.update == "host",
        "sync='client'": plan.sync == "client",
    }
    for what in (name for name, found in refused.items() if found):
        asked = "staleness=1" if staleness else "overlap=True"
        raise UsageError(f"{asked} with {what}: these do not go together; leave one of them out")


_LOG = logging.getLogger("onebox")

Traced = Callable[[Sequence[WorkerReply]], object]
"""Takes what the workers answered to a drain, for a timeline."""


@dataclass(frozen=True, kw_only=True)
class UnfinishedStep:
    """A step of which something is left for the window of the next one.

    Args:
        work: The step.
        compiled: Its routines.
    """

    work: StepRequest
    compiled: CompiledStep


class OverlapScheduler:
    """What a run knows of steps that overlap.

    Args:
        pool: The pool.
        remote: The state on the workers.
        settings: What is the same for all steps.
        drained: Called when a drain is asked for; returns what takes its answers for a timeline.
    """

    def __init__(
        self, pool: Pool, remote: RemoteState, settings: StepSettings, drained: Callable[[UnfinishedStep], Traced]
    ) -> None:
        self.open: UnfinishedStep | None = None
        self._drained = drained
        self._deferred: deque[DeferredReplies] = deque()
        self._delays: Counter[int] = Counter()
        self._pool = pool
        self._remote = remote
        self._settings = settings
        self._counted: set[int] = set()  # steps from the next one on whose delays are known
        self._next: int | None = None
        stale = settings.staleness > 0
        self._versions = weight_versions(remote.wanted, settings.delay, pool.new_number) if stale else WeightVersions()
        remote.versions = self._versions

    def windows(self, step: int) -> bool:
        """Tell whether a step may overlap with the one after it."""
        return step >= self._settings.warm_up if self._settings.staleness else self._settings.overlap

    def begin(
        self, work: StepRequest, compiled: CompiledStep, group_of: Callable[[Members], int]
    ) -> tuple[UnfinishedStep | None, Window]:
        """Get ready for a step: what it does not follow is drained, and where it needs versions of weights there are.

        Args:
            work: The step.
            compiled: Its routines.
            group_of: From workers that exchange something to their group.

        Returns:
            The step of which something is left for its window, and which window that is.

        Raises:
            OneboxError: Something failed on a worker, or the pool is broken.
        """
        if self.open is not None and self.open.compiled is not compiled:
            self.end()
        if compiled.windows:
            self._next = work.number if self._next is None else self._next
            if self._versions.previous and not self._remote.branched:
                self._remote.branch(work.options, group_of)
        return self.open, "fill" if self.open is None else "steady"

    def begun(self, work: StepRequest, compiled: CompiledStep, before: UnfinishedStep | None) -> None:
        """Take note that a step has begun.

        Args:
            work: The step.
            compiled: Its routines.
            before: The step whose gradients it applies.
        """
        if before is not None:
            before.work.loss.expect_update(work.loss.values)
        if compiled.windows:
            self.open = UnfinishedStep(work=work, compiled=compiled)
            if self._settings.max_norm:
                work.loss.expect_norm()

    def ended(self, values: StepValues, before: UnfinishedStep | None, answers: Sequence[WorkerReply]) -> StepValues:
        """Return what the answers to a window say of its own step; what they say of the step before is passed on."""
        if before is not None:
            before.work.loss.updated(values.gradient_norm)
            self._applied(before.work.number, answers)
        return StepValues(loss=values.loss, gradient_norm=None)

    def end(self) -> None:
        """Let the workers do what is left of the newest step, without waiting for it.

        Raises:
            OneboxError: The pool is broken; some workers may have been told.
        """
        open_, self.open = self.open, None
        if open_ is None:
            return
        settings, step = self._settings, open_.work.number
        traced = self._drained(open_)
        futures = [
            self._pool.post(worker, [Run(routine.number, (), step + 1, settings.seed, (), settings.trace)], answer=True)
            for worker, routine in open_.compiled.of("drain").items()
        ]
        self.defer(DeferredReplies(futures, functools.partial(self._take, open_, traced)))

    def defer(self, asked: DeferredReplies) -> None:
        """Let answers be taken in with those of the next step."""
        self._deferred.append(asked)

    @property
    def deferred(self) -> tuple[DeferredReplies, ...]:
        """What has been asked for whose answers have not been taken in, as the next step does, or :meth:`drain`."""
        while self._deferred and not self._deferred[0].open:
            self._deferred.popleft()
        return tuple(self._deferred)

    @property
    def settled(self) -> bool:
        """Whether nothing is left of any step but in the steps under way."""
        return self.open is None and not self.deferred

    def drain(self) -> None:
        """Let the workers do what is left of the newest step, and wait for it.

        Raises:
            OneboxError: Something failed on a worker, or the pool is broken.
        """
        self.end()
        for asked in self.deferred:
            asked.take()

    def _take(self, open_: UnfinishedStep, traced: Traced, answers: list[WorkerReply]) -> None:
        """Take in what the workers answered to a drain."""
        compiled = open_.compiled
        values = step_values(
            open_.work.number, compiled.weights_of(open_.work.batch), compiled.of("drain"), answers, {}
        )
        self.ended(values, open_, answers)
        traced(answers)

    def _applied(self, step: int, answers: Sequence[WorkerReply]) -> None:
        """Count the delay of a step's gradients, as workers measured it where they applied them; each step once."""
        found = [result for answer in answers for result in answer.results if isinstance(result, Delays)]
        assert not any(each.mixed for each in found), f"step {step} read several versions of a parameter"
        late = [delay for each in found for delay, _ in each.counts]
        if not late or self._next is None or step < self._next or step in self._counted:
            return
        self._delays[max(late)] += 1
        self._counted.add(step)
        while self._next in self._counted:
            self._counted.remove(self._next)
            self._next += 1

    def measured(self) -> dict[int, int]:
        """Return how many updates were how late."""
        return dict(sorted(self._delays.items()))

    def reset(self) -> None:
        """Take note that nothing of a step is on the workers any more."""
        self.open = None
        self._deferred.clear()

    def free(self) -> None:
        """Free the versions.

        Raises:
            OneboxError: The pool is broken.
        """
        numbers = (*self._versions.previous.values(), *self._versions.ahead.values())
        for worker in self._pool.present if numbers else ():
            self._pool.post(worker, [Free(numbers)])
