"""Pieces of the training state that the client reads, each from one responsible worker. Pure.

A piece is a range of rows of a tensor on one worker, so that a state of any size passes through the client with little
memory: received pieces are written to their places, and few are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from onebox.engine.state.moves import CLIENT, Region, StateItem, StateLayout, StateMove, plan_moves
from onebox.graph.shard.placements import Shard
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Get
from onebox.wire.protocol.requests import Instruction
from onebox.wire.protocol.responses import SnapshotContents
from onebox.wire.protocol.snapshots import PIECE_BYTES, Read, Remembered, Snapshot, layout

Key = tuple[str, str]
"""A tensor of the state: the parameter or buffer, and the key of an optimizer entry or of another version of it; empty
for the tensor itself."""

Request = Callable[[StateItem, int, int], Instruction]
"""Returns the request for rows of a part: first row, and number of rows; 0 for all."""


@dataclass(frozen=True, kw_only=True)
class TensorPiece:
    """Rows of a tensor on one worker.

    Args:
        key: Key of the tensor.
        worker: The worker to read from.
        instruction: The request.
        spec: Spec of the reply.
        region: The elements of the whole tensor.
    """

    key: Key
    worker: int
    instruction: Instruction
    spec: TensorSpec
    region: Region


@dataclass(frozen=True, kw_only=True)
class TensorSource:
    """Location of a tensor, or of the shards of a split one.

    Args:
        spec: Spec of the whole tensor.
        pieces: Pieces to read, in order.
        split: Whether several shards form the whole.
    """

    spec: TensorSpec
    pieces: tuple[TensorPiece, ...]
    split: bool


def find_tensor_sources(
    layout: StateLayout, specs: Mapping[StateItem, TensorSpec], request: Request
) -> dict[Key, TensorSource]:
    """Return the pieces that download all tensors of a layout.

    Args:
        layout: The workers' parts.
        specs: Spec of each part, in the order of the result.
        request: Returns the requests.
    """
    wholes = dict.fromkeys(item._replace(rank=0) for item in specs)
    moves: dict[StateItem, list[StateMove]] = {}
    for move in plan_moves(layout, StateLayout(parts={CLIENT: [*wholes]}, scalars=layout.scalars)):
        moves.setdefault(move.item, []).append(move)
    found = {}
    for item, own in moves.items():
        spec, placement = specs[own[0].shard], layout.placement(item)
        if isinstance(placement, Shard):
            size = placement.blocks * placement.block
            spec = TensorSpec(spec.dtype, (*spec.shape[: placement.dim], size, *spec.shape[placement.dim + 1 :]))
        pieces = tuple(piece for move in own for piece in _cut(move, specs[move.shard], request))
        found[item.name, item.key] = TensorSource(spec=spec, pieces=pieces, split=isinstance(placement, Shard))
    return found


def _cut(move: StateMove, spec: TensorSpec, request: Request) -> Iterator[TensorPiece]:
    """Split a move into ranges of rows that travel at once.

    A shard along the rows travels as a whole, because its rows are not consecutive in the whole tensor.
    """
    region, key = move.region or {}, (move.item.name, move.item.key)
    if 0 in region or spec.size_bytes <= PIECE_BYTES or not spec.shape:
        instruction = request(move.shard, 0, 0)
        yield TensorPiece(key=key, worker=move.source, instruction=instruction, spec=spec, region=region)
        return
    count = spec.shape[0]
    most = max(1, PIECE_BYTES * count // spec.size_bytes)
    for first in range(0, count, most):
        rows = min(most, count - first)
        yield TensorPiece(
            key=key,
            worker=move.source,
            instruction=request(move.shard, first, rows),
            spec=TensorSpec(spec.dtype, (rows, *spec.shape[1:])),
            region={**region, 0: ((first, first + rows),)},
        )


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


def snapshots_of(sources: Iterable[TensorSource], new: Callable[[], int]) -> dict[int, Snapshot]:
    """Return the snapshot of each worker that holds all that is read from it.

    Args:
        sources: The tensors.
        new: Returns an unused number.
    """
    buffers: dict[int, dict[int, None]] = {}
    optimizers: dict[int, int] = {}
    for piece in (piece for source in sources for piece in source.pieces):
        own = buffers.setdefault(piece.worker, {})
        match piece.instruction:
            case Get():
                own.update(dict.fromkeys(piece.instruction.buffers))
            case Remembered():
                optimizers[piece.worker] = piece.instruction.optimizer
    return {worker: Snapshot(new(), tuple(own), optimizers.get(worker, 0)) for worker, own in buffers.items()}


def read_from_slots(
    sources: Mapping[Key, TensorSource], taken: Mapping[int, Snapshot], kept: Mapping[int, SnapshotContents]
) -> dict[Key, TensorSource]:
    """Return tensors as they were when snapshots were taken.

    Args:
        sources: The tensors.
        taken: The snapshot of each worker; see :func:`snapshots_of`.
        kept: What it contains.
    """
    places = {worker: _places(snapshot, kept[worker]) for worker, snapshot in taken.items()}

    def moved(piece: TensorPiece) -> TensorPiece:
        asked = piece.instruction
        assert isinstance(asked, Get | Remembered)
        at = asked.buffers[0] if isinstance(asked, Get) else (asked.parameter, asked.key)
        start, spec = places[piece.worker][at]
        start += asked.first * (spec.size_bytes // spec.shape[0]) if asked.first else 0
        return replace(piece, instruction=Read(taken[piece.worker].slot, start, piece.spec.size_bytes))

    return {key: replace(source, pieces=tuple(map(moved, source.pieces))) for key, source in sources.items()}


def _places(snapshot: Snapshot, kept: SnapshotContents) -> dict[int | tuple[int, str], tuple[int, TensorSpec]]:
    """Return the offset in its slot, and the spec, of each buffer and of each entry of the optimizer."""
    entries = [entry for entry in kept.entries if isinstance(entry.value, TensorSpec)]
    keys: list[int | tuple[int, str]] = [*snapshot.buffers, *((entry.parameter, entry.key) for entry in entries)]
    specs = [*kept.specs, *(entry.value for entry in entries if isinstance(entry.value, TensorSpec))]
    starts, _ = layout(specs)
    return dict(zip(keys, zip(starts, specs, strict=True), strict=True))
