"""A run: a trainer's plan, programs and state on the workers, the steps in flight, and recovery."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch

from onebox.engine.adaptive.controller import AdaptiveController
from onebox.engine.adaptive.first_steps import FirstSteps
from onebox.engine.adaptive.measurements import step_context
from onebox.engine.adaptive.migration import Migration, MigrationReport, check_successor
from onebox.engine.adaptive.problem_source import problem_maker
from onebox.engine.compile.compiler import CompiledStep
from onebox.engine.config import steps_in_flight, with_check_for_nan
from onebox.engine.data.prefetch import BatchPrefetcher, UploadedBatch
from onebox.engine.data.representative_batches import RepresentativeBatches
from onebox.engine.install.deferred_replies import DeferredReplies
from onebox.engine.install.installed_plan import InstalledPlan, InstallInputs
from onebox.engine.memory.initial_contents import BytesBeside, no_bytes_beside
from onebox.engine.memory.simulator import InitialContents
from onebox.engine.problem.corrections import AppliedCorrection, keep_correction
from onebox.engine.problem.planner_problem import ResolvedPlan
from onebox.engine.recovery.manager import RecoveryManager
from onebox.engine.recovery.replan import ReplanWorkload, enlarged_plan, out_of_devices, replan_devices
from onebox.engine.recovery.snapshot_schedule import SnapshotScheduler
from onebox.engine.state.remote import RemoteState
from onebox.engine.state.snapshot_layout import SnapshotLayout
from onebox.engine.state.transfer import StateChanges, StateTransfer
from onebox.engine.steps.account import PLANNING, RECOVERING, STEPS
from onebox.engine.steps.evaluation import evaluate
from onebox.engine.steps.launch import LaunchedStep, PreparedStep, StepRequest, StepSettings
from onebox.engine.steps.link_use import LinkEvent, LinkUse, link_events, used_links
from onebox.engine.steps.loss_check import MeanLossCheck
from onebox.engine.steps.observer import EndedStep, StepObserver
from onebox.engine.steps.overlap_scheduler import OverlapScheduler
from onebox.engine.steps.results import Evaluation, StepLoss, StepValues, TraceEvent, step_values
from onebox.engine.steps.traces import StepTraces, step_trace
from onebox.engine.steps.wall_time import WallTime
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.parameter_groups import options_of, require_training
from onebox.errors import CaptureError, OneboxError, OperatorError, PlanError, UsageError
from onebox.plan import Plan
from onebox.plan.model.problem import Problem
from onebox.plan.replan.network_rates import LinkProbe, ProbeResult
from onebox.plan.replan.profile_correction import TimeFactors
from onebox.pool import Pool, WorkerReply
from onebox.pool.network.link_benchmark import send_metered
from onebox.trainer_options import Recovery
from onebox.wire.protocol.requests import Run

_LOG = logging.getLogger("onebox")

_PROBE_BYTES = 16 << 20
"""Most memory of a worker that a probe of a link takes."""


class TrainingSession:
    """The state of a trainer on a pool.

    What follows the steps subscribes as a :class:`~onebox.engine.steps.observer.StepObserver`. Three collaborators are
    called by name, since they decide on the next instruction: the overlap scheduler on the window of a step, adaptive
    replanning on the plan of the next one, and the recovery manager on what follows a failure.

    Args:
        pool: The pool.
        resolve_plan: Returns the plan for the captured model and the first batch.
        captures: The captured model.
        remote: The remote state.
        settings: Settings shared by all steps.
        uploads: The uploads of batches.
        recovery: Recovery from losses; ``None`` for none.
        adaptive: Whether to adapt the plan to devices and links; the problem that the plan was made for, if known.
        compare: Whether to compare the first steps with the plan's prediction, and to correct the profile by them; not
            where it is adapted, or steps overlap.
        step: Number of steps begun before, by the run that is resumed.
        failed: Number of those among them that failed and changed nothing.
        saved: Path of its checkpoint.
        beside: Returns the further state of each worker.
        workers: The workers that it uses; ``None`` for those of the whole pool.
        wall: The account of the run's wall time; ``None`` for one of its own.
    """

    def __init__(
        self,
        pool: Pool,
        resolve_plan: Callable[[Captures, Batch], ResolvedPlan],
        captures: Captures,
        remote: RemoteState,
        settings: StepSettings,
        uploads: BatchPrefetcher,
        *,
        recovery: Recovery | None,
        adaptive: bool | Problem = False,
        compare: bool = False,
        step: int = 0,
        failed: int = 0,
        saved: Path | None = None,
        beside: BytesBeside = no_bytes_beside,
        workers: Sequence[int] | None = None,
        wall: WallTime | None = None,
    ) -> None:
        self.steps_done = step
        self._failed_before = failed
        self._failed: set[int] = set()
        """The steps that failed and changed nothing, as far as it is known."""
        self.wall = wall or WallTime(pool.devices)
        self.plan: Plan | None = None
        self.captures = captures
        self.uploads = uploads
        self._pool = pool
        self._remote = remote
        self.transfer = StateTransfer(pool, remote)
        self.examples = RepresentativeBatches()
        self.traces = StepTraces(settings.trace, uploads.beside_bytes, self.wall.add)
        self.overlap = OverlapScheduler(pool, remote, settings, self.traces.draining)
        self.snapshots = (
            SnapshotScheduler(pool, remote, self.overlap, step=step, every=recovery.snapshot_every)
            if recovery
            else None
        )
        self.recovery = RecoveryManager(
            pool,
            self,
            self.overlap,
            self.snapshots,
            self.traces.locate,
            in_flight=settings.in_flight,
            deterministic=any(each.deterministic == "yes" for each in settings.numerics),
            checkpoint=saved,
            workers=workers,
        )
        self._given = adaptive if isinstance(adaptive, Problem) else None
        self._problem = self._given
        """The problem that the first plan solves, if it is known."""
        self.adaptive = self._adaptive_controller(pool) if adaptive else None
        compared = compare and settings.trace and not adaptive and not settings.overlap
        self.first_steps = self._first_steps(pool) if compared else None
        self._correction: AppliedCorrection | None = None
        """The correction of the profile that the plan was made with, if it is known."""
        self._resolve_plan = resolve_plan
        self._next_plan: Plan | None = None
        """The plan that is to be installed; none before it is resolved."""
        self._whole_plan: Plan | None = None
        """The latest plan that was chosen for all devices of the pool."""
        self._away: frozenset[int] = frozenset()
        """The devices of that plan which the plan in use does without."""
        self._changes: StateChanges | None = None
        self._written: StateChanges | None = None
        self._settings = settings
        self._ready: InstalledPlan | None = None
        self._prepared: dict[CompiledStep, PreparedStep] = {}
        """Of the plan in use, with the routines that have passed the check of the loss."""
        self._latest: PreparedStep | None = None
        self._means = MeanLossCheck(pool, captures)
        self._running: deque[StepLoss] = deque()
        self._faulty: StepLoss | None = None
        """The latest step that has shown that its loss is no mean over samples."""
        self._inputs = InstallInputs(
            pool=pool,
            captures=captures,
            remote=remote,
            versions=self.overlap.versions,
            max_norm=settings.max_norm,
            beside=beside,
        )
        observers = self.wall, self.snapshots, self.recovery, self.traces, self.adaptive, self.overlap, self.first_steps
        self._observers: list[StepObserver] = [each for each in observers if each is not None]

    def _adaptive_controller(self, pool: Pool) -> AdaptiveController:
        make = problem_maker(
            pool,
            lambda: self.captures,
            self._remote.optimizer,
            lambda: self.examples.largest,
            lambda: self._problem,
        )
        context = functools.partial(step_context, pool=pool)
        return AdaptiveController(self, make, lambda: self.examples.samples, context, self._beside_steps)

    def _beside_steps(self, stopped: threading.Event) -> AbstractContextManager[None]:
        """Surround what another thread does while steps go on: this one makes its captures."""
        return self.captures.step_thread.beside(stopped)

    def _first_steps(self, pool: Pool) -> FirstSteps:
        def keep(factors: TimeFactors) -> None:
            if self._correction is not None:
                keep_correction(self._correction, factors)

        return FirstSteps(lambda: self._problem, functools.partial(step_context, pool=pool), keep)

    def subscribe(self, observer: StepObserver) -> None:
        """Call an observer at the events of all later steps, after the earlier subscribers."""
        self._observers.append(observer)

    # ---- steps

    def step(self, batch: Batch, uploaded: UploadedBatch | None = None) -> StepLoss:
        """Begin a step; see :meth:`Trainer.step`."""
        require_training(self._remote.optimizer, self._remote.training, self._remote.named.name_of)
        self.captures.step_thread.serve()
        batch = self.captures.stamped(batch)
        parcel = None if uploaded is None else self.uploads.claim(uploaded)
        number = self.steps_done
        with self.wall.during(PLANNING):
            prepared = self.recovery.run(lambda: self._prepare(batch, number))
        try:
            self.wait(self._most_in_flight - 1)
        except OperatorError as error:
            error.add_note(f"It is of an earlier step than {number}, whose batch has not been used: call step() again.")
            raise
        with self.wall.during(PLANNING):
            if self.adaptive is not None:
                self.adaptive.between_steps(under_way=self._under_way)
            if self.recovery.ready and (self._pool.returning or self._away - self._pool.gone):
                self._take_back()
            if prepared.installed is not self._ready:  # another plan has taken over, or a recovery installed one
                prepared = self.recovery.run(lambda: self._prepare(batch, number))
        result = StepLoss(number, self._retry, self.drain)
        work = StepRequest(
            number=number,
            batch=self.uploads.kept(batch) if parcel is None else batch,
            options=options_of(self._remote.optimizer),
            loss=result,
            parcel=parcel,
            changes=self._changes,
            check_nan=torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled(),
        )
        self._changes = None
        for observer in self._observers:
            observer.requested(work)
        self._running.append(result)
        self.steps_done += 1
        self._repeat_effects(batch, prepared.compiled, train=True)
        self.recovery.once(lambda: self._begin(work, prepared))
        return result

    def _repeat_effects(self, batch: Batch, compiled: CompiledStep, *, train: bool) -> None:
        self.captures.repeat_effects(batch, [each.size for each in compiled.micro_batches], train=train)

    @property
    def _most_in_flight(self) -> int:
        """Most steps in flight: in an adaptive run no more than long steps need, as a change of plan waits for all."""
        most, step_s = self._settings.in_flight, 0.0 if self.adaptive is None else self.adaptive.step_s
        return min(most, steps_in_flight(self._pool.round_trip_s, step_s)) if step_s else most

    def _retry(self, action: Callable[[], StepValues]) -> StepValues:
        """Read a step's values, again after each recovery."""
        with self.wall.during(STEPS):
            try:
                return self.recovery.run(action, void=True)
            except OperatorError as error:
                self._note_failed(error)
                if error.kept and self.installed.plan.late and self.changed_buffers:
                    error.add_note(
                        f"With late gradients over several stages, buffers that training changes, such as "
                        f"{self.changed_buffers[0]}, may have been changed by the batch, too."
                    )
                raise

    @property
    def failed_steps(self) -> int:
        """Number of the steps that failed and changed nothing."""
        return self._failed_before + len(self._failed)

    def _note_failed(self, error: OperatorError) -> None:
        """Note that a step has failed, whoever has waited for it: it may be one before the step that was waited for."""
        if error.kept:
            self._failed.update(step for step in error.steps if 0 <= step < self.steps_done)
            self.overlap.told(error)

    def _prepare(self, batch: Batch, number: int) -> PreparedStep:
        """Look up all that a step needs, and refuse a batch whose loss is not the mean over its micro-batches."""
        installed = self.set_up(batch)
        compiled = installed.step(batch, windows=self.overlap.windows(number))
        prepared = self._prepared.get(compiled)
        ranges = installed.compiler.index_ranges(batch, compiled) if prepared is None else prepared.ranges
        for each in ranges:
            each.require(batch.leaves[each.leaf])
        if prepared is None:
            self._require_mean(batch, installed, compiled)
            compared = self._means.compares(batch, compiled.micro_batches)
            prepared = PreparedStep(installed=installed, compiled=compiled, compared=compared, ranges=ranges)
            self._prepared[compiled] = prepared
        elif prepared.compared:
            self._means.require(batch, compiled.micro_batches)
        if prepared is not self._latest:
            self.examples.add(batch, steps=True)
            self._latest = prepared
        return prepared

    def _require_mean(self, batch: Batch, installed: InstalledPlan, compiled: CompiledStep) -> None:
        """Check the first batch of a shape; see :class:`MeanLossCheck`."""
        micro_batches = compiled.micro_batches
        self._means.require(batch, micro_batches)
        if self._means.due(batch, micro_batches):
            self.drain()
            try:
                with self.uploads.out_of_the_way(), self.recovery.poisoning("a check of the loss"):
                    self._means.probe(batch, micro_batches, installed, self.uploads.packing)
            except OperatorError as error:
                if not error.kept:
                    self.recovery.fail(error)
                raise

    def replies(self, most: int) -> list[Future[WorkerReply]]:
        """Return the replies that have to come until at most a given number of steps are in flight."""
        running = [loss for loss in self._running if not loss.done]
        return [each for loss in running[: max(0, len(running) - most)] for each in loss.pending if not each.done()]

    @property
    def _under_way(self) -> bool:
        """Return whether a step is in flight."""
        return not all(loss.done for loss in self._running)

    def wait(self, most: int) -> None:
        """Wait until at most a given number of steps are in flight.

        Raises:
            OneboxError: One of them failed, and its error has not been raised before.
        """
        while len(self._running) > most:
            try:
                if not self._running[0].failed:
                    self._running[0].values()
            except Exception:
                self._running.popleft()
                raise
            self._running.popleft()

    def tell_fault(self) -> None:
        """Raise, once, that a step has shown that the loss is no mean over samples; reading its loss raises it, too.

        Raises:
            UsageError: One has.
        """
        if self._faulty is not None:
            self._faulty.tell_fault()

    def unread_error(self) -> OneboxError | None:
        """Wait for the steps in flight; return the first failure of one whose loss has not been read."""
        for loss in self._running if self.error is None else ():
            if loss.failed:  # whoever read it knows
                return None
            try:
                loss.values()
            except OneboxError as error:
                return error
        return None if self._faulty is None else self._faulty.untold_fault

    def _begin(self, work: StepRequest, prepared: PreparedStep) -> None:
        """Launch a step; if only some devices receive their part, it is void."""
        with self.recovery.poisoning(f"step {work.number}"):
            launched = self._launch(work, prepared)
        for observer in self._observers:
            observer.began(launched)

    def repeat(self, work: StepRequest) -> LaunchedStep:
        """Launch a step again; see :class:`~onebox.engine.recovery.manager.RecoverableRun`."""
        installed = self.set_up(work.batch)
        compiled = installed.routines(work.batch, windows=self.overlap.windows(work.number))
        return self._launch(work, PreparedStep(installed=installed, compiled=compiled))

    def _launch(self, work: StepRequest, prepared: PreparedStep) -> LaunchedStep:
        """Send each worker its part of a step."""
        settings, compiled, checks = self._settings, prepared.compiled, prepared.installed.checks
        self._write(work.changes)
        before, window = self.overlap.begin(work, prepared)
        deferred = self.overlap.deferred
        changed, optimizer = self._remote.changed_options(work.options), self._remote.optimizer_number
        check = settings.check_every and (work.number + 1) % settings.check_every == 0
        checked = work.check_nan or (before is not None and before.work.check_nan)
        numerics = with_check_for_nan(settings.numerics) if checked else settings.numerics
        void, answers = work.number in self._failed, {}  # in a recovery: it was left out, though it could be done now
        with self.uploads.bringing(work.batch, compiled, work.parcel) as parts, self._pool.order:
            beside = {worker: self.uploads.beside_bytes(worker) for worker in compiled.routines}
            for worker, routine in compiled.of(window).items():
                part = parts[worker]
                run = Run(
                    routine.number, part.bindings, work.number, settings.seed, changed, settings.trace, optimizer, void
                )
                asks = [ask for _, ask in checks.get(worker, ())] if check else []
                message = [*part.instructions, *numerics, run, *asks]
                answers[worker] = self._pool.post(worker, message, part.frames, answer=True)
        launched = LaunchedStep(work=work, prepared=prepared, window=window, beside=beside, answers=answers)
        futures = [*(future for asked in deferred for future in asked.futures), *answers.values()]
        work.loss.expect(futures, functools.partial(self._finish, launched, before, deferred))
        self.overlap.begun(launched, before)
        return launched

    def _finish(
        self,
        launched: LaunchedStep,
        before: LaunchedStep | None,
        deferred: Sequence[DeferredReplies],
        answers: list[WorkerReply],
    ) -> StepValues:
        """Combine the workers' replies."""
        for asked in deferred:
            asked.take()
        installed, compiled = launched.prepared.installed, launched.prepared.compiled
        number, routines = launched.work.number, compiled.of(launched.window)
        answers = answers[len(answers) - len(routines) :]
        values = step_values(number, compiled.weights_of(launched.work.batch), routines, answers, installed.checks)
        if compiled.measures:
            fault = self.fault_of(compiled, values.results)
            values = replace(values, fault=fault)
            self._faulty = self._faulty if fault is None else launched.work.loss
        if compiled.windows:
            values = self.overlap.values_of(values, before, answers)
        trace = (
            step_trace(number, compiled, launched.window, answers, launched.beside) if self._settings.trace else None
        )
        ended = EndedStep(
            number=number,
            plan=installed.plan,
            current=installed is self._ready,
            micro_batches=compiled.micro_batches,
            trace=trace,
        )
        for observer in self._observers:
            observer.ended(ended)
        return values

    def drain(self) -> None:
        """Finish the newest step and wait for it.

        Raises:
            OneboxError: It failed.
        """
        while self.error is None and not self.overlap.settled:
            try:
                self.recovery.once(self._drain)
            except OperatorError as error:
                self._note_failed(error)
                raise
        if self.error is not None:
            raise self.error

    def _drain(self) -> None:
        with self.recovery.poisoning("what is left of a step"):
            self.overlap.drain()

    def evaluate(self, batches: Iterable[Batch], metrics: Sequence[str]) -> Evaluation:
        """Return the loss and metrics over batches; see :meth:`Trainer.evaluate`."""
        with self.uploads.out_of_the_way():
            return evaluate(
                batches,
                pool=self._pool,
                prepare=self.evaluation,
                parts=self.uploads.parts_beside,
                metrics=metrics,
                fault=self.fault_of,
                numerics=self._settings.numerics,
                in_flight=self._settings.in_flight,
                retry=self.recovery.run,
                poisoning=self.recovery.poisoning,
            )

    def fault_of(self, compiled: CompiledStep, results: Mapping[int, Mapping[int, float]]) -> UsageError | None:
        """Return the reason why a result of a batch was no mean over its micro-batches; ``None`` if it was one."""
        return self._means.fault(compiled.measures, results, compiled.micro_batches)

    def evaluation(self, batch: Batch, again: bool) -> CompiledStep:
        """Return the evaluation routines for a batch, installed on the workers.

        Args:
            batch: The batch.
            again: Whether it is evaluated again, as after a loss.
        """
        batch = self.captures.stamped(batch)
        with self.wall.during(PLANNING):
            installed = self.set_up(batch, steps=False)
            compiled = installed.evaluation(batch, stepped=self.steps_done > 0)
        self.examples.add(batch, steps=False)
        self._means.require(batch, compiled.micro_batches, train=False)
        if self._means.due(batch, compiled.micro_batches, train=False):
            with self.recovery.poisoning("a check of metrics"):
                self._means.probe_evaluation(batch, compiled.micro_batches, installed, self.uploads.packing)
        if not again:
            self._repeat_effects(batch, compiled, train=False)
        return compiled

    # ---- observation

    @property
    def installed(self) -> InstalledPlan:
        """The plan on the workers, once it is there."""
        assert self._ready is not None
        return self._ready

    @property
    def changed_buffers(self) -> tuple[str, ...]:
        """The buffers that training changes."""
        return () if self._ready is None else self._ready.compiler.changed

    def events(self) -> list[TraceEvent]:
        """Return the workers' activity in the last steps; see :meth:`Trainer.events`."""
        return self.traces.events()

    def newest_events(self) -> list[TraceEvent]:
        """Return the workers' activity in the newest step."""
        return self.traces.newest_events()

    @property
    def links(self) -> tuple[LinkUse, ...]:
        """The use of links between hosts so far; see :attr:`Trainer.links`."""
        return used_links(self.traces.traffic, [device.host for device in self._pool.devices])

    def link_events(self) -> list[LinkEvent]:
        """Return the use of links between hosts in the last steps; see :meth:`Trainer.link_events`."""
        return link_events(self.traces, [device.host for device in self._pool.devices])

    def peaks(self, batch: Batch, *, ahead: int = 0) -> dict[int, int]:
        """Return the peak bytes of each worker in a step with a batch; see :meth:`InstalledPlan.peaks`."""
        return self.set_up(batch).peaks(batch, ahead=ahead)

    def contents(self, batch: Batch) -> dict[int, InitialContents]:
        """Return the memory contents of each worker at the beginning of a step with a batch."""
        return self.set_up(batch).contents(batch)

    # ---- user changes

    @property
    def error(self) -> Exception | None:
        """The failure that made the state on the workers void, if there was one."""
        return self.recovery.error

    @property
    def begun(self) -> bool:
        """True if the state is on the workers rather than in the user's model."""
        return self._ready is not None or self.error is not None

    def share_captures(self, captures: Captures) -> None:
        """Use the captures of another trainer of an equal model instead of own ones.

        Raises:
            UsageError: The model has been captured.
        """
        if self.begun:
            raise UsageError("captures are shared before the first step or evaluation; make another trainer")
        self.captures = captures
        self._inputs = replace(self._inputs, captures=captures)
        self._means = MeanLossCheck(self._pool, captures)

    def change(self, changes: StateChanges) -> None:
        """Change the state on the workers for all later readers and steps.

        Args:
            changes: The changes; they are repeated after a recovery.

        Raises:
            OneboxError: The run cannot recover from a loss.
        """
        self.keep(changes.tensors)  # with what these changes replace
        self._changes = changes if self._changes is None else self._changes.then(changes)
        self.recovery.run(self.write_changes)
        if self.snapshots is None:
            self._changes = None

    def keep(self, names: Collection[str]) -> None:
        """Have snapshots contain parameters and buffers from now on that steps could not change so far.

        Args:
            names: Those that are about to change otherwise than by a step.

        Raises:
            OneboxError: The run cannot recover from a loss.
        """
        if self._remote.change_by_hand(names) and self.snapshots is not None:
            self.recovery.run(self.snapshots.renew)

    def write_changes(self) -> None:
        """Upload the user changes since the last step, unless the workers have them."""
        self._write(self._changes)

    def _write(self, changes: StateChanges | None) -> None:
        """Upload user changes, unless that was the latest operation."""
        if changes is None or changes is self._written or self._ready is None:
            return
        with self.recovery.poisoning("a change by hand"):
            self.overlap.end()
            self._remote.write(changes.tensors)
            if changes.entries is not None:
                self._remote.write_optimizer(changes.entries, host=self._ready.plan.update == "host")
        self._written = changes

    # ---- another plan

    def prepare(self, plan: Plan) -> Migration | None:
        """Prepare a switch to another plan while steps go on; callable from any thread.

        Args:
            plan: A plan with the same micro-batches, or others where the model's result does not depend on them.

        Returns:
            The argument of :meth:`adopt`; ``None`` if nothing runs yet.

        Raises:
            OneboxError: The plan cannot take over, the model cannot be divided so, memory is insufficient, or a worker
                was lost.
        """
        ready, batch = self._ready, self.examples.largest
        if ready is None or batch is None:
            return None
        check_successor(ready.plan, plan, batch.size, regroupable=lambda: self._regroupable(batch))
        windows = self.overlap.windows(self.steps_done)
        after = InstalledPlan(plan, batch, self._inputs, strict=True, before=ready, windows=windows)
        self.examples.require_room(after)  # installs the programs before they are needed
        return Migration(self._pool, self._remote, ready, after)

    def _regroupable(self, batch: Batch) -> bool:
        """Return whether samples may be in other micro-batches with the same result."""
        assert self._ready is not None
        size = max(part.size for part in self._ready.plan.micro_batches(batch.size))
        return self.captures.regroupable(batch, size)

    def adopt(self, plan: Plan, prepared: Migration | None = None) -> MigrationReport:
        """Switch to another plan, from the next step on; state that stays in place is not moved.

        Args:
            plan: A plan with the same micro-batches.
            prepared: The result of :meth:`prepare`; prepared now if it is not given.

        Returns:
            The transfers; empty if a worker was lost, in which case the run recovers.

        Raises:
            OneboxError: The plan cannot take over, and the previous one stays; or the run cannot recover from a loss.
        """
        if prepared is None and self._ready is None:
            self._next_plan = plan
            return MigrationReport()
        migration = prepared or self.recovery.once(lambda: self.prepare(plan), void=False)
        moved = None if migration is None else self.recovery.once(lambda: self._switch(migration))
        return moved or MigrationReport()

    def probe(self, probe: LinkProbe) -> ProbeResult:
        """Measure a link between two hosts while steps go on; callable from any thread.

        Returns:
            What its message took; nothing where there is no memory for one, or a worker was lost, which steps report.
        """
        spare = self._ready.spare_bytes if self._ready is not None else {}
        room_bytes = min([_PROBE_BYTES, *(spare.get(end, _PROBE_BYTES) for end in (probe.source, probe.target))])
        try:
            sent = send_metered(self._pool, probe.source, probe.target, probe.rate_bps, room_bytes)
        except OneboxError:
            return ProbeResult(probe, 0, 0.0)
        return ProbeResult(probe, sent.size_bytes, sent.busy_ns / 1e9)

    def begin_with(self, resolved: ResolvedPlan, batch: Batch) -> None:
        """Replace the plan of evaluations before the first step; it may have other micro-batches.

        Args:
            resolved: The plan.
            batch: The first training batch.

        Raises:
            OneboxError: The plan cannot take over, and the previous one stays; or the run cannot recover from a loss.
        """
        plan, ready = resolved.plan, self._ready
        self._problem, self._correction = self._given or resolved.problem, resolved.correction
        if ready is None:
            self._next_plan = plan
        elif plan != ready.plan:
            windows = self.overlap.windows(self.steps_done)
            after = InstalledPlan(plan, batch, self._inputs, strict=True, before=ready, windows=windows)
            self.recovery.once(lambda: self._switch(Migration(self._pool, self._remote, ready, after)))

    def _switch(self, migration: Migration) -> MigrationReport:
        """Carry out a change of plan."""
        after = migration.after
        with self.recovery.poisoning("a change of plan"):
            self.overlap.end()
            moved = migration.make()
            for asked in moved.asked:
                self.overlap.defer(asked)
            self.overlap.retire(moved.over)
            if not self._pool.gone:
                self._whole_plan = after.plan
            self._use(after)
            self.uploads.use(after)
            for observer in self._observers:
                observer.replaced(migration.before, after)
        return moved

    def _use(self, installed: InstalledPlan) -> None:
        self._ready, self._prepared, self._latest = installed, {}, None
        self.plan = self._next_plan = installed.plan
        if self._whole_plan is None and not self._pool.gone:
            self._whole_plan = installed.plan
        self._away = frozenset(self._whole_plan.devices if self._whole_plan else ()) - {*installed.plan.devices}

    def _take_back(self) -> None:
        """Use the devices again that were gone and are back: the plan before their loss takes over."""
        away_s = self.recovery.once(self._pool.readmit, void=False) or {}
        back, self._away = sorted(self._away - self._pool.gone), self._away & self._pool.gone
        before, batch = self.plan, self.examples.largest
        if not back or before is None or batch is None:
            return
        self.recovery.returned(away_s)  # not those that a plan for fewer devices does without: they may keep snapshots
        try:
            plan = enlarged_plan(before, self._whole_plan, self._workload(batch), self._pool)
            moved = self.adopt(plan) if plan != before else MigrationReport()
            note = f", {moved.size_bytes / 1e6:.1f} MB moved; plan: {plan.describe()}" if plan != before else ""
        except (UsageError, PlanError, CaptureError, OperatorError) as error:
            if self.error is not None:
                raise
            note = f", but the plan stays: {str(error).splitlines()[0]}"
        if self._pool.gone.intersection(back):  # lost again in between, which the recovery has reported
            return
        if not away_s and not note:  # they were not gone: the plan for what was left does without them
            return
        if self.adaptive is not None:
            self.adaptive.reset()
        devices = [self._pool.devices[worker] for worker in back]
        named = ", ".join(f"{device.number} ({device.device} on {device.host})" for device in devices)
        after = f" after {max(away_s.values()):.0f} s" if away_s else ""
        _LOG.warning("back before step %d: device %s%s%s", self.steps_done, named, after, note)

    # ---- recovery

    def recovering(self) -> AbstractContextManager[None]:
        """Count the time of the context as that of a recovery."""
        return self.wall.during(RECOVERING)

    def rebuild(self, copies: SnapshotLayout | None, lost: Collection[int]) -> str | None:
        """Restore a state on the workers; see :class:`~onebox.engine.recovery.manager.RecoverableRun`."""
        self._written = None
        self.uploads.use(None)
        for observer in self._observers:
            observer.reset()
        if self._ready is not None:
            with contextlib.suppress(OneboxError):
                self._ready.close()
            self._ready = None
        self._remote.reset(copies, lost)
        batch = self.examples.largest
        if self.plan is None or batch is None:
            return None
        try:
            plan = replan_devices(self.plan, self._workload(batch), self._pool)
        except PlanError as error:
            raise out_of_devices(error, self._pool, self.recovery.checkpoint) from error
        new = None if plan is self.plan else plan.describe()
        self._next_plan = plan
        self.set_up(batch, steps=self.examples.trains)
        return new

    def _workload(self, batch: Batch) -> ReplanWorkload:
        return ReplanWorkload(
            captures=self.captures,
            optimizer=self._remote.optimizer,
            batch=batch,
            max_norm=self._settings.max_norm,
            in_flight=self._settings.in_flight,
            staleness=self._settings.staleness,
            delay=self._settings.delay,
            overlap=self._settings.overlap,
        )

    # ---- setting up

    def set_up(self, batch: Batch, *, steps: bool = True) -> InstalledPlan:
        """Plan and compile for the first batch.

        Args:
            batch: The batch.
            steps: Whether it is a training batch; else it is an evaluation batch.
        """
        if self._ready is None:
            self._pool.follow_default_type()
            plan = self._next_plan
            if plan is None:
                resolved = self._resolve_plan(self.captures, batch)
                plan, self._correction = resolved.plan, resolved.correction
                self._problem = self._given or resolved.problem
            installed = InstalledPlan(plan, batch, self._inputs, strict=True, steps=steps)
            self.uploads.use(installed)
            with self._pool.order:
                installed.bring()
            try:
                for observer in self._observers:
                    observer.installed(installed)
            except BaseException:
                with contextlib.suppress(OneboxError):
                    installed.close()
                raise
            self._remote.forget_first()
            self._use(installed)
            self.examples.add(batch, steps=steps)
            return installed
        return self._ready

    def close(self) -> None:
        """Free everything on the workers."""
        self.uploads.close()
        for observer in self._observers:
            observer.close()
        if self._ready is not None:
            self._ready.close()
        self._remote.free()
