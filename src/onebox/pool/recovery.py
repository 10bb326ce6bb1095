"""Recovery of a pool: lost workers are ended and restarted, and the survivors leave the groups that they waited in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from onebox.errors import OneboxError, PoolError, WorkerHung
from onebox.pool.backends.base import WorkerHandle
from onebox.pool.client.connection import WorkerReply
from onebox.pool.client.loop import ClientLoop
from onebox.pool.devices import DeviceInfo, welcome
from onebox.wire.protocol.groups import LeaveGroup
from onebox.wire.protocol.instructions import Ask

PATIENCE_S = 30.0
"""How long a survivor may make no progress with its work from before the loss."""

_AGAIN_S = 0.25
"""Interval at which a survivor is interrupted again: it may just have begun to wait."""

_STILL_S = 3.0
"""Time without progress after which a survivor's waits in all its groups are interrupted."""

_ROUNDS = 6
"""How often workers may be lost again during a recovery."""

_STARTS = 2
"""Failed starts after which a worker is given up."""


@dataclass(frozen=True, kw_only=True)
class RecoveryReport:
    """The result of one or several recoveries.

    Args:
        number: Number of recoveries of the pool so far.
        lost: Error of each lost worker, by number.
        replaced: The workers that were restarted.
        gone: The workers that could not be restarted.
    """

    number: int
    lost: Mapping[int, OneboxError]
    replaced: tuple[int, ...]
    gone: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RecoveredWorkers:
    """The workers after a recovery that were lost before it.

    Args:
        gone: Those that could not be restarted.
        devices: Devices of the others.
    """

    gone: tuple[int, ...]
    devices: Mapping[int, DeviceInfo]


