"""Reading the training state in pieces, each from one responsible worker. Pure.

A piece is a range of rows of a tensor on one worker, so that a state of any size passes through the client with little
memory: received pieces are written to their places, and few are in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from onebox.engine.partition.sharding_spec import ShardingSpec
from onebox.graph.shard.placements import REPLICATE, Placement, Shard
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Get
from onebox.wire.protocol.requests import Instruction
from onebox.wire.protocol.snapshots import PIECE_BYTES, Lay, Number, Remembered, StateEntry

Key = tuple[str, str]
"""A part of the state: the parameter or buffer, and the key of an optimizer entry or of another version of it; empty
for the tensor itself."""


@dataclass(frozen=True, kw_only=True)
class TensorPiece:
    """Rows of a tensor on one worker.

    Args:
        key: Key of the tensor.
        worker: The worker to read from.
        instruction: The request.
        spec: Spec of the reply.
        share: Index of the shard that the rows belong to; 0 if it is not split.
        first: Index of the first row.
        rows: Number of rows; 0 for the whole tensor.
    """

    key: Key
    worker: int
    instruction: Instruction
    spec: TensorSpec
    share: int
    first: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class TensorSource:
    """Location of a tensor, or of the shards of a split one.

    Args:
        spec: Spec of the whole tensor.
        pieces: Pieces to read, in order.
        placement: Its sharding.
    """

    spec: TensorSpec
    pieces: tuple[TensorPiece, ...]
    placement: Placement

    @property
    def split(self) -> bool:
        """True if several shards form the whole."""
        return isinstance(self.placement, Shard)


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """Assignment of the state's parts to the workers that they are read from.

    Args:
        numbers: The buffer of each parameter and buffer, by name.
        specs: Spec of each.
        names: For each worker, the names that are read from it, whole or as shards.
        optimizer: Number of the optimizer's definition.
        trained: For each worker, the parameters that its optimizer updates, in order.
        owned: For each worker, those whose optimizer state is read from it.
        holdings: The sharding spec; ``None`` if nothing is split.
    """

    numbers: Mapping[str, int]
    specs: Mapping[str, TensorSpec]
    names: Mapping[int, tuple[str, ...]]
    optimizer: int
    trained: Mapping[int, tuple[str, ...]]
    owned: Mapping[int, tuple[str, ...]]
    holdings: ShardingSpec | None

    def tensors(self, key: str = "") -> dict[Key, TensorSource]:
        """Return the locations of parameters and buffers.

        Args:
            key: Key of the version; empty for the tensors themselves.
        """
        found: dict[Key, list[TensorPiece]] = {}
        for worker, names in self.names.items():
            for name in names:
                spec, number = self._spec(worker, name), self.numbers[name]
                found.setdefault((name, key), []).extend(
                    TensorPiece(
                        key=(name, key),
                        worker=worker,
                        instruction=Get((number,), first, rows),
                        spec=part,
                        share=self._share(worker, name),
                        first=first,
                        rows=rows,
                    )
                    for part, first, rows in _rows(spec, whole=self._as_a_whole(name))
                )
        return {
            at: TensorSource(spec=self.specs[at[0]], pieces=tuple(pieces), placement=self._placement(at[0]))
            for at, pieces in found.items()
        }

    def optimizer_questions(self) -> dict[int, list[Instruction]]:
        """Return the requests to each worker for a listing of its optimizer state."""
        return {worker: [Lay(self.optimizer)] for worker, owned in self.owned.items() if owned}

    def optimizer_entries(
        self, listings: Mapping[int, Sequence[StateEntry]]
    ) -> tuple[dict[Key, TensorSource], dict[Key, Number]]:
        """Return the locations of the optimizer's tensors, and its scalar entries.

        Args:
            listings: The workers' replies.
        """
        found: dict[Key, dict[int, list[TensorPiece]]] = {}
        shares: dict[Key, TensorSpec] = {}
        numbers: dict[Key, Number] = {}
        for worker, entries in listings.items():
            for entry in entries:
                name = self.trained[worker][entry.parameter]
                if name not in self.owned[worker]:
                    continue
                key = (name, entry.key)
                if isinstance(entry.value, TensorSpec):
                    shares[key] = entry.value
                    share = self._share(worker, name)
                    found.setdefault(key, {})[share] = self._entry_pieces(worker, key, entry, entry.value, share)
                else:
                    numbers.setdefault(key, entry.value)
        return {key: self._source(key, shares[key], own) for key, own in found.items()}, numbers

    def _entry_pieces(
        self, worker: int, key: Key, entry: StateEntry, spec: TensorSpec, share: int
    ) -> list[TensorPiece]:
        return [
            TensorPiece(
                key=key,
                worker=worker,
                instruction=Remembered(self.optimizer, entry.parameter, entry.key, first, rows),
                spec=part,
                share=share,
                first=first,
                rows=rows,
            )
            for part, first, rows in _rows(spec, whole=self._as_a_whole(key[0]))
        ]

    def _source(self, key: Key, share: TensorSpec, pieces: Mapping[int, list[TensorPiece]]) -> TensorSource:
        """Combine an entry of the optimizer's state from those of its parameter's shards."""
        placement = self._placement(key[0])
        if len(pieces) == 1 or not share.shape or not isinstance(placement, Shard):
            return TensorSource(spec=share, pieces=tuple(pieces[min(pieces)]), placement=REPLICATE)
        size = placement.blocks * placement.block
        whole = TensorSpec(share.dtype, (*share.shape[: placement.dim], size, *share.shape[placement.dim + 1 :]))
        return TensorSource(
            spec=whole, pieces=tuple(piece for at in sorted(pieces) for piece in pieces[at]), placement=placement
        )

    def _spec(self, worker: int, name: str) -> TensorSpec:
        return self.holdings.spec(worker, name, self.specs[name]) if self.holdings else self.specs[name]

    def _share(self, worker: int, name: str) -> int:
        return self.holdings.share(worker, name) if self.holdings else 0

    def _placement(self, name: str) -> Placement:
        return self.holdings.placement(name) if self.holdings else REPLICATE

    def _as_a_whole(self, name: str) -> bool:
        """Return whether a shard must be read at once, because its rows are not rows of the whole."""
        placement = self._placement(name)
        return isinstance(placement, Shard) and not placement.dim


def _rows(spec: TensorSpec, *, whole: bool) -> Iterator[tuple[TensorSpec, int, int]]:
    """Split a tensor into ranges of rows that travel at once: spec, first row, and number of rows; 0 for all."""
    if whole or spec.size_bytes <= PIECE_BYTES or not spec.shape:
        yield spec, 0, 0
        return
    count = spec.shape[0]
    most = max(1, PIECE_BYTES * count // spec.size_bytes)
    for first in range(0, count, most):
        rows = min(most, count - first)
        yield TensorSpec(spec.dtype, (rows, *spec.shape[1:])), first, rows


def group_pieces(pieces: Iterable[TensorPiece]) -> Iterator[list[TensorPiece]]:
    """Group small pieces into requests."""
    found: list[TensorPiece] = []
    size_bytes = 0
    for piece in pieces:
        if found and size_bytes + piece.spec.size_bytes > PIECE_BYTES:
            yield found
            found, size_bytes = [], 0
        found.append(piece)
        size_bytes += piece.spec.size_bytes
    if found:
        yield found


def write_rows(whole: Tensor, placement: Placement, piece: TensorPiece, rows: Tensor) -> None:
    """Write the rows of a piece to their place in the whole.

    Args:
        whole: The destination; written to.
        placement: Its sharding.
        piece: The piece.
        rows: The received rows.
    """
    target = whole.detach()
    if isinstance(placement, Shard):
        dim, size = placement.dim, placement.sizes[piece.share]
        target = target.unflatten(dim, (placement.blocks, placement.block))
        target = target.narrow(dim + 1, placement.start(piece.share), size)
        rows = rows.unflatten(dim, (placement.blocks, size))
    if piece.rows:
        target = target.narrow(0, piece.first, piece.rows)
    target.copy_(rows)
