"""Overlap of steps: the kind of window to launch, the unfinished rest of the newest step, and versions of the
weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from onebox.engine.compile.update.async_window import Window
from onebox.engine.config import with_check_for_nan
from onebox.engine.install.deferred_replies import DeferredReplies, RetiredGroups
from onebox.engine.partition.sharding_spec import Members
from onebox.engine.partition.weight_versions import WeightVersions, weight_versions
from onebox.engine.state.remote import RemoteState
from onebox.engine.steps.launch import LaunchedStep, PreparedStep, StepRequest, StepSettings
from onebox.engine.steps.observer import StepObserver
from onebox.engine.steps.results import StepValues, step_values
from onebox.engine.workload.delay_compensation import WARM_UP, choose_delays, delays_of
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.errors import OneboxError, UsageError
from onebox.plan import ASYNC, Plan
from onebox.pool import Pool, WorkerReply
from onebox.trainer_options import StaleGradients
from onebox.wire.protocol.instructions import Free
from onebox.wire.protocol.requests import Run
from onebox.wire.protocol.responses import Delays

_LOG = logging.getLogger("onebox")


def with_staleness(
    settings: StepSettings, optimizer: Optimizers, stale: StaleGradients | None, plan: Plan | None
) -> StepSettings:
    """Return settings of steps with stale gradients as requested; chosen defaults, reasons and risks are logged.

    Args:
        settings: Settings of exact steps.
        optimizer: The user's optimizer or optimizers.
        stale: The request.
        plan: The plan, as far as it is known.

    Raises:
        UsageError: The plan's steps cannot overlap as requested, or an optimizer does not support the correction.
    """
    if plan is not None:
        check_overlap(plan, int(stale is not None), overlap=settings.overlap)
    if stale is None:
        return settings
    warm_up = WARM_UP if stale.warm_up is None else stale.warm_up
    if stale.warm_up is None:
        _LOG.info("warm_up=%d: so many steps are exact first, as weights move fastest at the beginning", warm_up)
    for choice, _ in choose_delays(optimizer, stale.correction):
        if stale.correction == "auto":
            _LOG.info("correction=%r: %s", choice.delay, choice.why)
        if choice.warning is not None:
            _LOG.warning("stale gradients, correction=%r: %s", choice.delay, choice.warning)
    return dataclasses.replace(settings, staleness=1, warm_up=warm_up, delay=delays_of(optimizer, stale.correction))


def check_overlap(plan: Plan, staleness: int, *, overlap: bool) -> None:
    """Refuse a plan whose steps cannot overlap as requested.

    Raises:
        UsageError: They cannot; the message gives the reason.
    """
    if plan.late and not staleness:
        raise UsageError(
            f"the plan's schedule is {ASYNC}, which needs stale=StaleGradients(); or give it another schedule"
        )
    if staleness and len(plan.stages) > 1 and not plan.late:
        raise UsageError(
            f"stale gradients with the schedule {plan.schedule}: a plan of several stages needs the schedule "
            f"{ASYNC!r}; make_plan(stale=StaleGradients()) makes one"
        )
    if not staleness and not overlap:
        return
    refused = {
        "stages offloaded or swapped": any(stage.policy in ("offload", "swap") for stage in plan.stages),
        "update='host'": not staleness and plan.update == "host",
        "sync='client'": plan.sync == "client",
    }
    for what in (name for name, found in refused.items() if found):
        asked = "stale gradients" if staleness else "overlap=True"
        raise UsageError(f"{asked} with {what}: these do not go together; leave one of them out")


Traced = Callable[[Sequence[WorkerReply]], object]
"""Receives the workers' replies to a drain, for a timeline."""


