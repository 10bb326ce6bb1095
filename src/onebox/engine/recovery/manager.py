"""Recovery manager of a run: requests snapshots, keeps the steps since, and resumes the run after a loss."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.recovery.policy import MOST_STEPS_APART, RecoveryRecord, RestartPoint, SnapshotCadence, StepHistory
from onebox.engine.recovery.snapshots import SnapshotCoordinator
from onebox.engine.state.remote import RemoteState
from onebox.engine.state.snapshot_layout import SnapshotLayout
from onebox.engine.steps.launch import StepRequest
from onebox.engine.steps.overlap_scheduler import OverlapScheduler
from onebox.errors import OneboxError, PeerLost, PoolError, WorkerDied, WorkerHung
from onebox.pool import Pool, WorkerReply, raise_first

RECOVERABLE = (WorkerDied, WorkerHung, PeerLost)
"""Errors from which a run can recover."""

_ATTEMPTS = 5
"""Most consecutive losses before another step has completed."""

_KEPT_BYTES = 1 << 30
"""Bytes of kept batches since the last snapshot after which another one is due."""

_SPREAD = 0.5
"""Fraction of the snapshot interval over which a snapshot's transfer is spread."""

_PATIENCE_S = 1800.0
"""Longest wait for a snapshot."""

_AGAIN_S = 2.0
"""Longest wait in a recovery for the restored state to be stored redundantly again."""

_LOG = logging.getLogger("onebox")


class RecoverableRun(Protocol):
    """Interface of a run that recovery needs."""

    saved: Path | None
    """The latest checkpoint."""
    overlap: OverlapScheduler
    """Overlapping remains of a step."""

    def rebuild(self, copies: SnapshotLayout | None) -> str | None:
        """Restore a state on the workers and prepare for steps; return a description of the new plan, if one was
        needed.

        Raises:
            OneboxError: A worker was lost, or there is no plan for the remaining ones.
        """

    def launch(self, work: StepRequest) -> Mapping[int, Future[WorkerReply]]:
        """Begin a step; return the pending reply of each worker."""


