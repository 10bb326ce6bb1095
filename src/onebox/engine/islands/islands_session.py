"""A run of islands: one session for each, and the outer optimizer that joins them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from torch import Tensor

from onebox.cost import DeviceGroups
from onebox.engine.compile.compiler import CompiledStep
from onebox.engine.data.batch_transfer import WorkerBatch
from onebox.engine.data.prefetch import BatchPrefetcher, UploadedBatch
from onebox.engine.islands.division import divided, island_seed
from onebox.engine.islands.island_losses import IslandLosses
from onebox.engine.islands.island_uploads import IslandUploads
from onebox.engine.islands.islands_state import IslandsStart, IslandsTransfer, WholeTransfer
from onebox.engine.islands.membership import Membership
from onebox.engine.islands.outer_layout import due_fragments
from onebox.engine.islands.outer_optimizer import OuterOptimizer, outer_state_bytes
from onebox.engine.islands.prediction import outer_schedule, predict_islands
from onebox.engine.memory.simulator import InitialContents
from onebox.engine.problem.planner_problem import ResolvedPlan
from onebox.engine.recovery.supervisor import RECOVERABLE, first_line, interrupted
from onebox.engine.session import TrainingSession
from onebox.engine.state.checkpoint_files import IslandsEntry
from onebox.engine.state.remote import RemoteState, StartState
from onebox.engine.state.transfer import StateChanges
from onebox.engine.steps.account import PLANNING, STEPS
from onebox.engine.steps.evaluation import evaluate
from onebox.engine.steps.launch import StepSettings
from onebox.engine.steps.link_use import LinkEvent, LinkUse, add_traffic, link_events, used_links
from onebox.engine.steps.observer import StepObserver
from onebox.engine.steps.results import Evaluation, StepLoss, StepValues, TraceEvent
from onebox.engine.steps.wall_time import WallTime
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.loss_reduction import normalisers, shares_of, total_of
from onebox.errors import OneboxError, PeerLost, UsageError
from onebox.plan import Links, MicroBatch, Plan
from onebox.plan.evaluate.islands import IslandsPrediction
from onebox.pool import Pool, WorkerReply
from onebox.pool.errors import SLICE_S
from onebox.pool.liveness import QUIET_S
from onebox.trainer_options import Outer, Recovery, Staging
from onebox.wire.protocol.responses import LinkTraffic


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandPlans:
    """Plan of each island, and the islands' shares of a batch.

    Args:
        plans: The plans.
        shares: One weight for each.
    """

    plans: tuple[Plan, ...]
    shares: tuple[float, ...]


_NOTHING = 1e-9
"""Weight of samples whose targets weigh nothing: an island that had only such ones has made its steps nevertheless."""

ResolveIslands = Callable[[Captures, Batch, RemoteState], IslandPlans]
"""Returns plans and shares, given the captured model, the first batch, and a state to measure with."""

ProvisionalIslands = Callable[[], IslandPlans | None]
"""Returns plans and shares for evaluations before the first step; ``None`` if those of steps serve for them."""


class IslandsSession:
    """The state of a trainer of islands on a pool; its interface is that of
    :class:`~onebox.engine.session.TrainingSession`.

    Args:
        pool: The pool.
        islands: Devices of each island.
        outer: Options of the outer optimizer.
        resolve: Returns plans and shares with the first batch.
        provisional: Returns those for evaluations before it.
        captures: The captured model.
        states: State of each island on its workers.
        settings: Settings shared by all steps.
        staging: Memory for batches beside a step's.
        recovery: Whether the run goes on without islands that are lost; ``None`` if the first loss is final.
        step: Number of steps done before, by the run that is resumed.
        start: State of the islands in its checkpoint.
        saved: Path of the checkpoint.
    """

    adaptive = None
    snapshots = None
    failed_steps = 0
    """None: an island whose part of a batch is bad leaves that out, and the others go on with theirs."""

    def __init__(
        self,
        pool: Pool,
        islands: DeviceGroups,
        outer: Outer,
        resolve: ResolveIslands,
        provisional: ProvisionalIslands,
        captures: Captures,
        states: Sequence[RemoteState],
        settings: StepSettings,
        staging: Staging,
        *,
        recovery: Recovery | None = None,
        step: int = 0,
        start: IslandsStart | None = None,
        saved: Path | None = None,
    ) -> None:
        self.steps_done = step
        self.wall = WallTime(pool.devices)
        self.captures = captures
        self.islands = islands
        self.outer = outer
        self.plans: tuple[Plan, ...] = ()
        """The plan of each island, once the first batch is known."""
        self._pool = pool
        self._resolve = resolve
        self._provisional = provisional
        self._planned = False
        """True if plans and shares are those of steps."""
        self._states = list(states)
        self._settings = settings
        self._staging = staging
        self._start = start
        self._shares: tuple[float, ...] = ()
        self._divided = step
        """Number of steps whose batches have been divided."""
        self.membership = Membership(
            len(islands),
            start.entry.samples if start else [[0.0] * len(islands)] * outer.fragments,
            start.entry.due if start else [0] * outer.fragments,
        )
        self._owes_outer_steps = False
        """True if outer steps are to be made once the state of the run is on the workers."""
        self._optimizer: OuterOptimizer | None = None
        self._bases: dict[int, Mapping[str, Tensor]] = {}
        """The global parameters that each late island last had."""
        self._joint: list[TrainingSession] = []
        """The sessions that outer steps are prepared for."""
        self.recovery = IslandLosses(
            pool,
            islands,
            self.membership,
            survived=recovery is not None,
            vacate=self._vacate,
            locate=self._locate,
            divided=lambda: self._divided,
            saved=saved,
        )
        """The supervisor of what the run does on its workers."""
        self._observers: list[StepObserver] = []
        self._past_traffic: dict[tuple[int, int], LinkTraffic] = {}
        """What connections between hosts carried for sessions of islands that have left."""
        self._prefetchers = [self._new_prefetcher() for _ in islands]
        self._sessions = [self._new_session(place) for place in range(len(islands))]
        self.uploads = IslandUploads(
            self._prefetchers, lambda batch: divided(batch, self._present_shares) if self._shares else None
        )
        self.transfer = IslandsTransfer(pool, self._sessions, self._states, start, self.membership, self._regroup)
        self.whole_transfer = WholeTransfer(pool, states[0], self.transfer)
        """Reads what a checkpoint holds."""

    def _new_prefetcher(self) -> BatchPrefetcher:
        return BatchPrefetcher(self._pool, self._staging.ahead_bytes, self._staging.cache_bytes)

    def _new_session(self, place: int) -> TrainingSession:
        """Return a session of an island, which has nothing on its workers."""
        settings = self._settings
        return TrainingSession(
            self._pool,
            lambda captures, batch: ResolvedPlan(plan=self.plans[place]),
            self.captures,
            self._states[place],
            dataclasses.replace(settings, seed=island_seed(settings.seed, place)),
            self._prefetchers[place],
            recovery=None,
            step=self.steps_done,
            saved=self.recovery.checkpoint,
            beside=functools.partial(
                outer_state_bytes, outer=self.outer, islands=len(self.islands), confirmed=self.recovery.survived
            ),
            workers=self.islands[place],
            wall=self.wall,
        )

    @property
    def error(self) -> Exception | None:
        """The failure that made the state on the workers void, if there was one."""
        return next((e for e in (self.recovery.error, *(own.error for own in self._there)) if e is not None), None)

    @property
    def begun(self) -> bool:
        """True if the state is on the workers rather than in the user's model."""
        return self._there[-1].begun or self.error is not None

    @property
    def _there(self) -> list[TrainingSession]:
        """The sessions of the punctual islands."""
        return [self._sessions[place] for place in self.membership.punctual] or self._sessions

    @property
    def _present_shares(self) -> tuple[float, ...]:
        return self.membership.shares(self._shares)

    @property
    def plan(self) -> Plan | None:
        """The plan of the first island; ``None`` before it is known."""
        return self.plans[0] if self.plans else None

    def subscribe(self, observer: StepObserver) -> None:
        """Call an observer at the events of the first island's steps."""
        self._observers.append(observer)
        self._sessions[0].subscribe(observer)

    def share_captures(self, captures: Captures) -> None:
        """Use the captures of another trainer of an equal model instead of own ones.

        Raises:
            UsageError: The model has been captured.
        """
        for session in self._sessions:
            session.share_captures(captures)
        self.captures = captures

    # ---- steps

    def step(self, batch: Batch, uploaded: UploadedBatch | None = None) -> StepLoss:
        """Begin a step of every island, and the outer step that follows it, if one is due; see :meth:`Trainer.step`."""
        self._replace_provisional(batch)
        uploads = () if uploaded is None else self.uploads.claim(uploaded)
        with self.wall.during(STEPS):
            self._wait_for_quorum(lambda place: self._sessions[place].replies(self._settings.in_flight - 1))
        with self.wall.during(PLANNING):
            parts = self._set_up(batch, steps=True)
        if uploads and [each and each.size for each in uploads] != [part and part.size for part in parts]:
            for stale in uploads:  # an island has left or joined since
                if stale is not None:
                    stale.close()
            uploads = ()
        self._divided = self.steps_done + 1
        number = self.steps_done
        begun = self._launch(parts, uploads)
        weights = [0.0] * len(parts)
        for each in begun:
            weights[each.place] = each.weight or _NOTHING
        self.membership.count(weights)
        self.steps_done += 1
        result = self._combined(number, begun)
        with self.wall.during(STEPS):
            self._outer_steps(batch)
        return result

    def _outer_steps(self, batch: Batch) -> None:
        """Begin the outer steps that are due after a step, and apply those that are due then."""
        due = [place for place, due in enumerate(self.membership.due) if due == self.steps_done]
        for fragment in due:
            self._apply(fragment)
        starting = due_fragments(self.steps_done, self.outer.every, self.outer.fragments)
        if starting:
            self._gather()
        for fragment in starting:
            self._outer_step(fragment, overlap=self.outer.overlap)
        if due or starting:
            self._admit(batch)

    def _launch(self, parts: Sequence[Batch | None], uploads: Sequence[UploadedBatch | None]) -> list[_IslandLoss]:
        """Begin a step of every island that has samples; return their losses."""
        number, begun = self.steps_done, list[_IslandLoss]()
        for place, (session, part) in enumerate(zip(list(self._sessions), parts, strict=True)):
            if part is None or self._sessions[place] is not session:
                continue
            session.steps_done = number  # it may have had no samples in the step before
            try:
                loss = session.step(part, uploads[place] if uploads else None)
            except RECOVERABLE as error:
                self.recovery.lose(error, place)
                continue
            except BaseException as error:
                if begun or session.steps_done != number:  # some islands have the step and others not
                    self.recovery.fail(error if isinstance(error, Exception) else interrupted(f"step {number}"))
                raise
            begun.append(_IslandLoss(place, session, loss, self._weight(part)))
        return begun

    def _weight(self, part: Batch) -> float:
        """Return the weight of a part of a batch in averages: its samples, or the user's weight of it."""
        reduction = self.captures.recipe.reduction
        whole = [MicroBatch(index=0, start=0, size=part.size)]
        return float(part.size) if reduction == "sum" else normalisers(reduction, part, whole)[0]

    def _combined(self, number: int, parts: Sequence[_IslandLoss]) -> StepLoss:
        """Return the loss of a step from those of its islands, but for those that are lost or late before theirs."""
        losses = {part.place: part.loss for part in parts}

        def values() -> StepValues:
            self._wait_for_quorum(lambda place: [each for each in losses[place].pending if not each.done()], losses)
            found = []
            for part in parts:
                left = self._sessions[part.place] is not part.session
                if not part.loss.ended and (left or (part.place in self.membership.late and not part.loss.done)):
                    continue
                try:
                    found.append((part.loss.values(), part.weight))
                except RECOVERABLE as error:
                    self.recovery.lose(error, part.place)
            fractions = shares_of([weight for _, weight in found], [1] * len(found)) if found else ()
            summed = self.captures.recipe.reduction == "sum"
            norms = [each.gradient_norm for each, _ in found]
            known = [norm for norm in norms if norm is not None]
            return StepValues(
                loss=total_of([each.loss for each, _ in found], (1.0,) * len(found) if summed else fractions)
                if found
                else math.nan,
                fault=next((each.fault for each, _ in found if each.fault is not None), None),
                gradient_norm=total_of(known, fractions) if known and len(known) == len(norms) else None,
            )

        result = StepLoss(number, lambda _: values(), self.drain)
        result.expect([future for part in parts for future in part.loss.pending], lambda _: values())
        return result

    def _outer_step(self, fragment: int, *, overlap: int = 0) -> None:
        """Begin an outer step of a part of the model, which is applied so many steps later."""
        if self._optimizer is None:
            return
        if overlap:
            self._begin(fragment, self.steps_done + overlap)
        elif self.recovery.survived:
            self._begin(fragment, self.steps_done)
            self._make(fragment, keep=0.0)
        elif (weights := self.membership.begin(fragment)) is not None:
            with self.recovery.voiding("an outer step"):
                self._optimizer.step(fragment, weights, self._workers_of, self.steps_done)
                self.membership.applied(fragment)
        self._check()

    def _check(self) -> None:
        """Compare the global values of islands, when it is time to."""
        every = self._settings.check_every
        if every and self.steps_done // every != (self.steps_done - self.outer.every) // every:
            assert self._optimizer is not None
            with self.recovery.voiding("an outer step"):
                self._optimizer.check()

    @property
    def _workers_of(self) -> list[tuple[int, ...]]:
        """The workers of the punctual islands."""
        return [self.plans[place].devices for place in self.membership.punctual]

    def _begin(self, fragment: int, due: int) -> None:
        """Begin the sums of an outer step, of the punctual islands, if they have samples."""
        assert self._optimizer is not None
        self._regroup()
        while (weights := self.membership.begin(fragment, due)) is not None:
            try:
                with self.recovery.voiding("an outer step"):
                    self._optimizer.begin(fragment, weights, self._workers_of, self.steps_done)
                return
            except RECOVERABLE as error:
                self._void(fragment, error)

    def _void(self, fragment: int, error: Exception) -> None:
        """Go on after a loss that has made the sums of an outer step void."""
        self.membership.void(fragment)
        self._lose(error)
        self.recovery.redone(fragment, first_line(error))
        self._regroup()

    def _apply(self, fragment: int) -> None:
        """Apply the sums of an outer step that have begun before."""
        if self.recovery.survived:
            self._make(fragment, keep=self.outer.keep)
            return
        assert self._optimizer is not None
        self.membership.applied(fragment)
        with self.recovery.voiding("an outer step"):
            self._optimizer.apply(fragment, self.steps_done, keep=self.outer.keep)

    def _make(self, fragment: int, *, keep: float) -> None:
        """Make an outer step whose sums have begun; it is void everywhere if it fails half-way, and done again by the
        islands that are left and punctual.

        The sums change nothing; they are applied once all leaders have them.

        Args:
            fragment: The part of the model.
            keep: Fraction of its own values that an island keeps.
        """
        if self._confirmed(fragment):
            self._regroup()
            self.membership.applied(fragment)
            self.recovery.exchanged()
            assert self._optimizer is not None
            with self._surviving(), self.recovery.voiding("an outer step"):
                self._optimizer.apply(fragment, self.steps_done, keep=keep)

    def _confirmed(self, fragment: int) -> bool:
        """Wait until all leaders have the sums of an outer step; void ones are begun anew by the islands that are left
        and punctual.

        Args:
            fragment: The part of the model.

        Returns:
            Whether there are any.
        """
        assert self._optimizer is not None
        while fragment in self.membership.travelling:
            self._regroup()
            if not self._wait_for_quorum(self._unfinished):
                continue
            try:
                with self.recovery.voiding("an outer step"):
                    if self._optimizer.confirm(fragment, self._wait_for_sums):
                        return True
            except RECOVERABLE as error:
                due = self.membership.due[fragment]
                self._void(fragment, error)
                self._begin(fragment, due)
        return False

    def _unfinished(self, place: int) -> list[Future[WorkerReply]]:
        """Return the replies about its steps that an island still has to give, and about its parts of outer steps."""
        assert self._optimizer is not None
        return [*self._sessions[place].replies(0), *self._optimizer.replies(self.plans[place].devices)]

    def _confirm_all(self) -> None:
        """Prepare for reading what leaders have: after losses, sums on their way may never come."""
        self._regroup()
        if self.recovery.survived:
            for fragment in self.membership.travelling:
                self._confirmed(fragment)

    def _regroup(self) -> None:
        """Prepare outer steps of the islands that are there, if they are others than before."""
        assert self._optimizer is not None
        while self._joint != self._there:
            there = self._there
            with self._surviving(), self.recovery.voiding("the preparation of an outer step"):
                installed = [session.installed for session in there]
                self._optimizer.regroup(installed, [self._states[place] for place in self.membership.punctual])
                self._joint = there

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """End the context at a loss, after which the run goes on without the islands that are lost."""
        try:
            yield
        except RECOVERABLE as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """Go on after a loss in an exchange of islands."""
        self.recovery.lose(error)
        if self._optimizer is not None:
            self._optimizer.forsake(())
            self._joint = []

    def synchronize(self) -> None:
        """Make outer steps now, with the inner steps since the last ones; see :meth:`Trainer.synchronize`.

        Those of a run that is resumed are made with its first batch.
        """
        self._require()
        if self._optimizer is None:
            self._owes_outer_steps = self.behind
            return
        self._owes_outer_steps = False
        self.drain()
        for place in self.membership.late:
            with self._surviving():
                self._sessions[place].wait(0)
        for fragment in self.membership.travelling:
            self._apply(fragment)
        self._gather()
        for fragment in range(self.outer.fragments):
            self._outer_step(fragment)
        self.wait(0)

    @property
    def behind(self) -> bool:
        """True if an outer step now would change global values: there are inner steps since the last one, or sums."""
        return any(self.membership.due) or any(map(any, self.membership.samples))

    @property
    def in_step(self) -> bool:
        """True if there was no inner step since the last outer steps, so that all islands have the global values."""
        return not self.outer.overlap and not any(any(own) for own in self.membership.samples)

    def drain(self) -> None:
        """Finish the newest step and wait for it.

        Raises:
            OneboxError: It failed.
        """
        self._require()
        for place in self.membership.present:
            try:
                self._sessions[place].drain()
            except RECOVERABLE as error:
                self.recovery.lose(error, place)

    def tell_fault(self) -> None:
        """Raise, once, that a step of an island has shown that the loss is no mean over samples.

        Raises:
            UsageError: One has.
        """
        for own in self._there:
            own.tell_fault()

    def unread_error(self) -> OneboxError | None:
        """Return the first failure of a step of an island whose loss has not been read."""
        found = (own.unread_error() for own in self._there) if self.error is None else ()
        return next((error for error in found if error is not None), None)

    def wait(self, most: int) -> None:
        """Wait until at most a given number of steps are in flight, and for the outer steps so far if it is 0.

        Raises:
            OneboxError: One of them failed.
        """
        self._require()
        for place in self.membership.present:
            try:
                self._sessions[place].wait(most)
            except RECOVERABLE as error:
                self.recovery.lose(error, place)
        if not most and self._optimizer is not None:
            with self._surviving(), self.recovery.voiding("an outer step"):
                self._optimizer.take()

    def evaluate(self, batches: Iterable[Batch], metrics: Sequence[str]) -> Evaluation:
        """Return the loss and metrics of the global parameters over batches, which islands take in turn; see
        :meth:`Trainer.evaluate`."""
        turns = itertools.count()
        owners: dict[CompiledStep, TrainingSession] = {}

        def prepare(batch: Batch, again: bool) -> CompiledStep:
            there = self._there
            session = there[next(turns) % len(there)]
            compiled = session.evaluation(batch, again)
            owners[compiled] = session
            return compiled

        def parts(batch: Batch, compiled: CompiledStep) -> Mapping[int, WorkerBatch]:
            return owners[compiled].uploads.parts_beside(batch, compiled)

        left = iter(batches)
        first = next(left, None)
        if first is None:
            raise UsageError("evaluate() was given no batch")
        self._set_up(first, steps=False)
        with self.uploads.out_of_the_way(), self._globally():
            return evaluate(
                itertools.chain([first], left),
                pool=self._pool,
                prepare=prepare,
                parts=parts,
                metrics=metrics,
                fault=self._there[0].fault_of,
                numerics=self._settings.numerics,
                in_flight=self._settings.in_flight * len(self._sessions),
                retry=self.recovery.run,
                poisoning=self.recovery.poisoning,
            )

    @contextlib.contextmanager
    def _globally(self) -> Iterator[None]:
        """Let islands have the global values for the duration of the context."""
        if self._optimizer is None or self.in_step:
            yield
            return
        self._regroup()
        with self._surviving(), self.recovery.voiding("an evaluation"):
            self._optimizer.enter()
        try:
            yield
        finally:
            workers = {worker for own in self._workers_of for worker in own}
            with self._surviving(), self.recovery.voiding("the end of an evaluation"):
                self._optimizer.leave(workers)

    # ---- observation

    def _locate(self, error: Exception) -> None:
        """Add the location in the first island's step to an error."""
        self._there[0].traces.locate(error)

    def prediction(self, links: Links) -> IslandsPrediction | None:
        """Return the prediction of the run; ``None`` before the first step, without an island, or if a plan has none.

        Args:
            links: Links between the devices.
        """
        if self._optimizer is None or self.membership.absent or not all(plan.predicted for plan in self.plans):
            return None
        compilers = [session.installed.compiler for session in self._sessions]
        return predict_islands(self.plans, outer_schedule(compilers, self.outer), links)

    @property
    def sums_s(self) -> float | None:
        """Measured seconds of a step's part of the sums of outer steps; ``None`` if some are not known."""
        times = self._optimizer.sum_times_s if self._optimizer is not None else {}
        known = [statistics.median(own) for own in times.values() if own]
        return sum(known) / self.outer.every if len(known) == self.outer.fragments else None

    def events(self) -> list[TraceEvent]:
        """Return the workers' activity in the last steps; see :meth:`Trainer.events`."""
        return [event for session in self._there for event in session.events()]

    def newest_events(self) -> list[TraceEvent]:
        """Return the workers' activity in the newest step of each island."""
        return [event for session in self._there for event in session.newest_events()]

    @property
    def links(self) -> tuple[LinkUse, ...]:
        """The use of links between hosts so far, of all islands together; see :attr:`Trainer.links`."""
        traffic = dict(self._past_traffic)
        for session in self._sessions:
            add_traffic(traffic, session.traces.traffic)
        if self._optimizer is not None:
            add_traffic(traffic, self._optimizer.traffic)
        return used_links(traffic, [device.host for device in self._pool.devices])

    def link_events(self) -> list[LinkEvent]:
        """Return the use of links between hosts in the last steps; see :meth:`Trainer.link_events`."""
        traces = [trace for session in self._there for trace in session.traces]
        if self._optimizer is not None:
            traces += self._optimizer.traces
        return link_events(traces, [device.host for device in self._pool.devices])

    @property
    def overlap(self) -> Any:
        """Overlapping remains of the first island's steps."""
        return self._there[0].overlap

    def peaks(self, batch: Batch, *, ahead: int = 0) -> dict[int, int]:
        """Return the peak bytes of each worker in a step with a batch."""
        parts = zip(self._sessions, self._set_up(batch, steps=True), strict=True)
        return {d: peak for own, part in parts if part for d, peak in own.peaks(part, ahead=ahead).items()}

    def contents(self, batch: Batch) -> dict[int, InitialContents]:
        """Return the memory contents of each worker at the beginning of a step with a batch."""
        parts = zip(self._sessions, self._set_up(batch, steps=True), strict=True)
        return {d: found for own, part in parts if part for d, found in own.contents(part).items()}

    def entry(self) -> IslandsEntry:
        """Return the description of the islands for a checkpoint, once all that it is to hold is there.

        Raises:
            OneboxError: Exchanges failed again and again, or no island is left.
        """
        if not self.plans and self._start is not None:
            return self._start.entry
        if self._optimizer is not None:
            self._confirm_all()
        return IslandsEntry(
            devices=self.islands,
            outer=self.outer,
            shares=self._shares if self._planned else (),  # not those of evaluations before the first step
            plans=self.plans if self._planned else (),
            samples=self.membership.samples,
            due=self.membership.due,
        )

    # ---- user changes

    def change(self, changes: StateChanges) -> None:
        """Change the state on the workers of all islands, and the global values.

        Args:
            changes: The changes.

        Raises:
            OneboxError: A worker was lost.
        """
        for fragment in self.membership.travelling:  # else these sums would change what is written now
            self._apply(fragment)
        for place in self.membership.present:
            try:
                with self.recovery.voiding("a change by hand"):
                    self._sessions[place].change(changes)
            except RECOVERABLE as error:
                self.recovery.lose(error, place)
        if self._optimizer is not None:
            self._regroup()
            with self._surviving(), self.recovery.voiding("a change by hand"):
                self._optimizer.write(changes.tensors)

    def keep(self, names: Collection[str]) -> None:
        """Have snapshots of all islands contain parameters and buffers that steps could not change so far.

        Args:
            names: Those that are about to change otherwise than by a step.

        Raises:
            OneboxError: A worker was lost.
        """
        for place in self.membership.present:
            try:
                self._sessions[place].keep(names)
            except RECOVERABLE as error:
                self.recovery.lose(error, place)

    # ---- setting up

    def _set_up(self, batch: Batch, *, steps: bool) -> tuple[Batch | None, ...]:
        """Plan and install for the first batch; return each island's part of a batch."""
        self._require()
        if not self.plans:
            if batch.size < len(self.islands):
                raise UsageError(
                    f"the first batch has {batch.size} sample(s) for {len(self.islands)} islands; begin with one that "
                    "has at least a sample for each"
                )
            self._pool.follow_default_type()
            provisional = self._provisional() if self._start is None and not steps else None
            found = provisional or self._resolve(self.captures, self.captures.stamped(batch), self._states[0])
            self._planned = provisional is None
            self.plans, self._shares = found.plans, found.shares
        elif steps:
            self._replace_provisional(batch)
        parts = divided(batch, self._present_shares)
        if not self.begun:
            for state in self._states[1:]:
                if self._start is None:
                    state.use_optimizer_state(self._states[0].remembered)
            for session, part in zip(self._sessions, parts, strict=True):
                if part is None:
                    raise self._without_samples(batch, self._shares)
                session.set_up(self.captures.stamped(part), steps=steps)
        if self._start is not None:  # also once more if that was interrupted
            for state, tensors in zip(self._states, self._start.tensors, strict=True):
                state.write({name: tensor for name, tensor in tensors.items() if name in state.held})
        if steps or self._start is not None:
            self._begin_outer()
        if self._owes_outer_steps:
            self.synchronize()
            return divided(batch, self._present_shares)  # it may have lost an island
        return parts

    def _replace_provisional(self, batch: Batch) -> None:
        """Replace plans that are only those of evaluations before the first step by those made for its batch."""
        if self._planned or not self.plans:
            return
        found = self._resolve(self.captures, self.captures.stamped(batch), self._states[0])
        parts = divided(batch, self.membership.shares(found.shares))
        for place in self.membership.present:
            part = parts[place]
            if part is None:
                raise self._without_samples(batch, found.shares)
            try:
                self._sessions[place].begin_with(ResolvedPlan(plan=found.plans[place]), self.captures.stamped(part))
            except RECOVERABLE as error:
                self.recovery.lose(error, place)
        self.plans, self._shares, self._planned = found.plans, found.shares, True

    def _without_samples(self, batch: Batch, shares: Sequence[float]) -> UsageError:
        return UsageError(
            f"the first batch has {batch.size} samples, of which an island with a share of {min(shares):.0%} gets "
            "none; begin with a larger one, or give Outer(shares=...)"
        )

    def _begin_outer(self) -> None:
        """Install the outer optimizer, unless it is there."""
        if self._optimizer is not None:
            return
        recipe, start = self.captures.recipe, self._start.outer if self._start else None
        self._joint = self._there
        with self.recovery.voiding("the installation of the outer optimizer"):
            self._optimizer = OuterOptimizer(
                self._pool,
                recipe.model,
                recipe.loss,
                [session.installed for session in self._joint],
                [self._states[place] for place in self.membership.punctual],
                self.outer,
                start,
                self._settings.in_flight,
                trace=self._settings.trace,
                tell=self.wall.add,
            )
            if self._start is not None and self._start.sums:
                self._optimizer.bring_sums(self._start.sums)
        self.transfer.outer_began(self._optimizer)
        self._start = None

    # ---- islands that leave and join

    def _vacate(self, place: int, lost: Collection[int]) -> None:
        """Drop all that an island has on its workers."""
        self._bases.pop(place, None)
        self._prefetchers[place] = self._new_prefetcher()
        add_traffic(self._past_traffic, self._sessions[place].traces.traffic)
        with contextlib.suppress(OneboxError):
            self._sessions[place].close()
        recipe = self.captures.recipe
        nothing = StartState(optimizer=[], versions={})
        self._states[place] = RemoteState(recipe.model, recipe.loss, self._states[place].optimizer, self._pool, nothing)
        self._sessions[place] = self._new_session(place)
        if place == 0:
            for observer in self._observers:
                self._sessions[0].subscribe(observer)
        if self._optimizer is not None:
            self._optimizer.forsake(lost)
            self._joint = []
        self._read_punctual()

    def _read_punctual(self) -> None:
        """Read state from the first punctual island."""
        if self.membership.punctual:
            first = self._states[self.membership.punctual[0]]
            self.transfer.read_from(first)
            self.whole_transfer.read_from(first)

    def _admit(self, batch: Batch) -> None:
        """Let islands join whose workers are back, at an outer step.

        Args:
            batch: A batch, of which such an island gets its part in the next step.
        """
        for place in self.recovery.run(self.recovery.returning):
            there = {*self.membership.punctual, place}
            shares = [share if each in there else 0.0 for each, share in enumerate(self._shares)]
            part = divided(batch, shares)[place]
            if part is None:
                continue
            start_s, at_s = time.monotonic(), time.time()
            try:
                with self.recovery.voiding("the joining of an island"):
                    self._join(place, part)
            except RECOVERABLE as error:
                self.recovery.lose(error, place)
                continue
            self.recovery.joined(place, at_s, time.monotonic() - start_s)
            self._read_punctual()

    def _join(self, place: int, part: Batch) -> None:
        """Give an island the global parameters, and of the first island that is there the state of the user's
        optimizer, and other buffers."""
        self._confirm_all()
        session, state = self._sessions[place], self._states[place]
        values = self.transfer.tensors()
        state.use_tensors(values)
        state.use_optimizer_state(self._sessions[self.membership.punctual[0]].transfer.optimizer_state())
        session.steps_done = self.steps_done
        session.set_up(self.captures.stamped(part))
        self._include(place, values)

    def _include(self, place: int, values: Mapping[str, Tensor]) -> None:
        """Let an island make the next outer steps, too.

        Args:
            place: The island, which has a state.
            values: The parameters and buffers, of which it gets the global ones.
        """
        optimizer = self._optimizer
        assert optimizer is not None
        beside = optimizer.beside(self.membership.travelling)
        order = sorted({*self.membership.punctual, place})
        joint = [self._sessions[each] for each in order]
        optimizer.regroup(
            [each.installed for each in joint],
            [self._states[each] for each in order],
            {name: values[name] for name in optimizer.names},
            beside,
        )
        self._joint = joint

    # ---- islands that are late

    def _wait_for_quorum(
        self, replies: Callable[[int], Sequence[Future[WorkerReply]]], places: Collection[int] | None = None
    ) -> bool:
        """With a quorum: wait until it has come, and for the others until the grace time is over; they are late then.

        Args:
            replies: Returns the replies that an island still has to give.
            places: The islands that are concerned; ``None`` for all.

        Returns:
            Whether all have come.
        """
        if self.outer.quorum is None or not self.begun:
            return True
        concerned = [place for place in self.membership.punctual if places is None or place in places]
        least, start_s, end_s = min(self.outer.quorum, len(concerned)), time.monotonic(), math.inf
        while open_ := {place: found for place in concerned if (found := replies(place))}:
            now_s = time.monotonic()
            if end_s == math.inf and len(concerned) - len(open_) >= least:
                end_s = now_s + self.outer.grace_s
            if now_s >= end_s:
                break
            pending = [reply for found in open_.values() for reply in found]
            wait(pending, min(SLICE_S, end_s - now_s), FIRST_COMPLETED)
        if open_:
            self._go_on_without(open_, time.monotonic() - start_s)
        return not open_

    def _wait_for_sums(self, replies: Mapping[int, Future[WorkerReply]]) -> bool:
        """Wait for replies of workers that have the sums of an outer step, or until one has failed. With a quorum,
        islands that are silent for longer than the grace time are late then.

        All wait for the slowest one in a sum, so that missing replies do not tell which it is.

        Returns:
            Whether they have come or failed; if not, the sums are void.
        """
        if self.outer.quorum is None:
            return True
        start_s, punctual = time.monotonic(), self.membership.punctual
        pending = set(replies.values())
        while pending and not any(_failed(reply) for reply in replies.values()):
            pending = wait(pending, SLICE_S).not_done
            silent = [place for place in punctual if self._is_silent(place)]
            if pending and silent and len(punctual) - len(silent) >= self.outer.quorum:
                self._go_on_without(silent, time.monotonic() - start_s)
                return False
        return True

    def _is_silent(self, place: int) -> bool:
        """Return whether a worker of an island has given no sign of life for longer than the grace time."""
        silence_s = max(self._pool.silence_s(worker) for worker in self.plans[place].devices)
        return silence_s > max(self.outer.grace_s, QUIET_S)

    def _go_on_without(self, places: Collection[int], seconds: float) -> None:
        """Take islands for late; sums that need their parts are void, and begun anew without them.

        Args:
            places: The islands.
            seconds: Time for which the others have waited for them.
        """
        void = {fragment: self.membership.due[fragment] for fragment in self.membership.travelling}
        for place in places:
            self.recovery.fell_behind(place, seconds)
        if void:
            assert self._optimizer is not None
            for fragment in void:
                self.membership.void(fragment)
            self._optimizer.void(void)
            self._joint = []
        self._read_punctual()
        self._regroup()
        values = self.recovery.run(self.transfer.tensors)
        self._bases |= dict.fromkeys(places, values)
        for fragment, due in void.items():
            self.recovery.redone(fragment, f"late: {', '.join(f'island {place}' for place in places)}")
            self._begin(fragment, due)

    def _gather(self) -> None:
        """Before an outer step, take late islands that have made their steps, and wait for a quorum of the others."""
        for place in self.membership.late:
            if self._sessions[place].replies(0) or self._is_silent(place):
                continue
            start_s, at_s = time.monotonic(), time.time()
            try:
                with self.recovery.voiding("the return of a late island"):
                    self._catch_up(place)
            except RECOVERABLE as error:
                self.recovery.lose(error, place)  # it may have only a part of what it was to take
                continue
            self.recovery.caught_up(place, at_s, time.monotonic() - start_s)
            self._read_punctual()
        self._wait_for_quorum(lambda place: self._sessions[place].replies(0))

    def _catch_up(self, place: int) -> None:
        """Let a late island go on from the global parameters, plus what it has learned since it was late."""
        self._confirm_all()
        values, base, state = self.transfer.tensors(), self._bases.pop(place), self._states[place]
        trained = self._sessions[place].installed.trained
        own = {name: tensor for name, tensor in self._sessions[place].transfer.tensors().items() if name in trained}
        state.write({name: tensor + (values[name] - base[name]) for name, tensor in own.items()})
        self._include(place, values)

    def _require(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Free everything on the workers."""
        if self._optimizer is not None:
            with contextlib.suppress(OneboxError):
                self._optimizer.close()
        for session in self._sessions:
            with contextlib.suppress(OneboxError):
                session.close()
        self.recovery.close()


@dataclasses.dataclass(frozen=True)
class _IslandLoss:
    """Loss of an island's part of a step.

    Args:
        place: The island.
        session: Its session.
        loss: The loss.
        weight: Weight of the part in averages.
    """

    place: int
    session: TrainingSession
    loss: StepLoss
    weight: float


def _failed(reply: Future[WorkerReply]) -> bool:
    """Return whether a worker has failed for another reason than the loss of a peer."""
    error = reply.exception() if reply.done() else None
    return error is not None and not isinstance(error, PeerLost)


TrainerSession = TrainingSession | IslandsSession
"""A run of a trainer."""
