"""Snapshots of a run: taken by the workers, kept by the workers; the client knows where each part lies.

Every worker copies its part in its own memory when a step has ended, which costs a memory copy. What only it has is
then sent to a buddy in the background, while steps go on. The snapshot counts once all of that has come, and only then
is the one before it dropped: whenever a worker is lost, one snapshot is whole. Only where a worker has no other one to
send to does the client fetch and keep its part.

Could replicas that survive go on from what they hold, without a snapshot? Their states may be a step apart, because
several steps are under way at once; one may have changed its running statistics in a step that it could not finish; and
nothing tells whether an optimizer was stopped between two parameters. A copy at the end of a step has none of these
doubts, and where it costs little it is taken every few steps, so that little is done again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from onebox.engine.install.deferred_replies import DeferredReplies, begin_group_formation
from onebox.engine.recovery.snapshot_fetch import SnapshotFetch
from onebox.engine.state.remote import RemoteState
from onebox.engine.state.snapshot_layout import (
    CLIENT,
    BuddyTransfer,
    SnapshotLayout,
    SnapshotLocation,
    WorkerStateSpec,
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
"""How often to look for what comes while nothing else is to be done."""


@dataclass(kw_only=True)
class _Taking:
    """A snapshot under way.

    Args:
        slot: The slot that each worker copies its part to.
        over_s: Over how many seconds to spread what is sent.
        parts: What each worker copies.
        asked: Their answers.
        copies: What it will be, once all have copied.
        awaited: Slots that are not filled yet, of each worker.
        carried: Answers of those who carry.
        polled: Answers to the question which slots are filled.
        fetches: What the client fetches.
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
        remote: The state on the workers.
    """

    def __init__(self, pool: Pool, remote: RemoteState) -> None:
        self._pool = pool
        self._remote = remote
        self._sendings: dict[int, BuddyTransfer] = {}
        self._groups: dict[int, int] = {}  # of each worker that sends, with its buddy
        self._forming: list[DeferredReplies] = []
        self._taking: _Taking | None = None
        self._slots: set[tuple[int, int]] = set()  # that are of no use any more

    @property
    def busy(self) -> bool:
        """Whether a snapshot is under way."""
        return self._taking is not None

    @property
    def sending(self) -> bool:
        """Whether something is sent from worker to worker now."""
        return self._taking is not None and self._taking.copies is not None

    def form(self, *, reachable: bool, wait: bool = True) -> None:
        """Find out who sends what to whom, now that the state has been brought to the workers.

        Args:
            reachable: Whether workers reach each other; where sums are made at the client that is not known.
            wait: Whether to wait until they can; else what fails is told of with the next snapshot.

        Raises:
            OneboxError: A worker was lost.
        """
        self._leave()
        holdings = self._remote.holdings
        idle = [worker for worker in self._pool.present if worker not in holdings.devices]
        hosts = {device.number: device.host for device in self._pool.devices}
        sizes = {name: self._remote.named.spec(name).size_bytes for name in holdings.replica_groups}
        workers = [*holdings.devices, *idle]
        self._sendings = find_buddies(
            holdings.replica_groups, sizes, workers, hosts, owners=holdings.owners, reachable=reachable
        )
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
        """Wait until workers can send to each other."""
        while self._forming:
            self._forming.pop().take()

    def ask(self, over_s: float = 0.0) -> Mapping[int, Future[WorkerReply]]:
        """Ask for a snapshot of the state as it is when all that has been asked for before is done.

        Args:
            over_s: Over how many seconds to spread what is sent.

        Returns:
            What each worker will answer when it has copied its part.

        Raises:
            OneboxError: The pool is broken.
        """
        slot, parts = self._pool.new_number(), self._remote.parts()
        self._slots |= {(worker, slot) for worker in parts}
        asked = {}
        for worker, part in parts.items():
            numbers = tuple(map(self._remote.number_of, part.tensors))
            snapshot = Snapshot(slot, numbers, self._remote.optimizer_number if part.trained else 0)
            asked[worker] = self._pool.post(worker, [snapshot], answer=True)
        self._taking = _Taking(slot=slot, over_s=over_s, parts=parts, asked=asked)
        return asked

    def look(self) -> SnapshotLayout | None:
        """Take in what has come; return the snapshot if it is whole now.

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
        """Wait until the snapshot under way is whole, for so long at most, and return it.

        Raises:
            OneboxError: Something failed on a worker.
        """
        end_s = time.monotonic() + timeout_s
        while (found := self.look()) is None and self.busy and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        return found

    def give_up(self) -> None:
        """Forget the snapshot under way, after a loss."""
        self._taking = None

    def drop(self, copies: SnapshotLayout) -> None:
        """Let the workers forget a snapshot in whose place there is another one.

        Raises:
            OneboxError: The pool is broken.
        """
        self._drop(copies.slots, again=True)

    def close(self, copies: SnapshotLayout | None) -> None:
        """Let the workers forget everything.

        Raises:
            OneboxError: The pool is broken.
        """
        self._leave()
        self._drop(self._slots | (copies.slots if copies else set()))

    # ---- sending

    def _send(self, taking: _Taking) -> SnapshotLayout:
        """Let what only one worker has be sent to another; return what the snapshot will be."""
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
        """Let a worker send parts of its slot to another one."""
        group = self._groups[worker]
        self._slots.add((buddy, slot))
        take = Take(slot, tuple(size for _, size in runs), group, 0)
        give = Give(taking.slot, tuple(runs), group, 1, taking.over_s)
        taking.carried += [
            self._pool.post(buddy, [take], answer=True),
            self._pool.post(worker, [give], answer=True),
        ]
        taking.awaited.setdefault(buddy, set()).add(slot)
        taking.awaited.setdefault(worker, set())  # asked, too: it says why it cannot send

    def _have_come(self, taking: _Taking) -> bool:
        """Tell whether all that is sent has come; ask again where it is not known."""
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
        """Leave the groups by which snapshots are sent."""
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
