"""The training state on the workers: parameters, buffers and optimizer of a trainer, equal on all replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from onebox.engine.partition.gradient_buckets import CodecState, PlacedCodecState
from onebox.engine.partition.sharding_spec import Members, ShardingSpec
from onebox.engine.partition.weight_versions import KEYS, WeightVersions, version_broadcasts
from onebox.engine.state.move_executor import WantedPart, restore_parts, upload, wanted_spec
from onebox.engine.state.moves import CLIENT, StateItem, StateLayout, StateMove, WorkerStateSpec, plan_moves, released
from onebox.engine.state.pieces import Key, TensorSource, find_tensor_sources
from onebox.engine.state.snapshot_layout import SnapshotLayout
from onebox.engine.workload.named_state import (
    OptimizerEntries,
    local_optimizer_state,
    named_state,
    optimizer_definition,
    state_entries,
    trained_names,
)
from onebox.engine.workload.parameter_groups import Optimizers, optimizers_in, options_of, training_of
from onebox.errors import PoolError
from onebox.graph import zeros
from onebox.graph.shard.placements import shard_of
from onebox.pool import Pool, WorkerReply, raise_first
from onebox.wire import DTYPES, TensorSpec, spec_of, to_frame
from onebox.wire.protocol.instructions import Ask, Call, Free, Get, Options
from onebox.wire.protocol.requests import Define, Instruction, Put, StoredProgram
from onebox.wire.protocol.responses import WorkerMemory
from onebox.wire.protocol.snapshots import Fill, Lay, Number, Recall, Remembered, StateEntry

_LOG = logging.getLogger("onebox")


@dataclass(frozen=True, kw_only=True)
class StartState:
    """State of a checkpoint beside the weights.

    Args:
        optimizer: State of the optimizer.
        versions: Versions of parameters, by parameter and kind.
        residuals: Residuals of lossy codecs, by name.
    """

    optimizer: OptimizerEntries
    versions: Mapping[tuple[str, str], Tensor]
    residuals: Mapping[str, Tensor] = field(default_factory=dict)


RESIDUAL = "residual"
"""Key of the residuals of lossy codecs in a checkpoint."""


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
        weights: Values of tensors on the meta device, each read when it is used; those without are zero.

    Raises:
        UsageError: An optimizer is not supported, or has tensors outside the model, or shares tensors with another one.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        optimizer: Optimizers,
        pool: Pool,
        start: StartState | None = None,
        weights: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.optimizer = optimizer = optimizers_in(optimizer)
        self._pool = pool
        self._ledger: list[int] = []
        self._optimizer_number = 0
        self._trained: dict[int, tuple[str, ...]] = {}
        self._owned: dict[int, tuple[str, ...]] = {}
        self._holdings: ShardingSpec | None = None
        self._kept: ShardingSpec | None = None
        self._uploaded: ShardingSpec | None = None
        self._by_hand: set[str] = set()
        self.edited: Callable[[], Collection[str]] = tuple
        """Returns the tensors that the user has changed in this process, but not on the workers."""
        self._sent_options: tuple[Options, ...] = ()
        self._first: Mapping[str, Tensor] = {}
        self._copies: SnapshotLayout | None = None
        self.versions = WeightVersions()
        """Buffers of versions of the parameters that have gradients, once the optimizer is defined."""
        self.branched = False
        """True if parameters have versions on the workers."""
        self.first_versions: Mapping[tuple[str, str], Tensor] = start.versions if start else {}
        """Initial versions, by parameter and kind."""
        self.first_residuals: Mapping[str, Tensor] = start.residuals if start else {}
        """Initial residuals of lossy codecs, by name."""
        self._residuals: Mapping[str, PlacedCodecState] = {}
        self.named = named_state(model, loss, self.new_number)
        self.wanted = trained_names(self.named, optimizer)
        self.training = training_of(optimizer)
        self.remembered = start.optimizer if start else local_optimizer_state(optimizer, self.named)
        self._weights = weights

    @property
    def emulated(self) -> bool:
        """True if no worker has values."""
        return all(device.kind == "sim" for device in self._pool.devices)

    def new_number(self) -> int:
        """Return a number for an object that stays on the workers until the trainer is closed."""
        self._ledger.append(self._pool.new_number())
        return self._ledger[-1]

    def upload(self, holdings: ShardingSpec) -> None:
        """Upload every tensor to its holders, from a snapshot or else the user's model; tensors already present stay.

        Args:
            holdings: The sharding spec.

        Raises:
            CheckpointError: A file cannot be read any more.
            OneboxError: The pool is broken or closed, or a worker was lost. After any error nothing counts as present.
        """
        before, self._holdings, copies = self._holdings or self._kept, holdings, self._copies
        self._kept, self._uploaded, present = None, None, _NOWHERE
        if before is not None:
            present = _tensor_layout(before, [name for name in before.holders if name not in before.placements])
            gone = released(_tensor_layout(before, before.holders), _tensor_layout(holdings, holdings.holders))
            for worker, items in gone.items():
                self._pool.post(worker, [Free(tuple(map(self.number_of, items)))])
        if copies is not None:
            for worker in holdings.devices:
                self._fill(copies, worker, [n for n in holdings.held_by(worker, holdings.holders) if copies.has(n)])
        own = [name for name in holdings.holders if copies is None or not copies.has(name)]
        moves = self._moves(own, present)
        moved = {move.item.name for move in moves}
        values = ((n, self._first[n] if n in self._first else self.local(n)) for n in own if n in moved)
        changing = [name for name in own if not self.named.tensors[name].is_meta]
        try:
            upload(self._pool, moves, holdings.placements, values, self.named.numbers, copy=set(changing), wait=True)
        except BaseException:
            self._holdings = None
            raise

    def local(self, name: str) -> Tensor:
        """Return a tensor as this process has it: the user's own or, for one on the meta device, its first value.

        Raises:
            CheckpointError: Its file cannot be read any more.
        """
        tensor = self.named.tensors[name]
        if not tensor.is_meta:
            return tensor
        return self._weights[name] if name in self._weights else torch.zeros(tensor.shape, dtype=tensor.dtype)

    def _moves(self, names: Collection[str], present: StateLayout, key: str = "") -> tuple[StateMove, ...]:
        """Return the moves of tensors, or versions of them, from the client to the holders that lack them."""
        before = StateLayout(parts={CLIENT: [StateItem(name, key, 0) for name in names], **present.parts})
        return plan_moves(before, _tensor_layout(self.holdings, names, key))

    def write(self, changes: Mapping[str, Tensor]) -> None:
        """Replace parameters and buffers on all their holders.

        Steps requested earlier use the previous values.

        Args:
            changes: New values by name, which nobody changes; those that no worker holds are ignored.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        moves = self._moves(changes, _NOWHERE)
        upload(self._pool, moves, self.holdings.placements, changes.items(), self.named.numbers, there=True)

    def admit(self, holdings: ShardingSpec, tensors: Mapping[str, Tensor]) -> None:
        """Place parameters and buffers as a spec requires whose further workers hold copies of what others hold.

        Args:
            holdings: The new sharding spec; workers that are not in it any more are not served.
            tensors: Parameters and buffers for the further workers, which nobody changes.

        Raises:
            OneboxError: The pool is broken or closed, or a worker was lost.
        """
        new = [worker for worker in holdings.devices if worker not in self.holdings.devices]
        self._holdings = holdings
        layout = _layout(holdings, {worker: holdings.held_by(worker, tensors) for worker in new})
        before = StateLayout(parts={CLIENT: [StateItem(name, "", 0) for name in tensors]})
        upload(self._pool, plan_moves(before, layout), holdings.placements, tensors.items(), self.named.numbers)

    def write_optimizer(self, entries: OptimizerEntries, *, host: bool) -> None:
        """Replace the whole optimizer state.

        Args:
            entries: The new state.
            host: Whether it is in the memory of each holder's host.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        for worker, held in self._trained.items():
            define, tensors = self._definition(worker, held, entries, host=host)
            self._pool.post(worker, [define], [to_frame(tensor.clone()) for tensor in tensors])
        self._sent_options = ()  # the definition may have the options of an earlier step

    def _fill(self, copies: SnapshotLayout, worker: int, names: Sequence[str], key: str = "") -> None:
        """Fill buffers of a worker with tensors, or versions of them, from a snapshot."""
        holdings = self.holdings
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

    def _recall(self, copies: SnapshotLayout, worker: int, held: tuple[str, ...]) -> Recall:
        """Return the instruction that restores a worker's optimizer state from a snapshot."""
        entries: list[StateEntry] = []
        wanted = []
        holdings = self.holdings
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
        self, number: int, trained: tuple[str, ...], versions: WeightVersions, *, host: bool = False
    ) -> None:
        """Define the optimizer over the parameters that have gradients, on their holders, after the upload.

        Args:
            number: Its number, from :meth:`new_number`.
            trained: The parameters that have gradients.
            versions: Buffers of their versions.
            host: Whether it runs in the memory of each holder's host.

        Raises:
            OneboxError: A worker refuses it.
        """
        self._optimizer_number = number
        self.settle(self.holdings, trained, versions)
        self._uploaded = self._holdings
        self._sent_options = options_of(self.optimizer)
        futures = []
        for worker, held in self._trained.items():
            define, tensors = self._definition(worker, held, self.remembered, host=host)
            instructions: list[Instruction] = [define]
            if self._copies is not None:
                instructions.append(self._recall(self._copies, worker, held))
            futures.append(self._pool.post(worker, instructions, [to_frame(t) for t in tensors], answer=True))
        raise_first(futures)
        if versions.previous:
            self._bring_versions(trained)

    def _definition(
        self, worker: int, held: tuple[str, ...], remembered: OptimizerEntries, *, host: bool
    ) -> tuple[Define, list[Tensor]]:
        """Return the definition of a worker's optimizer with its shards of a state, and their tensors."""
        found: OptimizerEntries = []
        for name, key, value in remembered:
            placement = self.holdings.placement(name)
            if isinstance(value, Tensor) and name in held and value.shape == self.named.tensors[name].shape:
                value = shard_of(value, placement, self.holdings.share(worker, name))  # noqa: PLW2901
            found.append((name, key, value))
        entries, tensors = state_entries(found, held)
        delay = self.versions.delay
        spec = optimizer_definition(self.optimizer, self.named, held, entries, host=host, delay=delay)
        return Define(self._optimizer_number, spec), tensors

    def _bring_versions(self, trained: tuple[str, ...]) -> None:
        """Upload versions of parameters to their holders, if there are initial versions."""
        keys, copies, holdings = self.versions.keys, self._copies, self.holdings
        known = self.first_versions if copies is None else {(n, key) for n in trained for key in copies.keys(n)}
        if not trained or not all((name, key) in known for name in trained for key in keys):
            return
        for key, numbers in keys.items():
            if copies is not None:
                for worker in holdings.devices:
                    self._fill(copies, worker, holdings.held_by(worker, trained), key)
            else:
                first, moves = {n: self.first_versions[n, key] for n in trained}, self._moves(trained, _NOWHERE, key)
                upload(self._pool, moves, holdings.placements, first.items(), numbers)
        for worker, stepped in self._trained.items():
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

    def settle(self, holdings: ShardingSpec, trained: tuple[str, ...], versions: WeightVersions) -> None:
        """Record that the state, including the optimizer's, is placed as a plan requires.

        Args:
            holdings: The new sharding spec.
            trained: Parameters that have gradients.
            versions: Buffers of their versions.
        """
        self._holdings, self.versions = holdings, versions
        stepped = {worker: holdings.stepped_by(worker, trained) for worker in holdings.devices}
        self._trained = {worker: names for worker, names in stepped.items() if names}
        self._owned = {worker: holdings.owned_by(worker, trained) for worker in self._trained}
        self._sent_options = ()  # a new definition may have the options of an earlier step

    def begin_move(self) -> None:
        """Record that parts of the state are about to move between workers: after a loss, none counts as present."""
        self._uploaded = None

    def define_residuals(self, wanted: Mapping[str, PlacedCodecState]) -> None:
        """Make the state of lossy codecs: as before a first step, or that of a checkpoint if it is for the same plan.

        What they had before ends.

        Args:
            wanted: The state of the codecs, by a name that it has in checkpoints.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        if self._residuals:
            self.retire([each.number for each in self._residuals.values()])
        first, self.first_residuals, self._residuals = self.first_residuals, {}, wanted
        stored = {name: spec_of(tensor) for name, tensor in first.items()}
        alike = stored == {name: each.state.spec for name, each in wanted.items()}
        if first and not alike:
            _LOG.warning("the state of lossy gradients in the checkpoint is for another plan: it begins anew")
        for worker in dict.fromkeys(each.worker for each in wanted.values()):
            own = {name: each for name, each in wanted.items() if each.worker == worker}
            tensors = {
                each.number: first[name] if alike else _drawn(each.state)
                for name, each in own.items()
                if alike or each.state.seed is not None
            }
            for number, tensor in tensors.items():
                self._pool.post(worker, [Put((number,), (spec_of(tensor),))], [to_frame(tensor)])
            if empty := {each.number: each.state.spec for each in own.values() if each.number not in tensors}:
                program = self._pool.new_number()
                define = Define(program, StoredProgram(zeros(tuple(empty.values()))))
                self._pool.post(worker, [define, Call(program, (), tuple(empty)), Free((), (program,))])

    def residual_sources(self) -> dict[Key, TensorSource]:
        """Return the locations of the residuals of lossy codecs."""
        found = {StateItem(name, RESIDUAL, 0): each for name, each in self._residuals.items()}
        parts: dict[int, list[StateItem]] = {}
        for item, each in found.items():
            parts.setdefault(each.worker, []).append(item)
        specs = {item: each.state.spec for item, each in found.items()}
        layout = StateLayout(parts=parts)
        return find_tensor_sources(layout, specs, lambda item, first, rows: Get((found[item].number,), first, rows))

    def retire(self, numbers: Sequence[int]) -> None:
        """Free objects that are no longer needed, by numbers from :meth:`new_number`.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        gone = set(numbers)
        self._residuals = {name: each for name, each in self._residuals.items() if each.number not in gone}
        self._ledger = [number for number in self._ledger if number not in gone]
        for worker in self._pool.present:
            self._pool.post(worker, [Free(tuple(numbers), tuple(numbers))])

    def changed_options(self, options: tuple[Options, ...]) -> tuple[Options, ...]:
        """Return the options of each parameter group if they differ from those last sent, else an empty tuple."""
        changed = () if options == self._sent_options else options
        self._sent_options = options
        return changed

    def checks(self) -> dict[int, list[tuple[Members, Ask]]]:
        """Return the requests to each worker for hashes of shared state, for comparing replicas."""
        shared: dict[Members, list[int]] = {}
        for name, groups in self.holdings.replica_groups.items():
            for members in groups:
                if len(members) > 1:
                    shared.setdefault(members, []).append(self.named.numbers[name])
        found: dict[int, list[tuple[Members, Ask]]] = {}
        for members, numbers in shared.items():
            for worker in members:
                found.setdefault(worker, []).append((members, Ask("digest", tuple(numbers))))
        return found

    @property
    def stepping(self) -> bool:
        """True if an optimizer is defined on some worker."""
        return bool(self._trained)

    @property
    def held(self) -> frozenset[str]:
        """Names of the parameters and buffers that workers hold."""
        return frozenset(self._holdings.holders if self._holdings else ())

    def tensor_sources(self, key: str = "") -> dict[Key, TensorSource]:
        """Return the locations of parameters and buffers, or of versions of parameters.

        Args:
            key: Key of the version; empty for the tensors themselves.
        """
        if self._holdings is None:
            return {}
        holdings = self._holdings
        read: Mapping[int, Sequence[str]] = self._owned
        if not key:
            sources = {name: holdings.sources(name) for name in holdings.holders}
            workers = dict.fromkeys(worker for own in sources.values() for worker in own)
            read = {worker: [name for name, own in sources.items() if worker in own] for worker in workers}
        layout = _layout(holdings, read, key)
        specs = {
            item: holdings.spec(worker, item.name, self.named.spec(item.name))
            for worker, items in layout.parts.items()
            for item in items
        }
        return find_tensor_sources(layout, specs, lambda item, first, rows: Get((self.number_of(item),), first, rows))

    def optimizer_listings(self) -> dict[int, Future[WorkerReply]]:
        """Request listings of the optimizer's state from the workers that it is read from.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        lay = Lay(self._optimizer_number)
        return {worker: self._pool.post(worker, [lay], answer=True) for worker, own in self._owned.items() if own}

    def optimizer_sources(
        self, listings: Mapping[int, Sequence[StateEntry]]
    ) -> tuple[dict[Key, TensorSource], dict[Key, Number]]:
        """Return the locations of the optimizer's tensors, and its scalar entries.

        Args:
            listings: The workers' listings.
        """
        readers: dict[StateItem, tuple[int, int, int]] = {}
        specs: dict[StateItem, TensorSpec] = {}
        numbers: dict[Key, Number] = {}
        for worker, entries in listings.items():
            for entry in entries:
                name = self._trained[worker][entry.parameter]
                if name not in self._owned[worker]:
                    continue
                if not isinstance(entry.value, TensorSpec):
                    numbers.setdefault((name, entry.key), entry.value)
                    continue
                share = self.holdings.share(worker, name)
                item = StateItem(name, entry.key, share if entry.value.shape else 0)
                reader: tuple[int, int, int] = (share, worker, entry.parameter)
                readers[item] = min(readers.get(item, reader), reader)
                specs.setdefault(item, entry.value)
        parts: dict[int, list[StateItem]] = {}
        for item, (_, worker, _) in readers.items():
            parts.setdefault(worker, []).append(item)
        scalars = {(item.name, item.key) for item, spec in specs.items() if not spec.shape}
        layout = StateLayout(parts=parts, placements=self.holdings.placements, scalars=scalars)

        def request(item: StateItem, first: int, rows: int) -> Remembered:
            return Remembered(self._optimizer_number, readers[item][2], item.key, first, rows)

        return find_tensor_sources(layout, specs, request), numbers

    @property
    def holdings(self) -> ShardingSpec:
        """The sharding spec, once the state has been uploaded."""
        assert self._holdings is not None
        return self._holdings

    @property
    def optimizer_number(self) -> int:
        """Number of the optimizer's definition."""
        return self._optimizer_number

    @property
    def constant(self) -> frozenset[str]:
        """Names of the parameters that no step changes. Snapshots need not contain them: the user's model does."""
        return self.named.parameters - set(self.wanted) - self._by_hand

    def change_by_hand(self, names: Iterable[str]) -> bool:
        """Record that the user changes parameters and buffers; return whether a step could not have changed them."""
        changed = self.constant & self.held & set(names)
        self._by_hand |= changed
        return bool(changed)

    def parts(self, *, constant: bool = True) -> dict[int, WorkerStateSpec]:
        """Return each worker's part of the state.

        Args:
            constant: Whether to include what no step changes.
        """
        keys, without = self.versions.keys if self.branched else (), frozenset() if constant else self.constant
        return worker_parts(self.holdings, self._trained, keys, without=without)

    def reset(self, copies: SnapshotLayout | None, lost: Collection[int] = ()) -> None:
        """Free the state on the workers, except for what no step changes; the next upload comes from a snapshot and the
        user's model.

        Args:
            copies: A snapshot; ``None`` for the user's model alone.
            lost: Workers that have nothing any more.

        Raises:
            PoolError: The user has changed what no step changes, and the snapshot is from before.
            OneboxError: The pool is broken or closed.
        """
        if copies is not None:
            edited = self._by_hand.union(self.constant.intersection(self.edited()))
            changed = next((name for name in sorted(edited & self.held) if not copies.has(name)), None)
            if changed is not None:
                raise PoolError(
                    f"the run cannot go on: {changed} was changed by hand, which no step changes and the last snapshot "
                    "does not contain therefore, and a worker was lost; resume from the last checkpoint"
                )
        self._kept = self._constant_holdings(lost)
        kept = self._kept
        for worker in self._pool.present:
            own = {self.named.numbers[name] for name in kept.held_by(worker, kept.holders)} if kept else set()
            self._pool.post(worker, [Free(tuple(n for n in self._ledger if n not in own), tuple(self._ledger))])
        self._ledger = list(self.named.numbers.values())
        self._trained, self._owned, self._holdings, self._uploaded = {}, {}, None, None
        self._sent_options, self._optimizer_number = (), 0
        self._copies = copies
        self.first_residuals, self._residuals = {}, {}
        self.branched = False
        if copies is not None:
            self.forget_first()

    def _constant_holdings(self, lost: Collection[int]) -> ShardingSpec | None:
        """Return where parameters that no step changes are since an upload; those of split layers are left out."""
        holdings = self._uploaded
        if holdings is None:
            return None
        there = tuple(worker for worker in holdings.devices if worker in self._pool.present and worker not in lost)
        names = [name for name in holdings.holders if name in self.constant and name not in holdings.placements]
        holders = {name: tuple(w for w in holdings.holders[name] if w in there) for name in names}
        return replace(holdings, devices=there, holders=holders)

    def use_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the parameters and buffers for the first upload, instead of the user's."""
        self._first = tensors

    def use_optimizer_state(self, entries: OptimizerEntries) -> None:
        """Set the optimizer state for the first upload."""
        self.remembered = entries

    def forget_first(self) -> None:
        """Discard the initial optimizer state and versions, which a snapshot replaces."""
        self.remembered, self.first_versions, self._first = [], {}, {}

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


