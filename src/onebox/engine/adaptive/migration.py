"""Migration: a new plan takes over between two steps, and only relocated state travels, from worker to worker.

A worker executes messages in order. So all instructions of the change come after the last step of the old plan and
before the first of the new one: each holder sends the parts that others need, and a receiver continues until it reads
them. State that stays is not touched, nothing passes through the client, and there is no global barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import NamedTuple

from onebox.engine.install.deferred_replies import DeferredReplies, begin_group_formation
from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.partition.sharding_spec import Members, ShardingSpec
from onebox.engine.partition.weight_versions import WeightVersions
from onebox.engine.state.move_executor import PeerExchange
from onebox.engine.state.moves import ENTRIES, StateLayout, WorkerStateSpec, plan_moves, released
from onebox.engine.state.remote import RemoteState, worker_parts
from onebox.engine.workload.named_state import optimizer_definition
from onebox.errors import UsageError
from onebox.graph.shard.placements import Shard
from onebox.plan import Plan
from onebox.pool import Pool, WorkerReply, raise_first
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Free
from onebox.wire.protocol.requests import Define, Instruction
from onebox.wire.protocol.responses import SnapshotContents
from onebox.wire.protocol.snapshots import Lay, Recall, StateEntry

Remembered = Mapping[str, Sequence[StateEntry]]
"""Optimizer state entries of each parameter."""


@dataclass(frozen=True, kw_only=True)
class MigrationReport:
    """Result of a migration.

    Args:
        names: Number of parameters and buffers that travelled, counted for each receiver.
        size_bytes: Bytes of these and of their optimizer state.
        over: Groups to leave, with their members, once the next step has read the data received through them.
        asked: Pending replies that confirm completion.
    """

    names: int = 0
    size_bytes: int = 0
    over: Mapping[int, Members] = field(default_factory=dict)
    asked: tuple[DeferredReplies, ...] = ()


class Migration:
    """Change from one plan to another, from preparation to execution.

    Args:
        pool: The pool.
        remote: The remote state.
        before: The present installed plan.
        after: The new installed plan.

    Raises:
        UsageError: The new plan splits layers differently.
    """

    def __init__(self, pool: Pool, remote: RemoteState, before: InstalledPlan, after: InstalledPlan) -> None:
        self.before = before
        self.after = after
        self._pool = pool
        self._remote = remote
        _check_placements(before, after)
        self._parts = remote.parts()
        stepped = {worker: after.holdings.stepped_by(worker, after.trained) for worker in after.holdings.devices}
        self._wanted = worker_parts(after.holdings, stepped)
        old, new = _layout(self._parts, before.holdings), _layout(self._wanted, after.holdings)
        sizes = {name: remote.named.spec(name).size_bytes for name in remote.named.tensors}
        moves = plan_moves(old, new, sizes=sizes, hosts={device.number: device.host for device in pool.devices})
        self._tensors = [move for move in moves if move.item.key != ENTRIES]
        self._entries = [move for move in moves if move.item.key == ENTRIES]
        self._released = released(old, new)
        self._told: dict[int, Future[WorkerReply]] = {}
        self._written: _Written | None = None

    def ask(self) -> None:
        """Request the listings of optimizer state that must travel; workers reply when the steps in flight have ended.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        for worker in sorted({move.source for move in self._entries}):
            self._told[worker] = self._pool.post(worker, [Lay(self._remote.optimizer_number)], answer=True)

    def write(self, patience_s: float) -> bool:
        """Prepare the workers' instructions, so that :meth:`make` only has to send them.

        Args:
            patience_s: Longest wait for the listings of optimizer state.

        Returns:
            Whether the listings have arrived and the instructions are prepared.

        Raises:
            OneboxError: A worker failed.
        """
        if wait(self._told.values(), patience_s).not_done:
            return False
        told = self._answers()
        if not any(_counts(entry) for found in told.values() for entries in found.values() for entry in entries):
            self._written = self._write(told)  # scalar entries change with each step
        return True

    def make(self) -> MigrationReport:
        """Execute the change: all later requests run under the new plan.

        Raises:
            OneboxError: A worker was lost, or the pool is broken; some workers may have received their part.
        """
        remote, written = self._remote, self._written
        if written is None or written.branched != remote.branched:
            self.ask()
            written = self._write(self._answers())
        remote.begin_move()
        asked = self.after.form()
        if written.forms:
            asked.append(begin_group_formation(self._pool, written.members, "workers", written.group))
        for worker, instructions in written.instructions.items():
            self._pool.post(worker, instructions)
        remote.settle(self.after.holdings, self.after.trained, self.after.compiler.versions)
        self.after.settled()
        over = self.before.retire(self.after)
        self.after.take_over()
        if written.group and self.after.group_of(written.members) != written.group:
            over[written.group] = written.members
        return MigrationReport(names=len(self._tensors), size_bytes=written.size_bytes, over=over, asked=tuple(asked))

    def _answers(self) -> dict[int, Remembered]:
        """Wait for the listings of optimizer state."""
        raise_first(list(self._told.values()))
        found: dict[int, Remembered] = {}
        for worker, future in self._told.items():
            (kept,) = future.result().results
            assert isinstance(kept, SnapshotContents)
            trained = self._parts[worker].trained
            own: dict[str, list[StateEntry]] = {}
            for entry in kept.entries:
                own.setdefault(trained[entry.parameter], []).append(entry)
            found[worker] = own
        return found

    def _write(self, told: Mapping[int, Remembered]) -> _Written:
        """Return the instructions of the workers, given the listings of their optimizer state."""
        branched = self._remote.branched
        group, members, forms = self._group()
        remembered_bytes = sum(
            entry.value.size_bytes
            for move in self._entries
            for entry in told[move.source].get(move.item.name, ())
            if isinstance(entry.value, TensorSpec)
        )
        tensor_bytes = sum(self._spec(move.target, move.item.name).size_bytes for move in self._tensors)
        exchange = PeerExchange(group=group, members=members)
        instructions = self._instructions(told, exchange, self._remote.versions if branched else WeightVersions())
        return _Written(group, members, forms, instructions, tensor_bytes + remembered_bytes, branched)

    def _group(self) -> tuple[int, Members, bool]:
        """Return a group of all senders and receivers, its members, and whether it is formed for the migration only."""
        involved = {worker for move in (*self._tensors, *self._entries) for worker in (move.source, move.target)}
        if not involved:
            return 0, (), False
        for ready in (self.after, self.before):
            for members in ready.members if ready.plan.sync == "workers" else ():
                if involved <= set(members) and (group := ready.group_of(members, to_be=ready is self.after)):
                    return group, members, False
        return self._pool.new_number(), tuple(sorted(involved)), True

    def _instructions(
        self, told: Mapping[int, Remembered], exchange: PeerExchange, versions: WeightVersions
    ) -> Mapping[int, Sequence[Instruction]]:
        """Return the instructions of each worker: send, free, receive, and redefine the optimizer."""
        numbers, sent = self._remote.named.numbers, exchange.sent
        recalls: dict[int, tuple[list[StateEntry], list[int]]] = {}
        for version in (versions.previous, numbers, versions.ahead):  # in the order in which they are read
            for move in self._tensors:
                if move.item.name in version:
                    exchange.carry(move, version[move.item.name], self._spec(move.target, move.item.name))
        for move in self._entries:
            found = told[move.source].get(move.item.name, ())
            laid = {entry.key: self._pool.new_number() for entry in found if isinstance(entry.value, TensorSpec)}
            if laid:
                place = self._parts[move.source].trained.index(move.item.name)
                lay = Lay(self._remote.optimizer_number, (place,), tuple(laid.values()))
                sent.setdefault(move.source, []).append(lay)
            entries, buffers = recalls.setdefault(move.target, ([], []))
            for entry in found:
                place = self._wanted[move.target].trained.index(move.item.name)
                entries.append(StateEntry(place, entry.key, entry.value))
                if isinstance(entry.value, TensorSpec):
                    exchange.carry(move, laid[entry.key], entry.value)
            buffers += laid.values()
            if laid:
                sent[move.source].append(Free(tuple(laid.values())))
        for worker, items in self._released.items():
            names = [item.name for item in items if item.key != ENTRIES]
            gone = [number for name in names for number in (numbers[name], *versions.of(name))]
            sent.setdefault(worker, []).extend([Free(tuple(gone))] if gone else [])
        for worker in sorted({*self._parts, *self._wanted}):
            old, new = (parts[worker].trained if worker in parts else () for parts in (self._parts, self._wanted))
            if old != new:
                entries, buffers = recalls.get(worker, ([], []))
                redefined = self._succeeded(worker, entries, buffers, versions)
                exchange.received.setdefault(worker, []).extend(redefined)
        return exchange.instructions

    def _succeeded(
        self, worker: int, entries: Sequence[StateEntry], buffers: Sequence[int], versions: WeightVersions
    ) -> Iterator[Instruction]:
        """Yield the instructions that give a worker an optimizer over other parameters."""
        remote = self._remote
        number, trained = remote.optimizer_number, self._wanted[worker].trained if worker in self._wanted else ()
        if not trained:
            yield Free((), (number,))
            return
        yield Define(
            number,
            optimizer_definition(
                remote.optimizer,
                remote.named,
                trained,
                (),
                host=self.after.plan.update == "host",
                delay=self.after.compiler.versions.delay,
                succeeds=True,
            ),
        )
        if entries:
            yield Recall(number, tuple(entries), (), tuple(buffers))
        if versions.previous:
            yield versions.branch(number, trained, behind=1)

    def _spec(self, worker: int, name: str) -> TensorSpec:
        """Return the spec of a worker's future part of a name."""
        return self.after.holdings.spec(worker, name, self._remote.named.spec(name))


