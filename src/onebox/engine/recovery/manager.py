"""Recovery manager of a run: everything that uses the workers goes through it, is repeated after a loss, or fails for
good.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar

from onebox.engine.recovery.policy import RecoveryRecord, RestartPoint
from onebox.engine.recovery.snapshot_schedule import SnapshotScheduler
from onebox.engine.recovery.supervisor import RECOVERABLE, Supervisor, cost_nothing, first_line
from onebox.engine.state.snapshot_layout import SnapshotLayout
from onebox.engine.steps.launch import LaunchedStep, StepRequest
from onebox.engine.steps.observer import EndedStep, StepObserver
from onebox.engine.steps.overlap_scheduler import OverlapScheduler
from onebox.errors import OneboxError, OperatorError, PoolError
from onebox.pool import Pool, WorkerReply, raise_first

_ATTEMPTS = 5
"""Most consecutive losses before another step has completed."""

_AGAIN_S = 0.75
"""Longest wait in a recovery for the restored state to be stored redundantly again."""

_LOG = logging.getLogger("onebox")

_T = TypeVar("_T")


class RecoverableRun(Protocol):
    """Interface of a run that recovery needs."""

    def rebuild(self, copies: SnapshotLayout | None, lost: Collection[int]) -> str | None:
        """Restore a state on the workers and prepare for steps; return a description of the new plan, if one was
        needed.

        Args:
            copies: A snapshot; ``None`` for the user's model alone.
            lost: Workers whose state is gone.

        Raises:
            OneboxError: A worker was lost, or there is no plan for the remaining ones.
        """

    def repeat(self, work: StepRequest) -> LaunchedStep:
        """Launch a step again."""

    def write_changes(self) -> None:
        """Upload the user changes since the last step, unless the workers have them."""

    def recovering(self) -> AbstractContextManager[None]:
        """Count the time of the context as that of a recovery."""


class RecoveryManager(Supervisor, StepObserver):
    """Supervisor of what a run does on its workers.

    Args:
        pool: The pool.
        run: The run.
        overlap: Overlapping remains of steps.
        snapshots: The snapshots to recover from; ``None`` if the first loss is final.
        locate: Adds the location in the step to an error.
        in_flight: Most steps in flight.
        deterministic: Whether all operators are deterministic on GPUs, too.
        checkpoint: Path of the latest checkpoint.
        workers: The workers that the run uses; ``None`` for those of the whole pool.
    """

    def __init__(
        self,
        pool: Pool,
        run: RecoverableRun,
        overlap: OverlapScheduler,
        snapshots: SnapshotScheduler | None,
        locate: Callable[[Exception], None],
        *,
        in_flight: int,
        deterministic: bool,
        checkpoint: Path | None,
        workers: Collection[int] | None = None,
    ) -> None:
        super().__init__(pool, locate, checkpoint)
        self.recoveries: list[RecoveryRecord] = []
        self._run = run
        self._overlap = overlap
        self._snapshots = snapshots
        self._in_flight = in_flight
        self._exact = deterministic or all(device.kind != "cuda" for device in pool.devices)
        self._tries = 0
        self._furthest = -1
        self._seen = pool.recoveries
        self._workers = workers
        self._returned: frozenset[int] = frozenset()
        """Devices that were taken back, until a step has ended."""

    @property
    def ready(self) -> bool:
        """True if the run could recover from a loss now."""
        return self._snapshots is not None and self._snapshots.recoverable

    @property
    def _advice(self) -> str:
        if self._snapshots is None:
            return ". A trainer with recovery=onebox.Recovery() goes back to its last snapshot, once"
        return "; the steps since the last snapshot have been repeated once" if self._tries else ""

    # ---- the way in

    def run(self, action: Callable[[], _T], *, void: bool = False) -> _T:
        """Perform an action, and again after each recovery from a loss.

        Args:
            action: The action.
            void: Whether any other failure makes the state void, but for one that cost nothing but a step.

        Raises:
            OneboxError: It failed, or the run cannot recover from a loss.
        """
        while True:
            try:
                self._require_workers()
                return action()
            except Exception as error:
                self._recover_from(error, void=void)

    def once(self, action: Callable[[], _T], *, void: bool = True) -> _T | None:
        """Perform an action that a recovery makes superfluous: a step, which it repeats, or a change of plan.

        Args:
            action: The action.
            void: Whether a failure other than a loss makes the state void, but for one that cost nothing but a step.

        Returns:
            The result; ``None`` after a recovery from a loss.

        Raises:
            OneboxError: It failed, or the run cannot recover from a loss.
        """
        try:
            self._require_workers()
            return action()
        except Exception as error:
            self._recover_from(error, void=void)
            return None

    def returned(self, devices: Collection[int]) -> None:
        """Record that devices are to be used again; after a loss before the end of a step they are given up again, as
        they may reach the client, but not each other."""
        self._returned = frozenset(devices)

    def ended(self, step: EndedStep) -> None:
        """Count attempts anew when the run is further than ever."""
        self._returned = frozenset()
        if step.number > self._furthest:
            self._furthest, self._tries = step.number, 0

    # ---- after a loss

    def _require_workers(self) -> None:
        """Require that no other trainer has recovered the pool from a loss since: the state of this one is gone with
        the lost workers, though the pool is whole.

        Raises:
            OneboxError: A worker was lost.
        """
        if self._pool.recoveries != self._seen and self.error is None:
            lost = self._losses()
            if lost:
                raise lost[min(lost)].with_traceback(None)

    def _losses(self) -> dict[int, OneboxError]:
        """Return the errors of the run's workers that were lost in recoveries which it has not seen."""
        found = self._pool.losses(self._seen)
        return {worker: error for worker, error in found.items() if self._workers is None or worker in self._workers}

    def _recover_from(self, error: Exception, *, void: bool) -> None:
        """Recover from a loss, or raise the error; store it if the state is void."""
        if isinstance(error, OneboxError) and not isinstance(error, RECOVERABLE):
            lost = self._losses()  # of workers that others have replaced, which know nothing of this run
            error = lost[min(lost)].with_traceback(None) if lost else error
        if self._snapshots is None or not (isinstance(error, RECOVERABLE) or (void and self._again(error))):
            if void and not cost_nothing(error):
                self.fail(error)
            else:
                self._locate(error)
            raise error
        self._locate(error)
        with self._failing("a recovery"), self._run.recovering():
            self._recover(error, self._snapshots)

    def _again(self, error: Exception) -> bool:
        """Return whether to go back to a snapshot after an operator, as of an update, has failed that made the state
        void: once, as it may fail again."""
        return isinstance(error, OperatorError) and not error.kept and not self._tries and self.ready

    def _recover(self, error: Exception, snapshots: SnapshotScheduler) -> None:
        """Recover the pool, restore the newest snapshot on the workers, and repeat the steps since.

        Raises:
            PoolError: Workers were lost repeatedly, or every copy of some part of the state was.
            OneboxError: There is no plan for the remaining devices.
        """
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
            if not snapshots.recoverable:
                raise PoolError(
                    "the run cannot go on: no snapshot of its state has found room so far; resume from "
                    f"{self._resumable}; the last loss: {error}"
                ) from error
            restart = snapshots.restart()
            try:
                doubtful, self._returned = self._returned, frozenset()
                self._pool.exclude(doubtful)
                healing = self._pool.recover_workers(seen=self._seen)
                self._seen = healing.number
                lost, replaced = lost | set(healing.lost), (replaced | set(healing.replaced)) - set(healing.gone)
                self._check(restart, healing.lost, error)
                plan = self._run.rebuild(restart.snapshot, lost) or plan
                snapshots.wait(_AGAIN_S)
                self._replay(restart)
                self._run.write_changes()
                break
            except RECOVERABLE as again:
                error = again
        snapshots.recovered()
        story = RecoveryRecord(
            at_s=at_s,
            failure=first_line(first),
            lost=tuple(sorted(lost)),
            replaced=tuple(sorted(replaced)),
            gone=tuple(sorted(lost - replaced)),
            plan=plan,
            step=snapshots.steps,
            snapshot_step=restart.step,
            redone=len(restart.replay),
            attempts=attempts,
            seconds=time.monotonic() - start_s,
            exact=self._exact,
        )
        self.recoveries.append(story)
        _LOG.warning("%s", story)

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
            causes = dict.fromkeys(self._pool.why_gone(worker) for worker in sorted(self._pool.gone))
            raise PoolError(
                f"the run cannot go on: {missing.name} after step {restart.step} was kept by worker {had} only, "
                f"and was lost there; resume from {self._resumable}; the last loss: {'; '.join(causes) or error}"
            ) from error

    def _replay(self, restart: RestartPoint[SnapshotLayout | None, StepRequest]) -> None:
        """Repeat steps up to the last update; wait for those that had completed before.

        So a caller that had waited for those steps reads the same state as without the loss.
        """
        running: deque[tuple[StepRequest, list[Future[WorkerReply]]]] = deque()
        for work in restart.replay:
            running.append((work, list(self._run.repeat(work).answers.values())))
            if len(running) > self._in_flight:
                _wait_for(running.popleft()[1])
        self._overlap.end()
        for work, futures in running:
            if work.loss.ended:
                _wait_for(futures)


def _wait_for(futures: Sequence[Future[WorkerReply]]) -> None:
    """Wait for a repeated step; one that fails again, before anybody was told that it had failed, changes nothing."""
    try:
        raise_first(futures)
    except OperatorError as error:
        if not error.kept:
            raise