class RecoveryManager:
    """Recovery of one run.

    Args:
        pool: The pool.
        remote: The state on the workers.
        run: The run.
        every: Steps between snapshots; ``None`` chooses an interval that keeps their cost low.
        in_flight: Most steps in flight.
    """

    def __init__(
        self, pool: Pool, remote: RemoteState, run: RecoverableRun, *, every: int | None, in_flight: int
    ) -> None:
        self.recoveries: list[RecoveryRecord] = []
        self.cadence = SnapshotCadence(every)
        self._pool = pool
        self._remote = remote
        self._run = run
        self._patience = every or MOST_STEPS_APART
        self._in_flight = in_flight
        self._snapshots = SnapshotCoordinator(pool, remote)
        self._history: StepHistory[SnapshotLayout | None, StepRequest] | None = None
        self._times: deque[tuple[str, int, float]] = deque()
        self._last_s: dict[int, float] = {}
        self._cost_s = 0.0
        self._asking_s = 0.0
        self._tries = 0
        self._furthest = -1

    # ---- normal operation

    def begin(self, step: int) -> None:
        """Record that the user's model is the state after a number of steps; only the first call has an effect."""
        if self._history is None:
            self._history = StepHistory(step, None, limit_bytes=_KEPT_BYTES)

    def ready(self, *, reachable: bool) -> None:
        """Request a snapshot of the state just uploaded to the workers; wait for it if it is the first.

        Afterwards the user's model is no longer needed.

        Args:
            reachable: Whether workers can connect to each other.

        Raises:
            OneboxError: Something failed on a worker.
        """
        history = self._begun()
        self._give_up()
        self._snapshots.form(reachable=reachable)
        self._snapshots.ask()
        history.ask(again=True)
        if history.snapshot is None:
            self._wait(_PATIENCE_S)
            self._remote.forget_first()

    def keep(self, ready: InstalledPlan) -> None:
        """Request a snapshot of a newly installed plan's state; close the plan if that fails.

        Raises:
            OneboxError: Something failed on a worker.
        """
        try:
            self.ready(reachable=ready.plan.sync == "workers")
        except BaseException:
            with contextlib.suppress(OneboxError):
                ready.close()
            raise

    def moved(self, *, reachable: bool) -> None:
        """Record that the state is distributed differently; the newest snapshot stays valid.

        Args:
            reachable: Whether workers can connect to each other.

        Raises:
            OneboxError: A worker was lost.
        """
        self._give_up()
        self._snapshots.form(reachable=reachable, wait=False)

    def record(self, work: StepRequest) -> None:
        """Record a step that is about to begin."""
        self._begun().begin(work, work.size_bytes)

    def posted(self, answers: Mapping[int, Future[WorkerReply]]) -> None:
        """Record that a step has begun, and request a snapshot after it if one is due.

        Waits if the snapshot under way is far behind.

        Raises:
            OneboxError: Something failed on a worker, or the pool is broken.
        """
        kind = "beside" if self._snapshots.sending else "step"
        for worker, future in answers.items():
            future.add_done_callback(functools.partial(self._ended, kind, worker))
        self._look()
        history = self._begun()
        if history.must_wait(self._patience):
            self._wait(_PATIENCE_S)
        if not history.due(self.cadence.every):
            return
        start_s = time.monotonic()
        self._run.overlap.end()
        for worker, future in self._snapshots.ask(_SPREAD * self.cadence.apart_s).items():
            future.add_done_callback(functools.partial(self._ended, "snapshot", worker))
        self._cost_s, self._asking_s = 0.0, time.monotonic() - start_s
        history.ask()

    def ended(self, step: int) -> None:
        """Record a completed step."""
        if step > self._furthest:
            self._furthest, self._tries = step, 0

    def close(self) -> None:
        """Discard all snapshots on the workers.

        Raises:
            OneboxError: The pool is broken.
        """
        self._snapshots.close(self._history.snapshot if self._history else None)

    def _begun(self) -> StepHistory[SnapshotLayout | None, StepRequest]:
        assert self._history is not None
        return self._history

    def _ended(self, what: str, worker: int, future: Future[WorkerReply]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._times.append((what, worker, time.monotonic()))

    def _look(self) -> None:
        """Process received replies."""
        while self._times:
            what, worker, at_s = self._times.popleft()
            before_s = self._last_s.get(worker, at_s)
            if what == "snapshot":
                self._cost_s = max(self._cost_s, at_s - before_s)
                continue
            if worker == min(self._last_s, default=None):
                self.cadence.step_took(at_s - before_s, beside=what == "beside")
            self._last_s[worker] = at_s
        self._arrive(self._snapshots.look())

    def _wait(self, timeout_s: float) -> None:
        """Wait for the snapshot under way, with a timeout."""
        self._arrive(self._snapshots.wait(timeout_s))

    def _arrive(self, copies: SnapshotLayout | None) -> None:
        """Replace the previous snapshot by the one that has arrived."""
        if copies is None:
            return
        history = self._begun()
        before = history.arrive(copies)
        if before is not None:
            self._snapshots.drop(before)
        if self._cost_s:
            self.cadence.snapshot_took(self._cost_s + self._asking_s)
        else:
            self.cadence.pass_over()
        self._cost_s = 0.0

    def _give_up(self) -> None:
        """Abandon the snapshot under way."""
        self._snapshots.give_up()
        self._begun().give_up()
        self.cadence.pass_over()
        self._cost_s = 0.0

    # ---- after a loss

    def recover(self, error: Exception) -> RecoveryRecord:
        """Recover the pool, restore the newest snapshot on the workers, and repeat the steps since.

        Raises:
            PoolError: Workers were lost repeatedly, or every copy of some part of the state was.
            OneboxError: The error itself, if it is not a loss; or there is no plan for the remaining devices.
        """
        if not isinstance(error, RECOVERABLE) or self._history is None:
            raise error
        start_s, at_s, first = time.monotonic(), time.time(), error
        attempts, plan = 0, None
        lost: set[int] = set()
        replaced: set[int] = set()
        while True:
            attempts, self._tries = attempts + 1, self._tries + 1
            if self._tries > _ATTEMPTS:
                raise PoolError(
                    f"workers were lost {self._tries} times and no step ended in between; resume from the last "
                    f"checkpoint; the last loss: {error}"
                ) from error
            self._give_up()
            restart = self._history.restart()
            try:
                healing = self._pool.recover_workers()
                lost, replaced = lost | set(healing.lost), (replaced | set(healing.replaced)) - set(healing.gone)
                self._check(restart, healing.lost, error)
                plan = self._run.rebuild(restart.snapshot) or plan
                self._wait(_AGAIN_S)
                self._replay(restart)
                break
            except RECOVERABLE as again:
                error = again
        self._times.clear()
        self._last_s.clear()
        story = RecoveryRecord(
            at_s=at_s,
            failure=f"{type(first).__name__}: {str(first).splitlines()[0]}",
            lost=tuple(sorted(lost)),
            replaced=tuple(sorted(replaced)),
            gone=tuple(sorted(lost - replaced)),
            plan=plan,
            step=self._begun().steps,
            snapshot_step=restart.step,
            redone=len(restart.replay),
            attempts=attempts,
            seconds=time.monotonic() - start_s,
        )
        self.recoveries.append(story)
        _LOG.warning("%s", story)
        return story

    def _check(
        self, restart: RestartPoint[SnapshotLayout | None, StepRequest], lost: Mapping[int, Exception], error: Exception
    ) -> None:
        """Require that the remaining workers have every part of the snapshot."""
        copies = restart.snapshot
        if copies is None or not self._pool.present:  # without any worker left, the run itself raises the error
            return
        copies.lose(lost)
        missing = copies.missing()
        if missing is not None:
            had = " and ".join(map(str, sorted(copies.had[missing])))
            saved = f"the last checkpoint, {self._run.saved}" if self._run.saved else "a checkpoint, if there is one"
            raise PoolError(
                f"the run cannot go on: {missing.name} after step {restart.step} was kept by worker {had} only, "
                f"and was lost there; resume from {saved}; the last loss: {error}"
            ) from error

    def _replay(self, restart: RestartPoint[SnapshotLayout | None, StepRequest]) -> None:
        """Repeat steps up to the last update; wait for those that had completed before.

        So a caller that had waited for those steps reads the same state as without the loss.
        """
        running: deque[tuple[StepRequest, list[Future[WorkerReply]]]] = deque()
        for work in restart.replay:
            running.append((work, list(self._run.launch(work).values())))
            if len(running) > self._in_flight:
                raise_first(running.popleft()[1])
        self._run.overlap.end()
        for work, futures in running:
            if work.loss.ended:
                raise_first(futures)