def worker_parts(
    holdings: ShardingSpec,
    stepped: Mapping[int, tuple[str, ...]],
    keys: Iterable[str] = (),
    *,
    without: Collection[str] = (),
) -> dict[int, WorkerStateSpec]:
    """Return the part of the state on each worker under a sharding spec.

    Args:
        holdings: The sharding spec.
        stepped: Parameters that each worker's optimizer updates.
        keys: Keys of the versions of these.
        without: Names that are left out.
    """
    names = [name for name in holdings.holders if name not in without]
    return {
        worker: WorkerStateSpec(
            names=holdings.held_by(worker, names),
            trained=stepped.get(worker, ()),
            ranks={name: holdings.share(worker, name) for name in holdings.placements},
            versions=tuple((name, key) for key in keys for name in stepped.get(worker, ())),
        )
        for worker in holdings.devices
    }


def _drawn(state: CodecState) -> Tensor:
    """Return the first elements of a codec's state, the same wherever it is drawn."""
    assert state.seed is not None
    generator = torch.Generator().manual_seed(state.seed)
    return torch.randn(state.spec.shape, generator=generator, dtype=DTYPES[state.spec.dtype])


_NOWHERE = StateLayout(parts={})
"""The layout of tensors that no worker has."""


def _layout(holdings: ShardingSpec, names: Mapping[int, Iterable[str]], key: str = "") -> StateLayout:
    """Return the layout of some tensors, or versions of them, given the names on each worker."""
    parts = {w: [StateItem(name, key, holdings.share(w, name)) for name in own] for w, own in names.items()}
    return StateLayout(parts=parts, placements=holdings.placements)


def _tensor_layout(holdings: ShardingSpec, names: Collection[str], key: str = "") -> StateLayout:
    """Return the layout of tensors, or versions of them, on all their holders."""
    return _layout(holdings, {worker: holdings.held_by(worker, names) for worker in holdings.devices}, key)