class OverlapScheduler(StepObserver):
    """Overlapping steps of a run.

    It decides on the window of each step, so that the session calls it by name between the launch's parts; it observes
    only the end of the state and of the run.

    Args:
        pool: The pool.
        remote: The remote state.
        settings: Settings shared by all steps.
        drained: Called when a drain is requested; returns the receiver of its replies for a timeline.
    """

    def __init__(
        self, pool: Pool, remote: RemoteState, settings: StepSettings, drained: Callable[[LaunchedStep], Traced]
    ) -> None:
        self.open: LaunchedStep | None = None
        """The step with work left for the window of the next one."""
        self._drained = drained
        self._deferred: deque[DeferredReplies] = deque()
        self._delays: Counter[int] = Counter()
        self._pool = pool
        self._remote = remote
        self._settings = settings
        self._retired: RetiredGroups | None = None
        self._counted: set[int] = set()  # steps, counted from the next one, whose delays are known
        self._next: int | None = None
        stale = settings.staleness > 0
        self.versions = weight_versions(remote.wanted, settings.delay, pool.new_number) if stale else WeightVersions()
        """Buffers of versions of all parameters, where steps overlap with older weights."""

    def windows(self, step: int) -> bool:
        """Return whether a step may overlap with the one after it."""
        return step >= self._settings.warm_up if self._settings.staleness else self._settings.overlap

    def begin(self, work: StepRequest, prepared: PreparedStep) -> tuple[LaunchedStep | None, Window]:
        """Prepare a step: drain an incompatible predecessor, and create versions of weights if needed.

        Args:
            work: The step.
            prepared: Its programs.

        Returns:
            The step with work left for its window, and the kind of window.

        Raises:
            OneboxError: Something failed on a worker, or the pool is broken.
        """
        if self.open is not None and self.open.prepared.compiled is not prepared.compiled:
            self.end()
        if prepared.compiled.windows:
            self._next = work.number if self._next is None else self._next
            if self.versions.previous and not self._remote.branched:
                self._remote.branch(work.options, prepared.installed.group_of)
        return self.open, "fill" if self.open is None else "steady"

    def begun(self, step: LaunchedStep, before: LaunchedStep | None) -> None:
        """Record that a step has begun.

        Args:
            step: The step.
            before: The step whose gradients it applies.

        Raises:
            OneboxError: The pool is broken.
        """
        loss = step.work.loss
        if before is not None:
            before.work.loss.expect_update(loss.values)
        if step.prepared.compiled.windows:
            self.open = step
            if self._settings.max_norm:
                loss.expect_norm()
        if self._retired is not None:
            self._retired.step()
            self._retired = self._retired if self._retired.left else None

    def values_of(self, values: StepValues, before: LaunchedStep | None, answers: Sequence[WorkerReply]) -> StepValues:
        """Return the values of a window's own step; those of the previous step are passed on."""
        if before is not None:
            before.work.loss.updated(values.gradient_norm)
            self._applied(before.work.number, answers)
        return StepValues(loss=values.loss, gradient_norm=None)

    def end(self) -> None:
        """Have the workers finish the newest step, without waiting for it.

        Raises:
            OneboxError: The pool is broken; some workers may have received the request.
        """
        open_, self.open = self.open, None
        if open_ is None:
            return
        settings, step = self._settings, open_.work.number
        traced = self._drained(open_)
        numerics = with_check_for_nan(settings.numerics) if open_.work.check_nan else settings.numerics
        futures = []
        for worker, routine in open_.prepared.compiled.of("drain").items():
            run = Run(routine.number, (), step + 1, settings.seed, (), settings.trace)
            futures.append(self._pool.post(worker, [*numerics, run], answer=True))
        self.defer(DeferredReplies(futures, functools.partial(self._take, open_, traced)))

    def defer(self, asked: DeferredReplies) -> None:
        """Add replies to process with those of the next step."""
        self._deferred.append(asked)

    def retire(self, groups: Mapping[int, Members]) -> None:
        """Leave the groups of an earlier plan once steps have read the data received through them.

        Args:
            groups: Members by group.
        """
        self._retired = self._retired or RetiredGroups(self._pool)
        self._retired.add(groups, 2 if self._settings.staleness else 1)

    @property
    def deferred(self) -> tuple[DeferredReplies, ...]:
        """Pending requests whose replies the next step or :meth:`drain` will process."""
        while self._deferred and not self._deferred[0].open:
            self._deferred.popleft()
        return tuple(self._deferred)

    def told(self, error: Exception) -> None:
        """Let a failure that has been raised not be raised again by what waits for the same replies."""
        for asked in self.deferred:
            asked.told(error)

    @property
    def settled(self) -> bool:
        """True if no step has work left outside the steps in flight."""
        return self.open is None and not self.deferred

    def drain(self) -> None:
        """Have the workers finish the newest step, and wait for it.

        Raises:
            OneboxError: Something failed on a worker, or the pool is broken.
        """
        self.end()
        for asked in self.deferred:
            asked.take()

    def _take(self, open_: LaunchedStep, traced: Traced, answers: list[WorkerReply]) -> None:
        """Process the workers' replies to a drain."""
        compiled = open_.prepared.compiled
        values = step_values(
            open_.work.number, compiled.weights_of(open_.work.batch), compiled.of("drain"), answers, {}
        )
        self.values_of(values, open_, answers)
        traced(answers)

    def _applied(self, step: int, answers: Sequence[WorkerReply]) -> None:
        """Count the measured delay of a step's gradients where workers applied them; each step once."""
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
        """Return the number of updates by delay."""
        return dict(sorted(self._delays.items()))

    # ---- events

    def reset(self) -> None:
        """Record that no work of any step is left on the workers, and leave the groups of earlier plans."""
        self.open = None
        self._deferred.clear()
        with contextlib.suppress(OneboxError):
            self._leave()

    def close(self) -> None:
        """Free the versions, and leave the groups of earlier plans.

        Raises:
            OneboxError: The pool is broken.
        """
        self.open = None
        self._deferred.clear()
        numbers = (*self.versions.previous.values(), *self.versions.ahead.values())
        for worker in self._pool.present if numbers else ():
            self._pool.post(worker, [Free(numbers)])
        self._leave()

    def _leave(self) -> None:
        retired, self._retired = self._retired, None
        if retired is not None:
            retired.leave()
