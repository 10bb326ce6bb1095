"""The guard of a run: it lets workers take snapshots, keeps the steps since, and after a loss lets the run go on."""

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
"""What a run can go on after."""

_ATTEMPTS = 5
"""How often workers may be lost until another step has ended."""

_KEPT_BYTES = 1 << 30
"""A snapshot is due when batches of so many bytes have been kept since the last one."""

_SPREAD = 0.5
"""The part of the time between two snapshots over which one is sent to where it is kept."""

_PATIENCE_S = 1800.0
"""How long a snapshot may take that has to be waited for."""

_AGAIN_S = 2.0
"""How long a recovery waits until what it has brought back is kept by several workers, as it was before the loss."""

_LOG = logging.getLogger("onebox")


class RecoverableRun(Protocol):
    """What a guard asks of the run that it keeps."""

    saved: Path | None
    """The last checkpoint."""
    overlap: OverlapScheduler
    """What is left of a step."""

    def rebuild(self, copies: SnapshotLayout | None) -> str | None:
        """Bring a state to the workers and get ready for steps; return the new plan where one was needed.

        Raises:
            OneboxError: A worker was lost, or there is no plan for those that are left.
        """

    def launch(self, work: StepRequest) -> Mapping[int, Future[WorkerReply]]:
        """Begin a step; return what each worker will answer."""


class RecoveryManager:
    """Keeps what a run needs to go on.

    Args:
        pool: The pool.
        remote: The state on the workers.
        run: The run.
        every: Steps between snapshots; ``None`` for as many as keep their cost low.
        in_flight: Steps that may be under way at once.
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
        remote.keep_first = True

    # ---- while all goes well

    def begin(self, step: int) -> None:
        """Take note that the user's model is the state after so many steps; only the first call does."""
        if self._history is None:
            self._history = StepHistory(step, None, limit_bytes=_KEPT_BYTES)

    def ready(self, *, reachable: bool) -> None:
        """Ask for a snapshot of what has just been brought to the workers; wait for it if it is the first.

        From then on the user's model is not needed any more.

        Args:
            reachable: Whether workers reach each other.

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
        """Let what has just been brought to the workers be kept; what cannot be is closed.

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
        """Take note that the state is spread in another way now; the newest snapshot still counts.

        Args:
            reachable: Whether workers reach each other.

        Raises:
            OneboxError: A worker was lost.
        """
        self._give_up()
        self._snapshots.form(reachable=reachable, wait=False)

    def record(self, work: StepRequest) -> None:
        """Take note of a step that is about to begin."""
        self._begun().begin(work, work.size_bytes)

    def posted(self, answers: Mapping[int, Future[WorkerReply]]) -> None:
        """Take note that a step has begun, and ask for a snapshot behind it if one is due.

        It waits where the snapshot under way is far behind.

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
        """Take note that a step has ended well."""
        if step > self._furthest:
            self._furthest, self._tries = step, 0

    def close(self) -> None:
        """Let the workers forget all snapshots.

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
        """Take in what has come."""
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
        """Wait for the snapshot under way, for so long at most."""
        self._arrive(self._snapshots.wait(timeout_s))

    def _arrive(self, copies: SnapshotLayout | None) -> None:
        """Let a snapshot take the place of the one before."""
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
        """Forget the snapshot under way."""
        self._snapshots.give_up()
        self._begun().give_up()
        self.cadence.pass_over()
        self._cost_s = 0.0

    # ---- after a loss

    def recover(self, error: Exception) -> RecoveryRecord:
        """Heal the pool, bring the newest snapshot back to the workers, and do the steps since again.

        Raises:
            PoolError: Workers were lost again and again, or all that kept some part of the state.
            OneboxError: The error itself, where it is no loss; or there is no plan for the devices that are left.
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
        """Require that what is left has every part of the snapshot."""
        copies = restart.snapshot
        if copies is None or not self._pool.present:  # where nobody is left, the run says so
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
        """Do steps again, to the last update of them; wait for those that had ended before.

        Whoever reads the state, and had waited for the steps before the loss, reads it as he would have without one.
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