class _Written(NamedTuple):
    """Prepared instructions of a migration.

    Args:
        group: The group of the transfers; 0 if there are none.
        members: Its members.
        forms: Whether it is formed for the migration only.
        instructions: Instructions of each worker.
        size_bytes: Bytes of all transfers except parameter versions.
        branched: Whether parameters have versions, which are transferred too.
    """

    group: int
    members: Members
    forms: bool
    instructions: Mapping[int, Sequence[Instruction]]
    size_bytes: int
    branched: bool


def _counts(entry: StateEntry) -> bool:
    """Return whether an entry is a scalar that may change with each step."""
    return isinstance(entry.value, int | float) and not isinstance(entry.value, bool)


def _layout(parts: Mapping[int, WorkerStateSpec], holdings: ShardingSpec) -> StateLayout:
    """Return the layout of the workers' tensors and optimizer entries."""
    items = {w: [*map(p.item, p.names), *(p.item(name, ENTRIES) for name in p.trained)] for w, p in parts.items()}
    return StateLayout(parts=items, placements=holdings.placements)


def _check_placements(before: InstalledPlan, after: InstalledPlan) -> None:
    for name in {*before.holdings.placements, *after.holdings.placements}:
        old, new = before.holdings.placement(name), after.holdings.placement(name)
        if old != new and (isinstance(old, Shard) or isinstance(new, Shard)):
            raise UsageError(
                f"the new plan splits {name} in another way than the one that runs; a plan that takes over a run "
                "splits the same layers over as many devices"
            )


def check_successor(before: Plan, after: Plan, batch: int, *, regroupable: Callable[[], bool]) -> None:
    """Refuse a plan that cannot replace that of a run.

    Args:
        before: The plan of the run.
        after: The new plan.
        batch: Samples of a batch.
        regroupable: Returns whether other micro-batches have the same result.

    Raises:
        UsageError: The plans are incompatible; the message names the difference.
    """
    if before.micro_batches(batch) != after.micro_batches(batch) and not regroupable():
        raise UsageError(
            f"the new plan has other micro-batches ({[part.size for part in after.micro_batches(batch)]}) than the one "
            f"that runs ({[part.size for part in before.micro_batches(batch)]}): the loss curve would be another, "
            "as the model draws random numbers or normalises by its batch"
        )
    for what in ("update", "optimizer"):
        old, new = getattr(before, what), getattr(after, what)
        if old != new:
            raise UsageError(
                f"{what}={new!r} of the new plan: the run has {old!r}, which does not change while it runs"
            )
