"""Schedule of snapshots: requests one when it is due, and keeps the steps since the newest one."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.recovery.policy import MOST_STEPS_APART, RestartPoint, SnapshotCadence, StepHistory
from onebox.engine.recovery.snapshots import SnapshotCoordinator
from onebox.engine.state.remote import RemoteState
from onebox.engine.state.snapshot_layout import SnapshotLayout
from onebox.engine.steps.launch import LaunchedStep, StepRequest
from onebox.engine.steps.observer import StepObserver
from onebox.engine.steps.overlap_scheduler import OverlapScheduler
from onebox.errors import DeviceMemoryError
from onebox.pool import Pool, WorkerReply

_KEPT_BYTES = 1 << 30
"""Bytes of kept batches since the last snapshot after which another one is due."""

_SPREAD = 0.5
"""Fraction of the snapshot interval over which a snapshot's transfer is spread."""

_PATIENCE_S = 1800.0
"""Longest wait for a snapshot."""

_MOST_REFUSED = 16
"""Longest pause after snapshots that found no room, as a multiple of the interval."""

_LOG = logging.getLogger("onebox")


class SnapshotScheduler(StepObserver):
    """Snapshots of a run while steps go on, and the steps since the newest one.

    Args:
        pool: The pool.
        remote: The state on the workers.
        overlap: Overlapping remains of steps, which end before a snapshot.
        step: Number of steps after which the user's model is the state.
        every: Steps between snapshots; ``None`` chooses an interval that keeps their cost low.
    """

    def __init__(
        self, pool: Pool, remote: RemoteState, overlap: OverlapScheduler, *, step: int, every: int | None
    ) -> None:
        self._overlap = overlap
        self._cadence = SnapshotCadence(every)
        self._patience = every or MOST_STEPS_APART
        self._snapshots = SnapshotCoordinator(pool, remote)
        self._history: StepHistory[SnapshotLayout | None, StepRequest] = StepHistory(
            step, None, limit_bytes=_KEPT_BYTES
        )
        self._reachable = True
        self._refused = 0
        self._times: deque[tuple[str, int, float]] = deque()
        self._last_s: dict[int, float] = {}
        self._cost_s = 0.0
        self._asking_s = 0.0

    @property
    def every(self) -> int:
        """Present number of steps between snapshots."""
        return self._cadence.every

    @property
    def steps(self) -> int:
        """Number of steps that the run has begun."""
        return self._history.steps

    @property
    def recoverable(self) -> bool:
        """True if there is a snapshot with all steps since, or the run has just begun."""
        return self._history.complete

    # ---- events

    def installed(self, plan: InstalledPlan) -> None:
        """Request a snapshot of the state just uploaded to the workers; wait for it if it is the first.

        Raises:
            OneboxError: Something failed on a worker.
        """
        self._reachable = plan.plan.sync == "workers"
        self._renew(again=True, wait=self._history.snapshot is None)

    def renew(self) -> None:
        """Replace the newest snapshot by one of the present state.

        Raises:
            OneboxError: Something failed on a worker.
        """
        self._overlap.end()
        self._renew(again=False, wait=True)

    def _renew(self, *, again: bool, wait: bool) -> None:
        self.give_up()
        self._snapshots.form(reachable=self._reachable)
        self._snapshots.ask()
        self._history.ask(again=again)
        if wait:
            self.wait(_PATIENCE_S)
            if self._refused:
                self._forget()

    def replaced(self, before: InstalledPlan, after: InstalledPlan) -> None:
        """Prepare snapshots of the state in its new places; the newest snapshot stays valid.

        Raises:
            OneboxError: A worker was lost.
        """
        self.give_up()
        self._reachable = after.plan.sync == "workers"
        self._snapshots.form(reachable=self._reachable, wait=False)

    def requested(self, work: StepRequest) -> None:
        """Keep a step that is about to begin."""
        self._history.begin(work, work.size_bytes)

    def began(self, step: LaunchedStep) -> None:
        """Request a snapshot after a step if one is due; wait if the snapshot under way is far behind.

        Raises:
            OneboxError: Something failed on a worker, or the pool is broken.
        """
        kind = "beside" if self._snapshots.sending else "step"
        for worker, future in step.answers.items():
            future.add_done_callback(functools.partial(self._note_time, kind, worker))
        self._look()
        if self._history.must_wait(self._patience):
            self.wait(_PATIENCE_S)
        if self._refused and self._history.full:
            self._forget()
        if not self._history.due(self._cadence.every):
            return
        start_s = time.monotonic()
        self._overlap.end()
        for worker, future in self._snapshots.ask(_SPREAD * self._cadence.apart_s).items():
            future.add_done_callback(functools.partial(self._note_time, "snapshot", worker))
        self._cost_s, self._asking_s = 0.0, time.monotonic() - start_s
        self._history.ask()

    def close(self) -> None:
        """Discard all snapshots on the workers.

        Raises:
            OneboxError: The pool is broken.
        """
        self._snapshots.close(self._history.snapshot)

    # ---- recovery

    def restart(self) -> RestartPoint[SnapshotLayout | None, StepRequest]:
        """Abandon the snapshot under way, and return the starting point of a recovery."""
        self.give_up()
        return self._history.restart()

    def recovered(self) -> None:
        """Discard the times of steps before and during a recovery."""
        self._times.clear()
        self._last_s.clear()

    def wait(self, timeout_s: float) -> None:
        """Wait for the snapshot under way, with a timeout.

        Raises:
            OneboxError: Something failed on a worker.
        """
        self._arrive(self._taken(lambda: self._snapshots.wait(timeout_s)))

    def give_up(self) -> None:
        """Abandon the snapshot under way."""
        self._snapshots.give_up()
        self._history.give_up()
        self._cadence.pass_over()
        self._cost_s = 0.0

    # ---- replies

    def _note_time(self, what: str, worker: int, future: Future[WorkerReply]) -> None:
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
                self._cadence.step_took(at_s - before_s, beside=what == "beside")
            self._last_s[worker] = at_s
        self._arrive(self._taken(self._snapshots.look))

    def _taken(self, take: Callable[[], SnapshotLayout | None]) -> SnapshotLayout | None:
        """Return a snapshot that is complete; give up one for which a worker, or this process, has no room.

        Raises:
            OneboxError: Something else failed on a worker.
        """
        try:
            return take()
        except (DeviceMemoryError, MemoryError) as error:
            if isinstance(error, DeviceMemoryError) and error.instruction is not None:
                raise  # of a step, whose results were to be kept
            refusal = str(error).splitlines()[0] or "no memory is left in this process"
        self._snapshots.give_up()
        self._snapshots.form(reachable=self._reachable, wait=False)  # also ends transfers, and frees what they filled
        self._refused += 1
        after = self._cadence.every * min(1 << self._refused, _MOST_REFUSED)
        self._history.put_off(after)
        self._cadence.pass_over()
        self._cost_s = 0.0
        if self._refused == 1:
            step, there = self._history.snapshot_step, self._history.snapshot is not None
            kept = f"the one after step {step} stays" if there else "there is none"
            _LOG.warning(
                "a snapshot of the run found no room and is given up: %s; %s, and the next is tried after %d steps",
                *(refusal, kept, after),
            )
        return None

    def _forget(self) -> None:
        """Give up the newest snapshot and the steps since, which exceed their bound."""
        if not self._history.complete:
            return
        before = self._history.forget()
        if before is not None:
            self._snapshots.drop(before)
        _LOG.warning(
            "the run cannot recover from a loss until a snapshot finds room: give the workers' host more memory, or "
            "save checkpoints often with trainer.save(folder)"
        )

    def _arrive(self, copies: SnapshotLayout | None) -> None:
        """Replace the previous snapshot by the one that has arrived."""
        if copies is None:
            return
        if self._refused:
            _LOG.warning("a snapshot of the run has found room again, after %d that had not", self._refused)
        self._refused = 0
        before = self._history.arrive(copies)
        if before is not None:
            self._snapshots.drop(before)
        if self._cost_s:
            self._cadence.snapshot_took(self._cost_s + self._asking_s)
        else:
            self._cadence.pass_over()
        self._cost_s = 0.0
