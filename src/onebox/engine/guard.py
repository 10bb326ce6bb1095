"""The guard of a run: it keeps snapshots and the steps since, and after a loss lets the run go on from them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Protocol

from onebox.engine.batch import Batch
from onebox.engine.history import Cadence, History, Recovery, Restart
from onebox.engine.launch import Work
from onebox.engine.reading import Reading, State
from onebox.engine.remote import RemoteState
from onebox.errors import PeerLost, PoolError, WorkerDied, WorkerHung
from onebox.pool import Answer, Pool, raise_first

LOSSES = (WorkerDied, WorkerHung, PeerLost)
"""What a run can go on after."""

_ATTEMPTS = 5
"""How often workers may be lost until another step has ended."""

_KEPT_BYTES = 256 << 20
"""Batches of so many bytes are kept whatever the size of the state."""

_LOG = logging.getLogger("onebox")


class Run(Protocol):
    """What a guard asks of the run that it keeps."""

    def rebuild(self, state: State) -> str | None:
        """Bring a state to the workers and get ready for steps; return the new plan where one was needed.

        Raises:
            OneboxError: A worker was lost, or there is no plan for those that are left.
        """

    def launch(self, work: Work) -> Mapping[int, Future[Answer]]:
        """Begin a step; return what each worker will answer."""


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """A snapshot as the workers answered it, or will.

    Args:
        reading: How it is put together.
        futures: The answers.
    """

    reading: Reading
    futures: Mapping[int, Future[Answer]]

    def state(self) -> State:
        """Put it together."""
        return self.reading.read({worker: future.result() for worker, future in self.futures.items()})


class Guard:
    """Keeps what a run needs to go on.

    Args:
        pool: The pool.
        remote: The state on the workers.
        run: The run.
        every: Steps between snapshots; ``None`` for as many as keep their cost low.
        in_flight: Steps that may be under way at once.
    """

    def __init__(self, pool: Pool, remote: RemoteState, run: Run, *, every: int | None, in_flight: int) -> None:
        self.recoveries: list[Recovery] = []
        self.cadence = Cadence(every)
        self._pool = pool
        self._remote = remote
        self._run = run
        self._in_flight = in_flight
        self._history: History[State | _Taken, Work] | None = None
        self._taking: _Taken | None = None
        self._times: deque[tuple[str, int, float]] = deque()
        self._last_s: dict[int, float] = {}
        self._cost_s = 0.0
        self._asking_s = 0.0
        self._tries = 0
        self._furthest = -1

    # ---- while all goes well

    def begin(self, step: int) -> None:
        """Keep the state before anything is on the workers; only the first call does."""
        if self._history is None:
            state = self._remote.here()
            self._history = History(step, state, limit_bytes=max(_KEPT_BYTES, 2 * state.size_bytes))

    def keep(self, batch: Batch) -> Batch:
        """Return a batch that stays as it is when the user writes to its tensors."""
        return dataclasses.replace(batch, leaves=tuple(leaf.clone() for leaf in batch.leaves))

    def record(self, work: Work) -> None:
        """Take note of a step that is about to begin; wait where the snapshot under way is far behind."""
        history = self._begun()
        self._look()
        if self._taking is not None and history.must_wait(self.cadence.every):
            wait(self._taking.futures.values())
            self._look()
        history.begin(work, work.size_bytes)

    def posted(self, answers: Mapping[int, Future[Answer]]) -> None:
        """Take note that a step has begun, and ask for a snapshot behind it if one is due.

        Raises:
            OneboxError: The pool is broken.
        """
        for worker, future in answers.items():
            future.add_done_callback(functools.partial(self._ended, "step", worker))
        self._look()
        history = self._begun()
        if not history.due(self.cadence.every):
            return
        start_s = time.monotonic()
        reading = self._remote.reading()
        futures = {worker: self._pool.post(worker, asks, answer=True) for worker, asks in reading.questions().items()}
        for worker, future in futures.items():
            future.add_done_callback(functools.partial(self._ended, "snapshot", worker))
        self._taking = _Taken(reading=reading, futures=futures)
        self._cost_s, self._asking_s = 0.0, time.monotonic() - start_s
        history.ask()

    def ended(self, step: int) -> None:
        """Take note that a step has ended well."""
        if step > self._furthest:
            self._furthest, self._tries = step, 0

    def _begun(self) -> History[State | _Taken, Work]:
        assert self._history is not None
        return self._history

    def _ended(self, what: str, worker: int, future: Future[Answer]) -> None:
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
                self.cadence.step_took(at_s - before_s)
            self._last_s[worker] = at_s
        taken = self._taking
        if taken is None or not all(future.done() for future in taken.futures.values()):
            return
        self._taking = None
        if any(future.exception() is not None for future in taken.futures.values()):
            self._begun().fail()
        else:
            self._begun().arrive(taken)
            self.cadence.snapshot_took(self._cost_s + self._asking_s)

    # ---- after a loss

    def recover(self, error: Exception) -> Recovery:
        """Heal the pool, bring the newest snapshot to the workers, and do the steps since again.

        Raises:
            PoolError: Workers were lost again and again.
            OneboxError: The error itself, where it is no loss; or there is no plan for the devices that are left.
        """
        if not isinstance(error, LOSSES) or self._history is None:
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
            self._taking = None
            try:
                healing = self._pool.heal()
                lost, replaced = lost | set(healing.lost), (replaced | set(healing.replaced)) - set(healing.gone)
                restart = self._whole()
                plan = self._run.rebuild(restart.snapshot) or plan
                self._replay(restart)
                break
            except LOSSES as again:
                error = again
        story = Recovery(
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

    def _whole(self) -> Restart[State, Work]:
        """Return from where to go on, the snapshot put together."""
        history = self._begun()
        restart = history.restart()
        snapshot = restart.snapshot
        state = snapshot.state() if isinstance(snapshot, _Taken) else snapshot
        history.settle(state)
        return Restart(step=restart.step, snapshot=state, replay=restart.replay)

    def _replay(self, restart: Restart[State, Work]) -> None:
        """Do steps again; wait for those that had ended before."""
        running: deque[tuple[Work, list[Future[Answer]]]] = deque()
        for work in restart.replay:
            running.append((work, list(self._run.launch(work).values())))
            if len(running) > self._in_flight:
                raise_first(running.popleft()[1])
        for work, futures in running:
            if work.loss.ended:
                raise_first(futures)
