"""Transfer of the training state between the workers and the client, piece by piece, in little memory."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future

import torch
from torch import Tensor

from onebox.engine.state.remote import RemoteState
from onebox.engine.state.state_layout import Key, TensorPiece, TensorSource, group_pieces, write_rows
from onebox.engine.workload.named_state import OptimizerEntries, optimizer_definition, state_entries
from onebox.graph.shard.placements import Shard, shard_of
from onebox.pool import Pool, WorkerReply, raise_first
from onebox.wire import DTYPES, TensorSpec, from_frame, spec_of, to_frame
from onebox.wire.protocol.requests import Define, Put
from onebox.wire.protocol.responses import SnapshotContents
from onebox.wire.protocol.snapshots import Number

_AHEAD = 4
"""Requests that are under way to the client at once, of about 4 MiB each: a round trip of 50 ms leaves 300 MiB/s."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerContents:
    """What an optimizer remembers.

    Args:
        tensors: Where tensors of it lie.
        numbers: Entries that are no tensors.
        here: Tensors of one that has not been brought to the workers yet.
    """

    tensors: Mapping[Key, TensorSource] = dataclasses.field(default_factory=dict)
    numbers: Mapping[Key, Number] = dataclasses.field(default_factory=dict)
    here: Mapping[Key, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StateChanges:
    """Changes that were made by hand to a state, in copies of its own.

    Args:
        tensors: Parameters and buffers as they are now, by name.
        entries: All that the optimizer is to remember; ``None`` for what it remembers.
    """

    tensors: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    entries: OptimizerEntries | None = None

    def then(self, later: StateChanges) -> StateChanges:
        """Return these and later ones as one."""
        entries = self.entries if later.entries is None else later.entries
        return StateChanges(tensors={**self.tensors, **later.tensors}, entries=entries)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        values = [*self.tensors.values(), *(value for _, _, value in self.entries or ())]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


class StateTransfer:
    """Reads and writes the state on the workers.

    Args:
        pool: The pool.
        remote: The state.
    """

    def __init__(self, pool: Pool, remote: RemoteState) -> None:
        self._pool = pool
        self._remote = remote

    # ---- from the workers

    def into(self, tensors: Mapping[str, Tensor]) -> None:
        """Write parameters and buffers, as they are on their first holders, into tensors of the same kind.

        Args:
            tensors: By name; those that no worker holds are left alone.

        Raises:
            OneboxError: A worker failed, or the pool is closed; some may have been written to.
        """
        sources = {key: source for key, source in self.sources().items() if key[0] in tensors}
        for piece, rows in self._fetched(sources.values()):
            write_rows(tensors[piece.key[0]], sources[piece.key].placement, piece, rows)

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of all parameters and buffers, by name.

        Raises:
            OneboxError: A worker failed, or the pool is closed.
        """
        here = {name: tensor.detach().to("cpu", copy=True) for (name, _), tensor in self.not_held().items()}
        away = {name: tensor for (name, _), tensor in self.wholes(self.sources())}
        return {name: here[name] if name in here else away[name] for name in self._remote.named.tensors}

    def sources(self) -> dict[Key, TensorSource]:
        """Return where parameters and buffers lie that workers hold.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        self._pool.post(self._pool.present[0], ())  # where nothing is there yet, a pool that is no more still says so
        return self._remote.reading().tensors()

    def not_held(self) -> dict[Key, Tensor]:
        """Return the parameters and buffers that no worker holds: the user's own are the state."""
        held = self.held()
        return {(name, ""): tensor for name, tensor in self._remote.named.tensors.items() if name not in held}

    def held(self) -> frozenset[str]:
        """Return the names of the parameters and buffers that workers hold."""
        return frozenset(self._remote.reading().specs)

    def optimizer_state(self) -> OptimizerEntries:
        """Return what the optimizer remembers, as (parameter, key, value).

        Raises:
            OneboxError: A worker failed, or the pool is closed.
        """
        remembered = self.remembered()
        found: OptimizerEntries = [(*key, value) for key, value in remembered.numbers.items()]
        found += [(*key, tensor) for key, tensor in remembered.here.items()]
        found += [(*key, tensor) for key, tensor in self.wholes(remembered.tensors)]
        return found

    def remembered(self) -> OptimizerContents:
        """Return what there is of the optimizer's state, and where.

        Raises:
            OneboxError: A worker failed, or the pool is closed.
        """
        reading = self._remote.reading()
        if not reading.trained:
            entries = self._remote.remembered
            return OptimizerContents(
                numbers={(name, key): value for name, key, value in entries if not isinstance(value, Tensor)},
                here={(name, key): value for name, key, value in entries if isinstance(value, Tensor)},
            )
        questions = reading.optimizer_questions()
        futures = [self._pool.post(worker, asks, answer=True) for worker, asks in questions.items()]
        listings = {}
        for worker, answer in zip(questions, raise_first(futures), strict=True):
            (kept,) = answer.results
            assert isinstance(kept, SnapshotContents)
            listings[worker] = kept.entries
        tensors, numbers = reading.optimizer_entries(listings)
        return OptimizerContents(tensors=tensors, numbers=numbers)

    def versions(self) -> dict[Key, TensorSource]:
        """Return where versions of parameters lie, if there are any."""
        found: dict[Key, TensorSource] = {}
        remote = self._remote
        for key, numbers in remote.versions.keys.items() if remote.branched else ():
            reading = remote.reading()
            found |= dataclasses.replace(reading, numbers=numbers, names=dict(reading.owned)).tensors(key)
        return found

    def wholes(self, sources: Mapping[Key, TensorSource]) -> Iterator[tuple[Key, Tensor]]:
        """Yield tensors, one after the other.

        Raises:
            OneboxError: A worker failed, or the pool is closed.
        """
        whole: Tensor | None = None
        for piece, rows in self._fetched(sources.values()):
            source = sources[piece.key]
            whole = torch.empty(source.spec.shape, dtype=DTYPES[source.spec.dtype]) if whole is None else whole
            write_rows(whole, source.placement, piece, rows)
            if piece is source.pieces[-1]:
                yield piece.key, whole
                whole = None

    def elements(self, sources: Mapping[Key, TensorSource]) -> Iterator[Tensor]:
        """Yield the elements of tensors in their order, one tensor behind the other, in parts as they come.

        Raises:
            OneboxError: A worker failed, or the pool is closed.
        """
        whole: Tensor | None = None
        for piece, rows in self._fetched(sources.values()):
            source = sources[piece.key]
            if not source.split:
                yield rows
                continue
            whole = torch.empty(source.spec.shape, dtype=DTYPES[source.spec.dtype]) if whole is None else whole
            write_rows(whole, source.placement, piece, rows)
            if piece is source.pieces[-1]:
                yield whole
                whole = None

    def _fetched(self, sources: Iterable[TensorSource]) -> Iterator[tuple[TensorPiece, Tensor]]:
        """Yield pieces with what came for them, in order; a few are under way."""
        running: deque[tuple[list[TensorPiece], dict[int, Future[WorkerReply]]]] = deque()
        for batch in group_pieces(piece for source in sources for piece in source.pieces):
            running.append((batch, self._ask(batch)))
            if len(running) >= _AHEAD:
                yield from _taken(*running.popleft())
        while running:
            yield from _taken(*running.popleft())

    def _ask(self, batch: list[TensorPiece]) -> dict[int, Future[WorkerReply]]:
        workers = dict.fromkeys(piece.worker for piece in batch)
        return {
            worker: self._pool.post(
                worker, [piece.instruction for piece in batch if piece.worker == worker], answer=True
            )
            for worker in workers
        }

    # ---- to the workers

    def write(self, changes: Mapping[str, Tensor]) -> None:
        """Let parameters and buffers be others from here on, where they lie on all their holders.

        Steps that have been asked for before are computed with what was there before.

        Args:
            changes: By name; those that no worker holds are passed over.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        remote = self._remote
        holdings = remote.holdings
        for name, tensor in changes.items():
            placement, number = holdings.placement(name), remote.named.numbers[name]
            frames: dict[int, tuple[TensorSpec, memoryview]] = {}
            for worker in holdings.holders.get(name, ()):
                share = holdings.share(worker, name)
                if share not in frames:
                    part = shard_of(tensor, placement, share) if isinstance(placement, Shard) else tensor
                    frames[share] = spec_of(part), to_frame(part)
                spec, frame = frames[share]
                self._pool.post(worker, [Put((number,), (spec,), there=True)], [frame])

    def write_optimizer(self, entries: OptimizerEntries, *, host: bool) -> None:
        """Let the optimizer remember something else from here on, and nothing of what it remembered before.

        Args:
            entries: What.
            host: Whether it steps in the memory of each holder's host.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        remote = self._remote
        for worker, held in remote.reading().trained.items():
            listed, tensors = state_entries(remote.share(worker, remote.holdings, entries), held)
            delay = remote.versions.delay
            definition = optimizer_definition(remote.optimizer, remote.named, held, listed, host=host, delay=delay)
            self._pool.post(
                worker, [Define(remote.optimizer_number, definition)], [to_frame(tensor.clone()) for tensor in tensors]
            )
        remote.resend_options()


def _taken(
    batch: list[TensorPiece], futures: Mapping[int, Future[WorkerReply]]
) -> Iterator[tuple[TensorPiece, Tensor]]:
    answers = dict(zip(futures, raise_first(list(futures.values())), strict=True))
    frames = {worker: iter(answer.frames) for worker, answer in answers.items()}
    for piece in batch:
        yield piece, from_frame(piece.spec, next(frames[piece.worker]))
