"""The training state on the workers: parameters, buffers and optimizer of a trainer, equal on all replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from onebox.engine.partition.sharding_spec import Members, ShardingSpec
from onebox.engine.partition.weight_versions import KEYS, WeightVersions, version_broadcasts
from onebox.engine.state.snapshot_layout import SnapshotLayout, StateItem, WorkerStateSpec
from onebox.engine.state.snapshot_restore import WantedPart, put_shares, restore_parts, wanted_spec
from onebox.engine.state.state_layout import StateLayout
from onebox.engine.workload.named_state import (
    OptimizerEntries,
    local_optimizer_state,
    named_state,
    optimizer_definition,
    state_entries,
    trained_names,
)
from onebox.engine.workload.parameter_groups import Optimizers, optimizers_in, options_of, training_of
from onebox.graph.shard.placements import REPLICATE, Shard, shard_of
from onebox.pool import Pool, raise_first
from onebox.wire import spec_of, to_frame
from onebox.wire.protocol.instructions import Ask, Free, Options
from onebox.wire.protocol.requests import Define, Instruction, Put
from onebox.wire.protocol.responses import WorkerMemory
from onebox.wire.protocol.snapshots import Fill, Recall, StateEntry


@dataclass(frozen=True, kw_only=True)
class StartState:
    """State of a checkpoint beside the weights.

    Args:
        optimizer: State of the optimizer.
        versions: Versions of parameters, by parameter and kind.
    """

    optimizer: OptimizerEntries
    versions: Mapping[tuple[str, str], Tensor]


class RemoteState:
    """Parameters, buffers and optimizer on the workers of a trainer.

    Each worker holds the tensors that the plan's stages on it need. Before the upload, and for tensors that no stage
    reads, the user's own tensors are the state.

    Args:
        model: The user's model.
        loss: The user's loss; a module may have tensors of its own.
        optimizer: The user's optimizer, or several; their state is uploaded.
        pool: The pool.
        start: Optimizer state, and versions of parameters, of a checkpoint; ``None`` for the optimizer's own state.

    Raises:
        UsageError: An optimizer is not supported, or has tensors outside the model, or shares tensors with another one.
    """

    def __init__(
        self, model: nn.Module, loss: Any, optimizer: Optimizers, pool: Pool, start: StartState | None = None
    ) -> None:
        self.optimizer = optimizer = optimizers_in(optimizer)
        self._pool = pool
        self._ledger: list[int] = []
        self._optimizer_number = 0
        self._trained: dict[int, tuple[str, ...]] = {}
        self._owned: dict[int, tuple[str, ...]] = {}
        self._holders: dict[str, Members] = {}
        self._holdings: ShardingSpec | None = None
        self._sent_options: tuple[Options, ...] = ()
        self._copies: SnapshotLayout | None = None
        self.versions = WeightVersions()
        self.branched = False
        """True if parameters have versions on the workers."""
        self.first_versions: Mapping[tuple[str, str], Tensor] = start.versions if start else {}
        """Initial versions, by parameter and kind."""
        self.named = named_state(model, loss, self.new_number)
        self.wanted = trained_names(self.named, optimizer)
        self.training = training_of(optimizer)
        self.remembered = start.optimizer if start else local_optimizer_state(optimizer, self.named)

    def use_versions(self, versions: WeightVersions) -> None:
        """Set the versions of parameters that steps need from now on."""
        self.versions = versions

    def use_optimizer_state(self, entries: OptimizerEntries) -> None:
        """Set the optimizer state for the first upload."""
        self.remembered = entries

    def new_number(self) -> int:
        """Return a number for an object that stays on the workers until the trainer is closed."""
        self._ledger.append(self._pool.new_number())
        return self._ledger[-1]

    def upload(self, holders: Mapping[str, Members], holdings: ShardingSpec | None = None) -> None:
        """Upload every tensor to its holders, from a snapshot or else the user's model; tensors already present stay.

        Args:
            holders: Holders of each tensor.
            holdings: The sharding spec; ``None`` gives every holder the whole.
        """
        self._holdings = holdings
        if self._copies is not None and holdings is not None:
            self._restore(self._copies, holdings)
        for name, workers in holders.items():
            if self._copies is not None and self._copies.has(name):
                continue
            number, tensor = self.named.numbers[name], self.named.tensors[name].detach()
            placement = holdings.placement(name) if holdings else REPLICATE
            parts = [tensor]
            if holdings and isinstance(placement, Shard):
                parts = [shard_of(tensor, placement, rank) for rank in range(len(placement.sizes))]
            frames = [to_frame(part.clone()) for part in parts]
            for worker in workers:
                if worker in self._holders.get(name, ()) and len(parts) == 1:
                    continue
                rank = holdings.ranks[worker] if holdings and len(parts) > 1 else 0
                self._pool.post(worker, [Put((number,), (spec_of(parts[rank]),))], [frames[rank]])
            for worker in set(self._holders.get(name, ())) - set(workers):
                self._pool.post(worker, [Free((number,))])
        for name in set(self._holders) - set(holders):
            for worker in self._holders[name]:
                self._pool.post(worker, [Free((self.named.numbers[name],))])
        self._holders = dict(holders)

    def _restore(self, copies: SnapshotLayout, holdings: ShardingSpec) -> None:
        """Restore parameters and buffers from a snapshot on their holders."""
        for worker in holdings.devices:
            names = [name for name in holdings.held_by(worker, holdings.holders) if copies.has(name)]
            self._fill(copies, worker, names, holdings)

    def _fill(
        self, copies: SnapshotLayout, worker: int, names: Sequence[str], holdings: ShardingSpec, key: str = ""
    ) -> None:
        """Fill buffers of a worker with tensors, or versions of them, from a snapshot."""
        wanted = [
            WantedPart(
                StateItem(name, key, holdings.share(worker, name)),
                holdings.placement(name),
                holdings.spec(worker, name, self.named.spec(name)),
            )
            for name in names
        ]
        places = tuple(restore_parts(self._pool, copies, worker, wanted))
        numbers = tuple(self.number_of(each.item) for each in wanted)
        self._pool.post(worker, [Fill(numbers, tuple(each.spec for each in wanted), places)])

    def _recall(self, copies: SnapshotLayout, worker: int, held: tuple[str, ...], holdings: ShardingSpec) -> Recall:
        """Return the instruction that restores a worker's optimizer state from a snapshot."""
        entries: list[StateEntry] = []
        wanted = []
        for index, name in enumerate(held):
            placement, spec = holdings.placement(name), holdings.spec(worker, name, self.named.spec(name))
            for key in (key for key in copies.keys(name) if key not in KEYS):
                item = StateItem(name, key, holdings.share(worker, name))
                number = copies.number(item)
                if number is None:
                    wanted.append(WantedPart(item, placement, wanted_spec(copies, item, placement, spec)))
                    entries.append(StateEntry(index, key, wanted[-1].spec))
                else:
                    entries.append(StateEntry(index, key, number[0]))
        places = tuple(restore_parts(self._pool, copies, worker, wanted))
        return Recall(self._optimizer_number, tuple(entries), places)

    def define_optimizer(
        self, number: int, trained: tuple[str, ...], holdings: ShardingSpec, *, host: bool = False
    ) -> None:
        """Define the optimizer over the parameters that have gradients, on their holders.

        Args:
            number: Its number, from :meth:`new_number`.
            trained: The parameters that have gradients.
            holdings: The sharding spec.
            host: Whether it runs in the memory of each holder's host.

        Raises:
            OneboxError: A worker refuses it.
        """
        self._optimizer_number = number
        self._sent_options = options_of(self.optimizer)
        futures = []
        for worker in holdings.devices:
            held = holdings.stepped_by(worker, trained)
            if held:
                self._trained[worker] = held
                self._owned[worker] = holdings.owned_by(worker, trained)
                entries, tensors = state_entries(self.share(worker, holdings, self.remembered), held)
                delay = self.versions.delay
                definition = optimizer_definition(self.optimizer, self.named, held, entries, host=host, delay=delay)
                instructions: list[Instruction] = [Define(self._optimizer_number, definition)]
                if self._copies is not None:
                    instructions.append(self._recall(self._copies, worker, held, holdings))
                futures.append(self._pool.post(worker, instructions, [to_frame(t) for t in tensors], answer=True))
        raise_first(futures)
        if self.versions.previous:
            self._bring_versions(holdings, trained)

    def _bring_versions(self, holdings: ShardingSpec, trained: tuple[str, ...]) -> None:
        """Upload versions of parameters to their holders, if there are initial versions."""
        keys, copies = self.versions.keys, self._copies
        known = self.first_versions if copies is None else {(n, key) for n in trained for key in copies.keys(n)}
        if not trained or not all((name, key) in known for name in trained for key in keys):
            return
        for worker in holdings.devices:
            held = holdings.held_by(worker, trained)
            for key, numbers in keys.items():
                if copies is not None:
                    self._fill(copies, worker, held, holdings, key)
                else:
                    whole = {name: self.first_versions[name, key] for name in held}
                    put_shares(self._pool, worker, whole, numbers, holdings)
            if stepped := self._trained.get(worker):
                self._pool.post(worker, [self.versions.branch(self._optimizer_number, stepped, behind=1)])
        self.branched = True

    def branch(self, options: tuple[Options, ...], group_of: Callable[[Members], int]) -> None:
        """Create versions of parameters from now on; owners send theirs to the other holders.

        Args:
            options: Options of each parameter group in the first step that needs versions, on which predictions are
                based: the same whenever that step is begun or repeated.
            group_of: Maps workers that hold the same to their group.

        Raises:
            OneboxError: The pool is broken.
        """
        for worker, trained in self._trained.items():
            self._pool.post(worker, [self.versions.branch(self._optimizer_number, trained, options=options)])
        for members, handed in version_broadcasts(self.versions, self.holdings, self.named.spec, group_of):
            for worker in members:
                self._pool.post(worker, [handed])
        self.branched = True

    def number_of(self, item: StateItem) -> int:
        """Return the buffer of a part of the state."""
        return self.versions.keys[item.key][item.name] if item.key else self.named.numbers[item.name]

    def settle(self, holdings: ShardingSpec, trained: tuple[str, ...]) -> None:
        """Record that the state, including the optimizer's, is placed as a plan requires.

        Args:
            holdings: The new sharding spec.
            trained: Parameters that have gradients.
        """
        self._holdings, self._holders = holdings, dict(holdings.holders)
        self._trained, self._owned = {}, {}
        self._sent_options = ()  # a new definition may have the options of an earlier step
        for worker in holdings.devices:
            if stepped := holdings.stepped_by(worker, trained):
                self._trained[worker] = stepped
                self._owned[worker] = holdings.owned_by(worker, trained)

    def parts_under(self, holdings: ShardingSpec, trained: tuple[str, ...]) -> dict[int, WorkerStateSpec]:
        """Return the part of the state on each worker under a sharding spec.

        Args:
            holdings: The sharding spec.
            trained: Parameters that have gradients.
        """
        return {
            worker: WorkerStateSpec(
                names=holdings.held_by(worker, holdings.holders),
                trained=holdings.stepped_by(worker, trained),
                ranks={name: holdings.share(worker, name) for name in holdings.placements},
            )
            for worker in holdings.devices
        }

    def retire(self, numbers: Sequence[int]) -> None:
        """Free objects that are no longer needed, by numbers from :meth:`new_number`.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        gone = set(numbers)
        self._ledger = [number for number in self._ledger if number not in gone]
        for worker in self._pool.present:
            self._pool.post(worker, [Free(tuple(numbers), tuple(numbers))])

    def changed_options(self, options: tuple[Options, ...]) -> tuple[Options, ...]:
        """Return the options of each parameter group if they differ from those last sent, else an empty tuple."""
        changed = () if options == self._sent_options else options
        self._sent_options = options
        return changed

    def resend_options(self) -> None:
        """Record that an optimizer has been redefined, perhaps with the options of an earlier step."""
        self._sent_options = ()

    def share(self, worker: int, holdings: ShardingSpec, remembered: OptimizerEntries) -> OptimizerEntries:
        """Return the optimizer state of a worker's shards.

        Args:
            worker: The worker.
            holdings: The sharding spec.
            remembered: The whole optimizer state.
        """
        found: OptimizerEntries = []
        for name, key, value in remembered:
            placement = holdings.placement(name)
            if isinstance(placement, Shard) and isinstance(value, Tensor) and worker in holdings.holders.get(name, ()):
                whole = value.shape == self.named.tensors[name].shape
                value = shard_of(value, placement, holdings.ranks[worker]) if whole else value  # noqa: PLW2901
            found.append((name, key, value))
        return found

    def checks(self) -> dict[int, list[tuple[Members, Ask]]]:
        """Return the requests to each worker for hashes of shared state, for comparing replicas."""
        shared: dict[Members, list[int]] = {}
        for name, holders in self._holders.items():
            for members in self._holdings.replica_groups[name] if self._holdings else (holders,):
                if len(members) > 1:
                    shared.setdefault(members, []).append(self.named.numbers[name])
        found: dict[int, list[tuple[Members, Ask]]] = {}
        for members, numbers in shared.items():
            for worker in members:
                found.setdefault(worker, []).append((members, Ask("digest", tuple(numbers))))
        return found

    def reading(self) -> StateLayout:
        """Return the assignment of the state's parts to workers for reading, as presently placed."""
        names: dict[int, list[str]] = {}
        for name, members in self._holders.items():
            for worker in self._holdings.sources(name) if self._holdings else members[:1]:
                names.setdefault(worker, []).append(name)
        return StateLayout(
            numbers=self.named.numbers,
            specs={name: self.named.spec(name) for name in self._holders},
            names={worker: tuple(own) for worker, own in names.items()},
            optimizer=self._optimizer_number,
            trained=dict(self._trained),
            owned=dict(self._owned),
            holdings=self._holdings,
        )

    @property
    def holdings(self) -> ShardingSpec:
        """The sharding spec, once the state has been uploaded."""
        assert self._holdings is not None
        return self._holdings

    @property
    def optimizer_number(self) -> int:
        """Number of the optimizer's definition."""
        return self._optimizer_number

    def parts(self) -> dict[int, WorkerStateSpec]:
        """Return each worker's part of the state."""
        holdings, keys = self.holdings, self.versions.keys if self.branched else ()
        return {
            worker: WorkerStateSpec(
                names=holdings.held_by(worker, holdings.holders),
                trained=self._trained.get(worker, ()),
                ranks={name: holdings.share(worker, name) for name in holdings.placements},
                versions=tuple((name, key) for key in keys for name in self._trained.get(worker, ())),
            )
            for worker in holdings.devices
        }

    def reset(self, copies: SnapshotLayout | None) -> None:
        """Free everything on the workers; the next upload comes from a snapshot or the user's model.

        Args:
            copies: A snapshot; ``None`` for the user's model.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        self.free()
        self._ledger = list(self.named.numbers.values())
        self._trained, self._owned, self._holders, self._holdings = {}, {}, {}, None
        self._sent_options, self._optimizer_number = (), 0
        self._copies = copies
        self.branched = False
        if copies is not None:
            self.forget_first()

    def forget_first(self) -> None:
        """Discard the initial optimizer state and versions, which a snapshot replaces."""
        self.remembered, self.first_versions = [], {}

    def memory(self) -> list[WorkerMemory]:
        """Return the memory of each worker."""
        workers = self._pool.present
        answers = raise_first([self._pool.post(worker, [Ask("memory")], answer=True) for worker in workers])
        return [result for answer in answers for result in answer.results if isinstance(result, WorkerMemory)]

    def free(self) -> None:
        """Free every object with a number of :meth:`new_number`, on all workers."""
        free = Free(tuple(self._ledger), tuple(self._ledger))
        for worker in self._pool.present:
            self._pool.post(worker, [free])
