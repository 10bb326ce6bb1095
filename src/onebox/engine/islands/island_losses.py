"""Supervisor of a run of islands: after the loss of a worker its island leaves, and the others go on."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

from onebox.cost import DeviceGroups
from onebox.engine.islands.membership import ChangeKind, IslandChange, Membership
from onebox.engine.recovery.policy import RecoveryRecord
from onebox.engine.recovery.supervisor import RECOVERABLE, Supervisor, first_line
from onebox.errors import OneboxError, PoolError
from onebox.pool import Pool

_ATTEMPTS = 5
"""Most failures in a row in which no worker is lost, before another outer step has ended."""

_LOG = logging.getLogger("onebox")

_T = TypeVar("_T")


class IslandLosses(Supervisor):
    """The losses of a run of islands.

    Args:
        pool: The pool, whose fault domains are the islands if losses are survived.
        islands: Devices of each island.
        membership: The islands that take part.
        survived: Whether a run goes on without an island that has lost a worker; else the first loss is final.
        vacate: Drops all that an island has on its workers.
        locate: Adds the location in the step to an error.
        divided: Returns the number of steps whose batches have been divided among the islands.
        saved: Path of the latest checkpoint.
    """

    def __init__(
        self,
        pool: Pool,
        islands: DeviceGroups,
        membership: Membership,
        *,
        survived: bool,
        vacate: Callable[[int, Collection[int]], None],
        locate: Callable[[Exception], None],
        divided: Callable[[], int],
        saved: Path | None,
    ) -> None:
        super().__init__(pool, locate, saved)
        self.survived = survived
        self.recoveries: tuple[RecoveryRecord, ...] = ()
        """None: no step is repeated."""
        self.changes: list[IslandChange] = []
        self._islands = islands
        self._membership = membership
        self._vacate = vacate
        self._divided = divided
        self._seen = pool.recoveries
        self._tries = 0
        self._new: set[int] = set()
        """Islands that have joined since the last outer step."""
        if survived:
            pool.isolate(islands)

    # ---- the way in

    def run(self, action: Callable[[], _T]) -> _T:
        """Perform an action, and again after each loss.

        Raises:
            OneboxError: It failed, or no island is left.
        """
        while True:
            try:
                self._require_workers()
                return action()
            except Exception as error:
                self._locate(error)
                if not self.survived or not isinstance(error, RECOVERABLE):
                    raise
                self.lose(error)

    @contextlib.contextmanager
    def voiding(self, what: str) -> Iterator[None]:
        """Make the state void if a part of the context fails for another reason than a loss that is survived, or is
        interrupted.

        Args:
            what: Description of the context.
        """
        with self._failing(what, unless=RECOVERABLE if self.survived else ()):
            yield

    # ---- after a loss

    def _require_workers(self) -> None:
        """Require that no other trainer has recovered the pool from the loss of a worker of these islands.

        Raises:
            OneboxError: A worker was lost.
        """
        lost = self._pool.losses(self._seen) if self._pool.recoveries != self._seen else {}
        mine = self._membership.losing(lost, self._islands)
        if mine:
            raise lost[min(worker for worker in lost if worker in self._islands[mine[0]])].with_traceback(None)

    def lose(self, error: Exception, island: int | None = None) -> None:
        """Go on without the islands that have lost a worker.

        Args:
            error: The loss.
            island: The island whose steps failed; ``None`` for an exchange of several.

        Raises:
            OneboxError: No island is left, losses are not survived, or exchanges fail again and again.
        """
        if not self.survived or not isinstance(error, RECOVERABLE):
            self.fail(error)
            raise error
        start_s, at_s = time.monotonic(), time.time()
        with self._failing("a recovery"):
            lost = self._recover(error, island)
        leaving = sorted({*lost, *([] if island is None else [island])})
        for each in leaving:
            self._new.discard(each)
            cause, workers = lost.get(each, (error, ()))
            samples = self._membership.leave(each)
            self._vacate(each, workers)
            seconds, about = time.monotonic() - start_s, first_line(cause)
            self._change("left", each, at_s=at_s, samples=samples, cause=about, lost=workers, seconds=seconds)
        if not self._membership.punctual:
            late = " that has the newest global parameters" * bool(self._membership.late)
            last = PoolError(f"no island is left{late}; resume from {self._resumable}; the last loss: {error}")
            self.fail(last)
            raise last from error

    def _recover(self, error: Exception, island: int | None) -> dict[int, tuple[Exception, tuple[int, ...]]]:
        """Recover the pool; return the error and the lost workers of each island that has lost some."""
        pool, membership, losses = self._pool, self._membership, self._pool.losses(self._seen)
        hit = membership.losing({*losses, *pool.lost}, self._islands)
        if island is not None and island not in hit and isinstance(error, OneboxError):
            pool.give_up(self._islands[island][0], error)  # what the others have is void
        if not pool.broken and not losses:
            self._tries += 1
            if self._tries > _ATTEMPTS:
                raise PoolError(
                    f"the islands failed to exchange their parameters {self._tries} times, though no worker was lost; "
                    f"the last failure: {error}"
                ) from error
            doubtful = sorted(device for each in self._new for device in self._islands[each])
            if not doubtful:
                return {}
            pool.exclude(doubtful)  # they may reach the client, but not each other
        report = pool.recover_workers(seen=self._seen)
        self._seen = report.number
        found: dict[int, tuple[Exception, tuple[int, ...]]] = {}
        for each in membership.losing(report.lost, self._islands):
            workers = tuple(sorted(set(self._islands[each]) & report.lost.keys()))
            found[each] = report.lost[workers[0]], workers
        return found

    def exchanged(self) -> None:
        """Record that an outer step has ended."""
        self._tries = 0
        self._new.clear()

    # ---- coming back

    def returning(self) -> tuple[int, ...]:
        """Return the islands that have left and whose workers are all there; hosts that are back are taken back.

        Raises:
            OneboxError: The pool is closed or broken.
        """
        if not self._membership.absent:
            return ()
        if self._pool.returning:
            self._pool.readmit()
        return tuple(each for each in self._membership.absent if self._pool.gone.isdisjoint(self._islands[each]))

    def joined(self, island: int, at_s: float, seconds: float) -> None:
        """Record that an island takes part again."""
        self._membership.join(island)
        self._new.add(island)
        self._change("joined", island, at_s=at_s, seconds=seconds)

    def fell_behind(self, island: int, seconds: float) -> None:
        """Record that an island is late, for which the others have waited so long."""
        self._membership.fall_behind(island)
        self._change("late", island, seconds=seconds)

    def caught_up(self, island: int, at_s: float, seconds: float) -> None:
        """Record that an island is punctual again."""
        self._membership.catch_up(island)
        samples = max(own[island] for own in self._membership.samples)
        self._change("punctual", island, at_s=at_s, seconds=seconds, samples=samples)

    def redone(self, fragment: int, cause: str) -> None:
        """Record that an outer step is void everywhere."""
        self._change("redone", None, fragment=fragment, cause=cause)

    def _change(self, kind: ChangeKind, island: int | None, *, at_s: float | None = None, **more: Any) -> None:
        """Record and log a change."""
        change = IslandChange(
            at_s=time.time() if at_s is None else at_s,
            kind=kind,
            island=island,
            step=self._divided(),
            outer_steps=self._membership.outer_steps,
            **more,
        )
        self.changes.append(change)
        _LOG.warning("%s", change)

    def close(self) -> None:
        """Give up the fault domains."""
        if self.survived:
            self._pool.isolate(())
