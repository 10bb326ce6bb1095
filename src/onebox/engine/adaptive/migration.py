"""A new plan takes over a run between two steps: only what has to be elsewhere travels, from worker to worker.

A worker does what it is told in order. So all that is said of the change lies behind the last step of the old plan and
before the first one of the new: who has something that another one needs sends it, and who needs something goes on
until it reads that. What a worker keeps is not touched, nothing goes by way of the client, and nobody waits for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import NamedTuple

from onebox.engine.install.deferred_replies import DeferredReplies, begin_group_formation
from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.partition.sharding_spec import Members
from onebox.engine.partition.weight_versions import WeightVersions
from onebox.engine.state.redistribution import StateMove, find_redistribution
from onebox.engine.state.remote import RemoteState
from onebox.engine.workload.named_state import optimizer_definition
from onebox.errors import UsageError
from onebox.graph.shard.placements import Shard
from onebox.plan import Plan
from onebox.pool import Pool, WorkerReply, raise_first
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Free, Receive, Send
from onebox.wire.protocol.requests import Define, Instruction
from onebox.wire.protocol.responses import SnapshotContents
from onebox.wire.protocol.snapshots import Lay, Recall, StateEntry

_CHANNEL = 0
"""Steps use it, too; what they sent on it has been asked for before, and what they will send is asked for later."""

Remembered = Mapping[str, Sequence[StateEntry]]
"""What an optimizer remembers of each parameter."""


@dataclass(frozen=True, kw_only=True)
class MigrationReport:
    """What a change of plan moved.

    Args:
        names: Parameters and buffers that travelled, counted for each worker that got one.
        size_bytes: Bytes of these, and of what the optimizer remembers of them.
        over: Groups that are to be left, with their members, when the next step has read what came by them.
        asked: What has been asked of workers and tells whether it has been done.
    """

    names: int = 0
    size_bytes: int = 0
    over: Mapping[int, Members] = field(default_factory=dict)
    asked: tuple[DeferredReplies, ...] = ()


class Migration:
    """The change from one plan to another, from the moment that it is wanted until it is made.

    Args:
        pool: The pool.
        remote: The state on the workers.
        before: What is there.
        after: What is to be.

    Raises:
        UsageError: The new plan splits layers in another way than the old one.
    """

    def __init__(self, pool: Pool, remote: RemoteState, before: InstalledPlan, after: InstalledPlan) -> None:
        self.before = before
        self.after = after
        self._pool = pool
        self._remote = remote
        _check_placements(before, after)
        sizes = {name: remote.named.spec(name).size_bytes for name in remote.named.tensors}
        hosts = {device.number: device.host for device in pool.devices}
        self._parts = remote.parts()
        self._wanted = remote.parts_under(after.holdings, after.trained)
        self.moves = find_redistribution(self._parts, self._wanted, sizes, hosts)
        self._told: dict[int, Future[WorkerReply]] = {}
        self._written: _Written | None = None

    def ask(self) -> None:
        """Ask what the optimizers remember that has to travel; they answer when the steps under way have ended.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        for worker in sorted({move.source for move in self.moves.remembered}):
            self._told[worker] = self._pool.post(worker, [Lay(self._remote.optimizer_number)], answer=True)

    def write(self, patience_s: float) -> bool:
        """Write down what workers will be told, so that :meth:`make` has only to send it.

        Args:
            patience_s: How long to wait at most for what the optimizers remember.

        Returns:
            Whether that is known, and it has been written down.

        Raises:
            OneboxError: A worker failed.
        """
        if wait(self._told.values(), patience_s).not_done:
            return False
        told = self._answers()
        if not any(_counts(entry) for found in told.values() for entries in found.values() for entry in entries):
            self._written = self._write(told)  # other numbers change with each step
        return True

    def make(self) -> MigrationReport:
        """Make the change: all that is asked for from then on is done under the new plan.

        Raises:
            OneboxError: A worker was lost, or the pool is broken; some workers may have got their part.
        """
        remote, written = self._remote, self._written
        if written is None or written.branched != remote.branched:
            self.ask()
            written = self._write(self._answers())
        asked = self.after.form()
        if written.forms:
            asked.append(begin_group_formation(self._pool, written.members, "workers", written.group))
        for worker, instructions in written.instructions.items():
            self._pool.post(worker, instructions)
        remote.settle(self.after.holdings, self.after.trained)
        self.after.settled()
        over = self.before.retire(self.after)
        if written.group and self.after.group_of(written.members) != written.group:
            over[written.group] = written.members
        return MigrationReport(
            names=len(self.moves.tensors), size_bytes=written.size_bytes, over=over, asked=tuple(asked)
        )

    def _answers(self) -> dict[int, Remembered]:
        """Wait for what the optimizers remember."""
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
        """Return what workers will be told, given what their optimizers remember."""
        branched = self._remote.branched
        group, members, forms = self._group()
        way = _Way(group, {worker: place for place, worker in enumerate(members)})
        remembered_bytes = sum(
            entry.value.size_bytes
            for move in self.moves.remembered
            for entry in told[move.source].get(move.name, ())
            if isinstance(entry.value, TensorSpec)
        )
        tensor_bytes = sum(self._spec(move.target, move.name).size_bytes for move in self.moves.tensors)
        instructions = self._instructions(told, way, self._remote.versions if branched else WeightVersions())
        return _Written(group, members, forms, instructions, tensor_bytes + remembered_bytes, branched)

    def _group(self) -> tuple[int, Members, bool]:
        """Return a group of all who send or receive, its members, and whether it is formed for that only."""
        involved = self.moves.workers
        if not involved:
            return 0, (), False
        for ready in (self.after, self.before):
            for members in ready.members if ready.plan.sync == "workers" else ():
                if involved <= set(members) and (group := ready.group_of(members, to_be=ready is self.after)):
                    return group, members, False
        return self._pool.new_number(), tuple(sorted(involved)), True

    def _instructions(
        self, told: Mapping[int, Remembered], way: _Way, versions: WeightVersions
    ) -> dict[int, list[Instruction]]:
        """Return what each worker is told: it sends, forgets, receives, and changes its optimizer."""
        moves, numbers = self.moves, self._remote.named.numbers
        sent: dict[int, list[Instruction]] = {}
        come: dict[int, list[Instruction]] = {}
        recalls: dict[int, tuple[list[StateEntry], list[int]]] = {}

        def carry(move: StateMove, number: int, spec: TensorSpec) -> None:
            sent.setdefault(move.source, []).append(Send(number, way.group, way.ranks[move.target], _CHANNEL))
            receive = Receive(number, spec, way.group, way.ranks[move.source], _CHANNEL)
            come.setdefault(move.target, []).append(receive)

        for version in (versions.previous, numbers, versions.ahead):  # in the order in which they are read
            for move in moves.tensors:
                if move.name in version:
                    carry(move, version[move.name], self._spec(move.target, move.name))
        for move in moves.remembered:
            found = told[move.source].get(move.name, ())
            laid = {entry.key: self._pool.new_number() for entry in found if isinstance(entry.value, TensorSpec)}
            if laid:
                place = self._parts[move.source].trained.index(move.name)
                lay = Lay(self._remote.optimizer_number, (place,), tuple(laid.values()))
                sent.setdefault(move.source, []).append(lay)
            entries, buffers = recalls.setdefault(move.target, ([], []))
            for entry in found:
                place = self._wanted[move.target].trained.index(move.name)
                entries.append(StateEntry(place, entry.key, entry.value))
                if isinstance(entry.value, TensorSpec):
                    carry(move, laid[entry.key], entry.value)
            buffers += laid.values()
            if laid:
                sent[move.source].append(Free(tuple(laid.values())))
        for worker, names in moves.freed.items():
            gone = [number for name in names for number in (numbers[name], *versions.of(name))]
            sent.setdefault(worker, []).append(Free(tuple(gone)))
        for worker in sorted(moves.changed):
            entries, buffers = recalls.get(worker, ([], []))
            come.setdefault(worker, []).extend(self._succeeded(worker, entries, buffers, versions))
        return {worker: [*sent.get(worker, ()), *come.get(worker, ())] for worker in sorted({*sent, *come})}

    def _succeeded(
        self, worker: int, entries: Sequence[StateEntry], buffers: Sequence[int], versions: WeightVersions
    ) -> Iterator[Instruction]:
        """Yield what gives a worker an optimizer over other parameters."""
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
                delay=remote.versions.delay,
                succeeds=True,
            ),
        )
        if entries:
            yield Recall(number, tuple(entries), (), tuple(buffers))
        if versions.previous:
            yield versions.branch(number, trained, behind=1)

    def _spec(self, worker: int, name: str) -> TensorSpec:
        """Return what a worker is to hold of something."""
        return self.after.holdings.spec(worker, name, self._remote.named.spec(name))


