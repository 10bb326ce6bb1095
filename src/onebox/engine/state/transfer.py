"""Transfer of the training state between workers and client, piece by piece, with bounded memory."""

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
"""Requests of about 4 MiB in flight to the client: 300 MiB/s at a round trip of 50 ms."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerContents:
    """State of an optimizer.

    Args:
        tensors: Location of its tensors.
        numbers: Scalar entries.
        here: Tensors that have not been uploaded to the workers yet.
    """

    tensors: Mapping[Key, TensorSource] = dataclasses.field(default_factory=dict)
    numbers: Mapping[Key, Number] = dataclasses.field(default_factory=dict)
    here: Mapping[Key, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StateChanges:
    """User changes of a state, as independent copies.

    Args:
        tensors: New parameters and buffers, by name.
        entries: The whole new optimizer state; ``None`` if it is unchanged.
    """

    tensors: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    entries: OptimizerEntries | None = None

    def then(self, later: StateChanges) -> StateChanges:
        """Return the combination of these changes and later ones."""
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
        remote: The remote state.
    """

    def __init__(self, pool: Pool, remote: RemoteState) -> None:
        self._pool = pool
        self._remote = remote

    # ---- from the workers

    def into(self, tensors: Mapping[str, Tensor]) -> None:
        """Write parameters and buffers, read from their first holders, into tensors of the same kind.

        Args:
            tensors: Destinations by name; those that no worker holds are left unchanged.

        Raises:
            OneboxError: A worker failed, or the pool is closed; some destinations may have been written.
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
        """Return the locations of parameters and buffers that workers hold.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        self._pool.post(self._pool.present[0], ())  # raises the error of a broken or closed pool
        return self._remote.reading().tensors()

    def not_held(self) -> dict[Key, Tensor]:
        """Return the parameters and buffers that no worker holds; the user's own tensors are the state."""
        held = self.held()
        return {(name, ""): tensor for name, tensor in self._remote.named.tensors.items() if name not in held}

    def held(self) -> frozenset[str]:
        """Return the names of the parameters and buffers that workers hold."""
        return frozenset(self._remote.reading().specs)

    def optimizer_state(self) -> OptimizerEntries:
        """Return the optimizer's state, as (parameter, key, value).

        Raises:
            OneboxError: A worker failed, or the pool is closed.
        """
        remembered = self.remembered()
        found: OptimizerEntries = [(*key, value) for key, value in remembered.numbers.items()]
        found += [(*key, tensor) for key, tensor in remembered.here.items()]
        found += [(*key, tensor) for key, tensor in self.wholes(remembered.tensors)]
        return found

    def remembered(self) -> OptimizerContents:
        """Return the locations of the optimizer's state.

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
        """Return the locations of parameter versions, if there are any."""
        found: dict[Key, TensorSource] = {}
        remote = self._remote
        for key, numbers in remote.versions.keys.items() if remote.branched else ():
            reading = remote.reading()
            found |= dataclasses.replace(reading, numbers=numbers, names=dict(reading.owned)).tensors(key)
        return found

    def wholes(self, sources: Mapping[Key, TensorSource]) -> Iterator[tuple[Key, Tensor]]:
        """Yield whole tensors in sequence.

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
        """Yield the elements of tensors in order, one tensor after the other, in chunks as they arrive.

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
        """Yield pieces with their contents, in order; a few are in flight."""
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
        """Replace parameters and buffers on all their holders.

        Steps requested earlier use the previous values.

        Args:
            changes: New values by name; those that no worker holds are ignored.

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
        """Replace the whole optimizer state.

        Args:
            entries: The new state.
            host: Whether it is in the memory of each holder's host.

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