class _Recovery:
    """State of one recovery.

    Args:
        client_loop: The pool's client loop.
        handles: The workers' handles, by number; replaced in place.
        replace: Function that restarts a worker; returns ``None`` where that is impossible.
        note: Called with each lost worker and its error, before anything else can be posted.
    """

    def __init__(
        self,
        client_loop: ClientLoop,
        handles: list[WorkerHandle],
        replace: Callable[[int], tuple[WorkerHandle, str] | None],
        note: Callable[[int, OneboxError], None],
    ) -> None:
        self._client_loop = client_loop
        self._handles = handles
        self._replace = replace
        self._note = note
        self._starts: dict[int, int] = {}
        self.lost: dict[int, OneboxError] = {}
        self.devices: dict[int, DeviceInfo] = {}
        self.gone: dict[int, OneboxError] = {}
        self.missing: set[int] = set()
        self.groups: set[int] = set()
        self.deserted: set[int] = set()
        """Members of groups that have lost one."""

    def drop(self) -> None:
        """Drop all lost workers."""
        for worker, error in list(self._client_loop.lost.items()):
            self._note(worker, self.lost.setdefault(worker, error))
            for group, members in self._client_loop.drop(worker).items():
                self.groups.add(group)
                self.deserted.update(members)
            self._handles[worker].close(grace_s=0.0)
            self.devices.pop(worker, None)
            self.missing.add(worker)

    def start(self) -> None:
        """Restart all missing workers at once."""
        started: dict[int, tuple[WorkerHandle, str]] = {}
        for worker in sorted(self.missing):
            self._starts[worker] = self._starts.get(worker, 0) + 1
            try:
                made = self._replace(worker) if self._starts[worker] <= _STARTS else None
            except OneboxError as error:
                first = str(self.lost[worker]).partition("\n")[0]
                made, self.lost[worker] = None, PoolError(f"{first}; no other worker in its place: {error}")
            if made is None:
                self.gone[worker] = self.lost[worker]
                self._client_loop.miss(worker, self.lost[worker])
            else:
                started[worker] = made
                self._handles[worker] = made[0]
        self.missing.clear()
        for worker, (handle, key) in started.items():
            try:
                hello = self._client_loop.connect(handle, key)
                self.devices[worker] = welcome(handle, hello)
            except OneboxError:
                if worker not in self._client_loop.lost:  # a worker that was never connected, or did not say hello
                    with contextlib.suppress(KeyError):
                        self._client_loop.drop(worker)
                    handle.close(grace_s=0.0)
                    self.missing.add(worker)

    def settle(self, survivors: Sequence[int], patience_s: float) -> None:
        """Let workers leave dissolved groups, and wait until each has finished its earlier work.

        A survivor that makes progress is waited for: a step may be long, and its state may exist nowhere else. Of other
        fault domains only those are waited for, and interrupted in these groups alone, that were in one with a lost
        worker.

        Raises:
            OneboxError: A worker was lost during the wait.
        """
        leave = [LeaveGroup(group) for group in sorted(self.groups)]
        asked: dict[int, Future[WorkerReply]] = {}
        affected = {worker for worker in survivors if self._client_loop.affected(worker, self.lost)}
        for worker in survivors:
            if worker not in affected and worker not in self.deserted:
                continue
            asked[worker] = self._client_loop.post(worker, [*leave, Ask("memory")], answer=True)
        late = wait(asked.values(), timeout=0).not_done
        known: dict[int, int | None] = {}
        since_s: dict[int, float] = {}
        while late:
            now_s = time.monotonic()
            for worker in asked:
                if worker not in known or known[worker] != self._client_loop.executed.get(worker):
                    known[worker], since_s[worker] = self._client_loop.executed.get(worker), now_s
            waiting = [worker for worker, future in asked.items() if future in late]
            left_s = max(since_s[worker] for worker in waiting) + patience_s - now_s
            if left_s <= 0:
                break
            for worker in waiting:  # the peer that it waits for may have missed a message: the loss came in between
                if worker in affected and now_s - since_s[worker] > _STILL_S:
                    own = self._client_loop.groups_of(worker)
                    self._client_loop.dissolve(own)
                    self.groups.update(own)
            for worker in waiting if self.groups else ():
                self._client_loop.interrupt(worker, sorted(self.groups))
            late = wait(late, timeout=min(left_s, _AGAIN_S)).not_done
        for worker, future in asked.items():
            if future in late:
                place = self._handles[worker].place
                what = f"{place} made no progress for {patience_s:.0f} s with what it had been given before a loss"
                error = WorkerHung(what, worker=worker, host=place.host, device=place.device)
                self._client_loop.give_up(worker, error)
        for future in asked.values():
            future.result(patience_s)


def recover_workers(
    client_loop: ClientLoop,
    handles: list[WorkerHandle],
    replace: Callable[[int], tuple[WorkerHandle, str] | None],
    note: Callable[[int, OneboxError], None],
    *,
    present: Sequence[int],
    patience_s: float,
) -> RecoveredWorkers:
    """Recover a pool; see :meth:`Pool.recover_workers`.

    Args:
        client_loop: The pool's client loop.
        handles: The workers' handles, by number; replaced in place.
        replace: Function that restarts a worker; returns ``None`` where that is impossible.
        note: Called with each lost worker and its error, before anything else can be posted.
        present: The workers that were not given up before.
        patience_s: How long a survivor may make no progress with its earlier work.

    Raises:
        OneboxError: The pool is closed or broken in another way, or workers are lost repeatedly.
    """
    recovery = _Recovery(client_loop, handles, replace, note)
    last: OneboxError | None = None
    for _ in range(_ROUNDS):
        recovery.drop()
        if not client_loop.mend():
            continue
        recovery.start()
        try:
            if recovery.missing or not client_loop.mend():
                continue
            recovery.settle([worker for worker in present if worker not in recovery.gone], patience_s)
        except OneboxError as error:
            last = error
            continue
        return RecoveredWorkers(gone=tuple(sorted(recovery.gone)), devices=recovery.devices)
    raise PoolError(f"workers were lost {_ROUNDS} times during the pool's recovery; the last loss: {last}") from last
