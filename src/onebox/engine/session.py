"""A run: a trainer's plan, programs and state on the workers, the steps in flight, and recovery."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from onebox.engine.adaptive.controller import AdaptiveController
from onebox.engine.adaptive.measurements import step_context
from onebox.engine.adaptive.migration import Migration, MigrationReport, check_successor
from onebox.engine.compile.compiler import CompiledStep
from onebox.engine.compile.update.async_window import Window
from onebox.engine.data.prefetch import BatchPrefetcher, UploadedBatch
from onebox.engine.data.representative_batches import RepresentativeBatches
from onebox.engine.install.deferred_replies import DeferredReplies, RetiredGroups
from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.recovery.manager import RECOVERABLE, RecoveryManager
from onebox.engine.recovery.replan import ReplanWorkload, out_of_devices, replan_devices
from onebox.engine.state.remote import RemoteState
from onebox.engine.state.snapshot_layout import SnapshotLayout
from onebox.engine.state.transfer import StateChanges, StateTransfer
from onebox.engine.steps.launch import StepRequest, StepSettings, launch
from onebox.engine.steps.loss_check import MeanLossCheck
from onebox.engine.steps.overlap_scheduler import OverlapScheduler, UnfinishedStep
from onebox.engine.steps.results import StepLoss, StepValues, locate, poison_on_interrupt, step_values
from onebox.engine.steps.traces import StepTraces
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.parameter_groups import options_of, require_training
from onebox.errors import OneboxError, OperatorError, PlanError, ReplicasParted
from onebox.plan import Plan
from onebox.pool import Pool, WorkerReply
from onebox.trainer_options import Recovery

_T = TypeVar("_T")


class TrainingSession:
    """The state of a trainer on a pool.

    Args:
        pool: The pool.
        resolve_plan: Returns the plan for the captured model and the first batch.
        captures: The captured model.
        remote: The remote state.
        settings: Settings shared by all steps.
        uploads: The uploads of batches.
        recovery: Recovery from losses; ``None`` for none.
        step: Number of steps done before, by the run that is resumed.
        saved: Path of its checkpoint.
    """

    def __init__(
        self,
        pool: Pool,
        resolve_plan: Callable[[Captures, Batch], Plan],
        captures: Captures,
        remote: RemoteState,
        settings: StepSettings,
        uploads: BatchPrefetcher,
        *,
        recovery: Recovery | None,
        step: int = 0,
        saved: Path | None = None,
    ) -> None:
        self.steps_done = step
        self.plan: Plan | None = None
        self.error: Exception | None = None
        self.saved = saved
        self.traces = StepTraces(settings.trace, uploads.beside_bytes)
        self.guard: RecoveryManager | None = None
        self._pool = pool
        self._resolve_plan = resolve_plan
        self._next_plan: Plan | None = None
        """The plan that is to be installed; none before it is resolved."""
        self.captures = captures
        self._remote = remote
        self.transfer = StateTransfer(pool, remote)
        self.when_set_up: Callable[[], None] = lambda: None
        """Called when the user's model has been uploaded as the state."""
        self._changes: StateChanges | None = None
        self._written: StateChanges | None = None
        self._settings = settings
        self.uploads = uploads
        self._ready: InstalledPlan | None = None
        self.examples = RepresentativeBatches()
        self._means = MeanLossCheck(pool, captures)
        self._running: deque[StepLoss] = deque()
        self.overlap = OverlapScheduler(pool, remote, settings, self.traces.draining)
        self._old_groups = RetiredGroups(pool)
        self.adaptive: AdaptiveController | None = None
        if recovery is not None:
            every = recovery.snapshot_every
            self.guard = RecoveryManager(pool, remote, self, every=every, in_flight=settings.in_flight)

    # ---- steps

    def step(self, batch: Batch, uploaded: UploadedBatch | None = None) -> StepLoss:
        """Begin a step; see :meth:`Trainer.step`."""
        require_training(self._remote.optimizer, self._remote.training)
        batch = self.captures.stamped(batch)
        parcel = None if uploaded is None else self.uploads.claim(uploaded)
        number, guard = self.steps_done, self.guard
        self.with_recovery(lambda: self._get_ready(batch, number).step(batch))
        self.with_recovery(lambda: self._require_mean(batch))
        self.examples.add(batch, steps=True)
        self.wait(self._settings.in_flight - 1)
        if self.adaptive is not None and self.adaptive.between_steps(under_way=self._under_way):
            self.with_recovery(lambda: self._get_ready(batch, number).step(batch))
        kept = self.uploads.kept(batch) if parcel is None else batch
        result = StepLoss(number, self._failed, self.drain)
        work = StepRequest(
            number=number,
            batch=kept,
            options=options_of(self._remote.optimizer),
            loss=result,
            parcel=parcel,
            changes=self._changes,
        )
        self._changes = None
        if guard is None:
            self._post(work)
            self._begun(result)
            return result
        guard.record(work)
        self._begun(result)
        try:
            guard.posted(self._post(work))
        except RECOVERABLE as error:
            self.recover(error)  # begins this step, too
        except OneboxError as error:
            self.fail(error)
            raise
        return result

    def _require_mean(self, batch: Batch) -> None:
        """Refuse a batch whose loss is not the mean of its micro-batches' losses; see :class:`MeanLossCheck`."""
        ready = self.set_up(batch)
        micro_batches = ready.plan.micro_batches(batch.size)
        self._means.require(batch, micro_batches)
        if self._means.due(batch, micro_batches):
            self.drain()
            try:
                with self.uploads.out_of_the_way(), poison_on_interrupt("a check of the loss", self.fail):
                    self._means.probe(batch, micro_batches, ready, self.uploads.packing)
            except OperatorError as error:
                self.fail(error)
                raise

    @property
    def _under_way(self) -> bool:
        """Return whether a step is in flight."""
        return not all(loss.done for loss in self._running)

    def _begun(self, loss: StepLoss) -> None:
        self._running.append(loss)
        self.steps_done += 1

    def wait(self, most: int) -> None:
        """Wait until at most a given number of steps are in flight.

        Raises:
            OneboxError: One of them failed.
        """
        while len(self._running) > most:
            self._running[0].values()
            self._running.popleft()

    def launch(self, work: StepRequest) -> Mapping[int, Future[WorkerReply]]:
        """Begin or repeat a step; see :class:`~onebox.engine.recovery.manager.RecoverableRun`."""
        ready, overlap = self._get_ready(work.batch, work.number), self.overlap
        self._write(work.changes)
        compiled = ready.routines(work.batch)
        before, window = overlap.begin(work, compiled, ready.group_of)
        deferred = overlap.deferred
        changed = self._remote.changed_options(work.options)
        given = self._pool, self.uploads, self._settings, work, compiled, ready.checks, changed
        answers, beside = launch(*given, window=window, optimizer=self._remote.optimizer_number)
        finish = functools.partial(self._finish, work, compiled, window, before, ready, beside, deferred)
        work.loss.expect([*(future for asked in deferred for future in asked.futures), *answers.values()], finish)
        overlap.begun(work, compiled, before)
        self._old_groups.step()
        return answers

    def _get_ready(self, batch: Batch, step: int) -> InstalledPlan:
        """Return the installed plan for a step; steps overlap from some step on."""
        ready = self.set_up(batch)
        ready.compiler.windows = self.overlap.windows(step)
        return ready

    def drain(self) -> None:
        """Finish the newest step and wait for it.

        Raises:
            OneboxError: It failed.
        """
        while self.error is None and not self.overlap.settled:
            try:
                with poison_on_interrupt("what is left of a step", self.fail):
                    self.overlap.drain()
            except OneboxError as error:
                self._failed(error)
        if self.error is not None:
            raise self.error

    # ---- user changes

    @property
    def begun(self) -> bool:
        """True if the state is on the workers rather than in the user's model."""
        return self._ready is not None or self.error is not None

    def change(self, changes: StateChanges) -> None:
        """Change the state on the workers for all later readers and steps.

        Args:
            changes: The changes; they are repeated after a recovery.

        Raises:
            OneboxError: The run cannot recover from a loss.
        """
        self._changes = changes if self._changes is None else self._changes.then(changes)
        self.with_recovery(lambda: None)
        if self.guard is None:
            self._changes = None

    def _write(self, changes: StateChanges | None) -> None:
        """Upload user changes, unless that was the latest operation."""
        if changes is None or changes is self._written or self._ready is None:
            return
        with poison_on_interrupt("a change by hand", self.fail):
            self.overlap.end()
            self.transfer.write(changes.tensors)
            if changes.entries is not None:
                self.transfer.write_optimizer(changes.entries, host=self._ready.plan.update == "host")
        self._written = changes

    def _post(self, work: StepRequest) -> Mapping[int, Future[WorkerReply]]:
        """Send each device its part of a step; if only some receive theirs, the step is void."""
        try:
            with poison_on_interrupt(f"step {work.number}", self.fail):
                return self.launch(work)
        except OneboxError as error:
            if self.guard is None or not isinstance(error, RECOVERABLE):
                self.fail(error)
            raise

    def _finish(
        self,
        work: StepRequest,
        compiled: CompiledStep,
        window: Window,
        before: UnfinishedStep | None,
        ready: InstalledPlan,
        beside: Mapping[int, int],
        deferred: Sequence[DeferredReplies],
        answers: list[WorkerReply],
    ) -> StepValues:
        """Combine the workers' replies, subtracting the memory of later batches."""
        for asked in deferred:
            asked.take()
        step, routines = work.number, compiled.of(window)
        answers = answers[len(answers) - len(routines) :]
        values = step_values(step, compiled.weights_of(work.batch), routines, answers, ready.checks)
        if compiled.windows:
            values = self.overlap.ended(values, before, answers)
        if self.guard is not None:
            self.guard.ended(step)
        if ready is self._ready:
            self.traces.forget_replaced()
        trace = self.traces.add(step, compiled, window, answers, beside)
        if trace is not None and self.adaptive is not None:
            self.adaptive.ended(step_context(trace, compiled.micro_batches, ready.plan, self._pool), ready.plan)
        return values

    # ---- failures and losses

    def fail(self, error: Exception) -> None:
        """Store the first failure: the state on the workers is void, and every later call raises it."""
        self._locate(error)
        self.error = self.error or error

    def _locate(self, error: Exception) -> None:
        """Add the location in the step to an error."""
        if isinstance(error, OperatorError):
            compiler = None if self._ready is None else self._ready.compiler
            locate(error, functools.partial(self.traces.labels, compiler))

    def _failed(self, error: Exception) -> None:
        if self.guard is None or not isinstance(error, RECOVERABLE):
            self.fail(error)
        self.recover(error)

    def recover(self, error: Exception) -> None:
        """Recover from a loss, or raise the error if that is impossible."""
        self._locate(error)
        if self.guard is None or not isinstance(error, RECOVERABLE):
            raise error
        try:
            self.guard.recover(error)
        except Exception as final:
            self.fail(final)
            raise
        except BaseException:  # such as KeyboardInterrupt
            self.fail(ReplicasParted("a recovery was interrupted; resume from the last checkpoint"))
            raise

    def with_recovery(self, action: Callable[[], _T]) -> _T:
        """Perform an action, repeating it after each recoverable loss."""
        while True:
            try:
                self._write(self._changes)
                return action()
            except RECOVERABLE as error:
                self.recover(error)

    def rebuild(self, copies: SnapshotLayout | None) -> str | None:
        """Restore a state on the workers; see :class:`~onebox.engine.recovery.manager.RecoverableRun`."""
        self._written = None
        self.uploads.use(None)
        self.overlap.reset()
        self.traces.forget_replaced()
        if self.adaptive is not None:
            self.adaptive.restart()
        if self._ready is not None:
            with contextlib.suppress(OneboxError):
                self._old_groups.leave()
                self._ready.close()
            self._ready = None
        self._remote.reset(copies)
        batch = self.examples.largest
        if self.plan is None or batch is None:
            return None
        work = ReplanWorkload(
            captures=self.captures,
            optimizer=self._remote.optimizer,
            batch=batch,
            max_norm=self._settings.max_norm,
            in_flight=self._settings.in_flight,
            staleness=self._settings.staleness,
            delay=self._settings.delay,
            overlap=self._settings.overlap,
        )
        try:
            plan = replan_devices(self.plan, work, self._pool)
        except PlanError as error:
            raise out_of_devices(error, self._pool, self.saved) from error
        new = None if plan is self.plan else plan.describe()
        self._next_plan = plan
        self.set_up(batch, steps=self.examples.trains)
        return new

    # ---- another plan

    def prepare(self, plan: Plan) -> Migration | None:
        """Prepare a switch to another plan while steps go on; callable from any thread.

        Args:
            plan: A plan with the same micro-batches.

        Returns:
            The argument of :meth:`adopt`; ``None`` if nothing runs yet.

        Raises:
            OneboxError: The plan cannot take over, the model cannot be divided so, memory is insufficient, or a worker
                was lost.
        """
        ready, batch = self._ready, self.examples.largest
        if ready is None or batch is None:
            return None
        check_successor(ready.plan, plan, batch.size)
        given = plan, self._pool, self.captures, self._remote, batch, self._settings.max_norm
        after = InstalledPlan(*given, strict=True, before=ready, windows=self.overlap.windows(self.steps_done))
        self.examples.require_room(after)  # installs the programs before they are needed
        return Migration(self._pool, self._remote, ready, after)

    def adopt(self, plan: Plan, prepared: Migration | None = None) -> MigrationReport:
        """Switch to another plan, from the next step on; state that stays in place is not moved.

        Args:
            plan: A plan with the same micro-batches.
            prepared: The result of :meth:`prepare`; prepared now if it is not given.

        Returns:
            The transfers; empty if a worker is known to be lost, in which case the run recovers with the previous plan.

        Raises:
            OneboxError: The plan cannot take over, and the previous one stays; or the run cannot recover from a loss.
        """
        moved = MigrationReport()
        try:
            migration = prepared or self.prepare(plan)
        except RECOVERABLE as error:
            self.recover(error)
            return moved
        if migration is None:
            self._next_plan = plan
            return moved
        try:
            with poison_on_interrupt("a change of plan", self.fail):
                self.overlap.end()
                migration.after.compiler.windows = self.overlap.windows(self.steps_done)
                moved = migration.make()
                for asked in moved.asked:
                    self.overlap.defer(asked)
                self._old_groups.add(moved.over, 2 if self._settings.staleness else 1)
                self.traces.replaced(migration.before.compiler)
                self._ready, self.plan = migration.after, plan
                self._next_plan = plan
                self.uploads.use(migration.after)
                if self.guard is not None:
                    self.guard.moved(reachable=plan.sync == "workers")
        except RECOVERABLE as error:
            self.recover(error)
        except OneboxError as error:
            self.fail(error)
            raise
        return moved

    # ---- setting up

    def set_up(self, batch: Batch, *, steps: bool = True) -> InstalledPlan:
        """Plan and compile for the first batch.

        Args:
            batch: The batch.
            steps: Whether it is a training batch; else it is an evaluation batch.
        """
        if self._ready is None:
            if self.guard is not None:
                self.guard.begin(self.steps_done)
            plan = self._next_plan or self._resolve_plan(self.captures, batch)
            ready = InstalledPlan(
                plan,
                self._pool,
                self.captures,
                self._remote,
                batch,
                self._settings.max_norm,
                strict=True,
                steps=steps,
            )
            self.uploads.use(ready)
            ready.bring()
            if self.guard is not None:
                self.guard.keep(ready)
            self._ready = ready
            self.plan = self._next_plan = plan
            self.examples.add(batch, steps=steps)
            self.when_set_up()
        return self._ready

    def evaluation(self, batch: Batch) -> CompiledStep:
        """Return the evaluation routines for a batch; see
        :meth:`~onebox.engine.install.installed_plan.InstalledPlan.evaluation`."""
        batch = self.captures.stamped(batch)
        compiled = self.set_up(batch, steps=False).evaluation(batch, stepped=self.steps_done > 0)
        self.examples.add(batch, steps=False)
        self._write(self._changes)
        return compiled

    def close(self) -> None:
        """Free everything on the workers."""
        if self.adaptive is not None:
            self.adaptive.close()
        self.uploads.close()
        self.overlap.reset()
        self.overlap.free()
        self._old_groups.leave()
        if self._ready is not None:
            self._ready.close()
        if self.guard is not None:
            self.guard.close()
        self._remote.free()
