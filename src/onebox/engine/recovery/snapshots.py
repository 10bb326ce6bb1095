"""Snapshots of a run, taken and stored by the workers; the client tracks the location of each part.

Every worker copies its part within its own memory when a step has ended, at the cost of a memory copy. Parts that only
one worker has are then sent to a buddy in the background, while steps go on. The snapshot is complete once all of these
have arrived, and only then is the previous one dropped: whenever a worker is lost, one snapshot is complete. If there
is no other worker to send to, the client fetches and keeps the part. Parameters that no step changes are in no
snapshot: a worker that lacks them after a loss gets them from the user's model again.

Surviving replicas cannot continue from their own state without a snapshot: their states may be a step apart, because
several steps are in flight; one may have changed its running statistics in an unfinished step; and an optimizer may
have stopped between two parameters. A copy at the end of a step is consistent, and if it is cheap it is taken every few
steps, so that little is repeated.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from onebox.engine.install.deferred_replies import DeferredReplies, begin_group_formation
from onebox.engine.recovery.snapshot_fetch import SnapshotFetch
from onebox.engine.state.moves import CLIENT, WorkerStateSpec
from onebox.engine.state.remote import RemoteState
from onebox.engine.state.snapshot_layout import (
    BuddyTransfer,
    SnapshotLayout,
    SnapshotLocation,
    behind_runs,
    find_buddies,
    join_runs,
)
from onebox.errors import PeerLost
from onebox.pool import Pool, WorkerReply, raise_first
from onebox.wire.protocol.instructions import Ask
from onebox.wire.protocol.responses import FilledSlots, SnapshotContents
from onebox.wire.protocol.snapshots import Drop, Extent, Give, Snapshot, Take

_LOOK_S = 0.002
"""Polling interval while nothing else is to be done."""


@dataclass(kw_only=True)
class _Taking:
    """A snapshot under way.

    Args:
        slot: The slot of each worker's copy.
        over_s: Seconds over which transfers are spread.
        parts: Part of each worker.
        asked: Their replies.
        copies: The resulting snapshot, once all have copied.
        awaited: Slots of each worker that are not filled yet.
        carried: Replies of the senders.
        polled: Replies to the polls for filled slots.
        fetches: Downloads to the client.
    """

    slot: int
    over_s: float
    parts: Mapping[int, WorkerStateSpec]
    asked: Mapping[int, Future[WorkerReply]]
    copies: SnapshotLayout | None = None
    awaited: dict[int, set[int]] = field(default_factory=dict)
    carried: list[Future[WorkerReply]] = field(default_factory=list)
    polled: dict[int, Future[WorkerReply]] = field(default_factory=dict)
    fetches: list[SnapshotFetch] = field(default_factory=list)


class SnapshotCoordinator:
    """The snapshots of a run.

    Args:
        pool: The pool.
        remote: The remote state.
    """

    def __init__(self, pool: Pool, remote: RemoteState) -> None:
        self._pool = pool
        self._remote = remote
        self._sendings: dict[int, BuddyTransfer] = {}
        self._groups: dict[int, int] = {}  # by sender, with its buddy
        self._forming: list[DeferredReplies] = []
        self._taking: _Taking | None = None
        self._slots: set[tuple[int, int]] = set()  # obsolete slots

    @property
    def busy(self) -> bool:
        """True if a snapshot is under way."""
        return self._taking is not None

    @property
    def sending(self) -> bool:
        """True if a transfer between workers is under way."""
        return self._taking is not None and self._taking.copies is not None

    def form(self, *, reachable: bool, wait: bool = True) -> None:
        """Determine the senders and receivers, after the state has been uploaded to the workers.

        Args:
            reachable: Whether workers can connect to each other; unknown if gradients are averaged at the client.
            wait: Whether to wait until the groups are formed; else a failure is reported with the next snapshot.

        Raises:
            OneboxError: A worker was lost.
        """
        self._leave()
        holdings = self._remote.holdings
        idle = [worker for worker in self._pool.present if worker not in holdings.devices]
        hosts = {device.number: device.host for device in self._pool.devices}
        groups = {n: found for n, found in holdings.replica_groups.items() if n not in self._remote.constant}
        sizes = {name: self._remote.named.spec(name).size_bytes for name in groups}
        workers = [*holdings.devices, *idle]
        self._sendings = find_buddies(groups, sizes, workers, hosts, owners=holdings.owners, reachable=reachable)
        between = {worker: sending for worker, sending in self._sendings.items() if sending.buddy != CLIENT}
        for worker, sending in between.items():
            self._groups[worker] = group = self._pool.new_number()
            members = (worker, sending.buddy)
            self._forming.append(begin_group_formation(self._pool, members, "workers", group, aside=True))
        self._drop(self._slots)
        self._slots = set()
        if wait:
            self._formed()

    def _formed(self) -> None:
        """Wait until the groups are formed."""
        while self._forming:
            self._forming.pop().take()

    def ask(self, over_s: float = 0.0) -> Mapping[int, Future[WorkerReply]]:
        """Request a snapshot of the state after all earlier requests.

        Args:
            over_s: Seconds over which transfers are spread.

        Returns:
            The pending reply of each worker after copying its part.

        Raises:
            OneboxError: The pool is broken.
        """
        slot, parts = self._pool.new_number(), self._remote.parts(constant=False)
        self._slots |= {(worker, slot) for worker in parts}
        asked = {}
        for worker, part in parts.items():
            numbers = tuple(map(self._remote.number_of, part.tensors))
            snapshot = Snapshot(slot, numbers, self._remote.optimizer_number if part.trained else 0)
            asked[worker] = self._pool.post(worker, [snapshot], answer=True)
        self._taking = _Taking(slot=slot, over_s=over_s, parts=parts, asked=asked)
        return asked

    def look(self) -> SnapshotLayout | None:
        """Process received replies; return the snapshot if it is complete.

        Raises:
            OneboxError: Something failed on a worker.
        """
        taking = self._taking
        if taking is None:
            return None
        raise_first([future for future in (*taking.asked.values(), *taking.carried) if future.done()])
        if taking.copies is None:
            if not all(future.done() for future in taking.asked.values()):
                return None
            taking.copies = self._send(taking)
        for fetch in taking.fetches:
            fetch.look()
        if (taking.awaited and not self._have_come(taking)) or not all(fetch.whole for fetch in taking.fetches):
            return None
        self._taking = None
        self._slots -= taking.copies.slots
        return taking.copies

    def wait(self, timeout_s: float) -> SnapshotLayout | None:
        """Wait until the snapshot under way is complete, with a timeout, and return it.

        Raises:
            OneboxError: Something failed on a worker.
        """
        end_s = time.monotonic() + timeout_s
        while (found := self.look()) is None and self.busy and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        return found

    def give_up(self) -> None:
        """Abandon the snapshot under way, after a loss."""
        self._taking = None

    def drop(self, copies: SnapshotLayout) -> None:
        """Drop a snapshot on the workers that has been replaced.

        Raises:
            OneboxError: The pool is broken.
        """
        self._drop(copies.slots, again=True)

    def close(self, copies: SnapshotLayout | None) -> None:
        """Drop everything on the workers.

        Raises:
            OneboxError: The pool is broken.
        """
        self._leave()
        self._drop(self._slots | (copies.slots if copies else set()))

    # ---- sending

    def _send(self, taking: _Taking) -> SnapshotLayout:
        """Begin the transfers of parts that only one worker has; return the resulting snapshot."""
        self._formed()
        copies = SnapshotLayout(placements=dict(self._remote.holdings.placements))
        for worker, part in taking.parts.items():
            (kept,) = taking.asked[worker].result().results
            assert isinstance(kept, SnapshotContents)
            starts = copies.take(worker, taking.slot, part, kept)
            sending = self._sendings.get(worker)
            runs = join_runs(starts, copies.specs, sending.has) if sending else []
            if sending is None or not runs:
                continue
            slot = self._pool.new_number()
            if sending.buddy == CLIENT:
                taking.fetches.append(SnapshotFetch(self._pool, worker, taking.slot, runs, taking.over_s))
                copies.here[slot] = taking.fetches[-1].buffer
            else:
                self._carry(taking, worker, sending.buddy, slot, runs)
            for item, start in behind_runs(starts, runs, sending.has).items():
                copies.add(item, SnapshotLocation(sending.buddy, slot, start))
        return copies

    def _carry(self, taking: _Taking, worker: int, buddy: int, slot: int, runs: Sequence[Extent]) -> None:
        """Have a worker send parts of its slot to another one."""
        group = self._groups[worker]
        self._slots.add((buddy, slot))
        take = Take(slot, tuple(size for _, size in runs), group, 0)
        give = Give(taking.slot, tuple(runs), group, 1, taking.over_s)
        taking.carried += [
            self._pool.post(buddy, [take], answer=True),
            self._pool.post(worker, [give], answer=True),
        ]
        taking.awaited.setdefault(buddy, set()).add(slot)
        taking.awaited.setdefault(worker, set())  # polled as well: its reply says why it cannot send

    def _have_come(self, taking: _Taking) -> bool:
        """Return whether all transfers have arrived; poll again if unknown."""
        if not all(future.done() for future in taking.polled.values()):
            return False
        for worker, future in taking.polled.items():
            (slots,) = future.result().results
            assert isinstance(slots, FilledSlots)
            if slots.failure:
                self._cannot(worker, slots.failure)
            taking.awaited[worker] -= set(slots.filled)
        taking.polled = {}
        if not any(taking.awaited.values()):
            return True
        for worker, slots_of in taking.awaited.items():
            own = {taking.slot} if worker in taking.parts else set()
            taking.polled[worker] = self._pool.post(worker, [Ask("slots", (*own, *slots_of))], answer=True)
        return False

    def _cannot(self, worker: int, failure: str) -> None:
        device = self._pool.devices[worker]
        raise PeerLost(
            f"worker {worker} ({device.device} on {device.host}) and the one with which it keeps snapshots lost each "
            f"other: {failure}",
            worker=worker,
            host=device.host,
            device=device.device,
        )

    def _leave(self) -> None:
        """Leave the groups of the transfers."""
        for worker, group in self._groups.items():
            self._pool.leave_group(group, (worker, self._sendings[worker].buddy))
        self._groups, self._forming = {}, []

    def _drop(self, slots: set[tuple[int, int]], *, again: bool = False) -> None:
        of: dict[int, list[int]] = {}
        for worker, slot in slots:
            of.setdefault(worker, []).append(slot)
        for worker, numbers in of.items():
            if worker not in self._pool.gone:
                self._pool.post(worker, [Drop(tuple(sorted(numbers)), again)])