class _Written(NamedTuple):
    """What workers will be told when the change is made.

    Args:
        group: By which things travel; 0 where nothing does.
        members: Of that.
        forms: Whether it is formed for that only.
        instructions: For each worker.
        size_bytes: Bytes of all that travels but versions of parameters.
        branched: Whether parameters have versions, which travel, too.
    """

    group: int
    members: Members
    forms: bool
    instructions: Mapping[int, Sequence[Instruction]]
    size_bytes: int
    branched: bool


class _Way(NamedTuple):
    """The group by which things travel, and the rank of each worker in it."""

    group: int
    ranks: Mapping[int, int]


def _counts(entry: StateEntry) -> bool:
    """Tell whether an entry is a number that may be another one after the next step."""
    return isinstance(entry.value, int | float) and not isinstance(entry.value, bool)


def _check_placements(before: InstalledPlan, after: InstalledPlan) -> None:
    for name in {*before.holdings.placements, *after.holdings.placements}:
        old, new = before.holdings.placement(name), after.holdings.placement(name)
        if old != new and (isinstance(old, Shard) or isinstance(new, Shard)):
            raise UsageError(
                f"the new plan splits {name} in another way than the one that runs; a plan that takes over a run "
                "splits the same layers over as many devices"
            )


def check_successor(before: Plan, after: Plan, batch: int) -> None:
    """Refuse a plan that cannot take over a run.

    Args:
        before: The plan of the run.
        after: The other one.
        batch: Samples of a batch.

    Raises:
        UsageError: What differs that must not.
    """
    if before.micro_batches(batch) != after.micro_batches(batch):
        raise UsageError(
            f"the new plan has other micro-batches ({[part.size for part in after.micro_batches(batch)]}) than the one "
            f"that runs ({[part.size for part in before.micro_batches(batch)]}): the loss curve would be another"
        )
    for what in ("update", "optimizer"):
        old, new = getattr(before, what), getattr(after, what)
        if old != new:
            raise UsageError(
                f"{what}={new!r} of the new plan: the run has {old!r}, which does not change while it runs"
            )
