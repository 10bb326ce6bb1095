"""Execution of moves of the training state: uploads, downloads, transfers between workers, directly or relayed.

Relayed parts pass through the client in pieces, of which a few are in flight: client memory is bounded for a state of
any size, and no connection between workers is needed while workers come and go. After the loss of one worker of many,
the parts of a snapshot that must be relayed are a small fraction of the state.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from onebox.engine.state.moves import CLIENT, Region, StateItem, StateLayout, StateMove, local_start, plan_moves
from onebox.engine.state.pieces import TensorPiece, TensorSource, group_pieces
from onebox.engine.state.snapshot_layout import SnapshotLayout, SnapshotLocation
from onebox.graph.shard.placements import REPLICATE, Placement, shard_of
from onebox.pool import Pool, WorkerReply, raise_first
from onebox.wire import DTYPES, TensorSpec, from_frame, spec_of, to_frame
from onebox.wire.protocol.instructions import Receive, Send
from onebox.wire.protocol.requests import Instruction, Put
from onebox.wire.protocol.snapshots import Extent, Read, Write, layout, pieces

_AHEAD = 4
"""Requests of about 4 MiB in flight to the client: 300 MiB/s at a round trip of 50 ms."""

_ANSWERED_BYTES = 16 << 20
_UPLOADED_BYTES = 32 << 20
"""Bytes uploaded to a worker after which an answer is requested, and most bytes whose answer is awaited while further
tensors are read: small states are uploaded without waiting; of large ones few tensors are in the client's memory."""

_CHANNEL = 0
"""Shared with steps: their earlier messages have been requested before, their later ones are requested after."""

_T = TypeVar("_T")


def _in_window(
    posted: Iterable[tuple[_T, Sequence[Future[WorkerReply]]]], ahead: int = _AHEAD
) -> Iterator[tuple[_T, list[WorkerReply]]]:
    """Yield the replies to requests, which are posted by iteration, in order; a few are in flight."""
    running: deque[tuple[_T, Sequence[Future[WorkerReply]]]] = deque()
    for each in posted:
        running.append(each)
        if len(running) >= ahead:
            what, futures = running.popleft()
            yield what, raise_first(futures)
    for what, futures in running:
        yield what, raise_first(futures)


# ---- elements


def copy_region(region: Region, target: Tensor, at: Region, source: Tensor, of: Region) -> None:
    """Copy elements from one part of a tensor to another.

    Args:
        region: The elements; both parts have them.
        target: The part to write to.
        at: The elements that it has.
        source: The part to read from.
        of: The elements that it has.
    """
    for ranges in itertools.product(*region.values()):
        to, part = target, source
        for dim, (start, end) in zip(region, ranges, strict=True):
            to = to.narrow(dim, local_start(at, dim, start), end - start)
            part = part.narrow(dim, local_start(of, dim, start), end - start)
        to.copy_(part)


# ---- from the client


def upload(
    pool: Pool,
    moves: Sequence[StateMove],
    placements: Mapping[str, Placement],
    tensors: Iterable[tuple[str, Tensor]],
    numbers: Mapping[str, int],
    *,
    there: bool = False,
    copy: Collection[str] = (),
    wait: bool = False,
) -> None:
    """Upload parts of tensors of the client, one tensor after the other.

    Args:
        pool: The pool.
        moves: The moves.
        placements: Sharding of the names that are split.
        tensors: The whole tensors with their names, in the order of the uploads.
        numbers: The buffer of each.
        there: Whether the buffers exist.
        copy: Names of tensors that may change before they have been sent.
        wait: Whether to wait for the workers when much is under way, so that of tensors which iteration reads only a
            few are in memory.

    Raises:
        OneboxError: The pool is broken or closed; with ``wait``, also that a worker refuses a tensor.
    """
    by_name: dict[str, list[StateMove]] = {}
    for move in moves:
        by_name.setdefault(move.item.name, []).append(move)
    under_way = _UploadWindow()
    for name, tensor in tensors:
        frames: dict[StateItem, tuple[TensorSpec, memoryview]] = {}
        for move in by_name.get(name, ()):
            if move.item not in frames:
                part = shard_of(tensor.detach(), placements.get(name, REPLICATE), move.item.rank)
                part = part.clone() if name in copy and move.region is None else part
                frames[move.item] = spec_of(part), to_frame(part)
            spec, frame = frames[move.item]
            answer = wait and under_way.due(move.target, len(frame))
            future = pool.post(move.target, [Put((numbers[name],), (spec,), there=there)], [frame], answer=answer)
            if answer:
                under_way.add(future, len(frame))
        del tensor, frames
        under_way.wait()


class _UploadWindow:
    """The uploads whose answers are awaited."""

    def __init__(self) -> None:
        self._since: Counter[int] = Counter()
        self._awaited: deque[tuple[Future[WorkerReply], int]] = deque()

    def due(self, worker: int, size_bytes: int) -> bool:
        """Count an upload to a worker; return whether it is to be answered."""
        self._since[worker] += size_bytes
        if self._since[worker] < _ANSWERED_BYTES:
            return False
        self._since[worker] = 0
        return True

    def add(self, future: Future[WorkerReply], size_bytes: int) -> None:
        """Add an upload that is answered."""
        self._awaited.append((future, max(size_bytes, _ANSWERED_BYTES)))

    def wait(self) -> None:
        """Wait for the oldest answers until few bytes are under way.

        Raises:
            OneboxError: A worker refuses a tensor, or was lost.
        """
        while sum(size for _, size in self._awaited) > _UPLOADED_BYTES:
            raise_first([self._awaited.popleft()[0]])


# ---- to the client


def download(pool: Pool, sources: Iterable[TensorSource], ahead: int = _AHEAD) -> Iterator[tuple[TensorPiece, Tensor]]:
    """Yield the pieces of tensors with their elements, in order.

    Args:
        pool: The pool.
        sources: The tensors.
        ahead: Requests in flight.

    Raises:
        OneboxError: A worker failed, or the pool is closed.
    """

    def posted() -> Iterator[tuple[list[TensorPiece], list[Future[WorkerReply]]]]:
        for batch in group_pieces(piece for source in sources for piece in source.pieces):
            asked: dict[int, list[Instruction]] = {}
            for piece in batch:
                asked.setdefault(piece.worker, []).append(piece.instruction)
            yield batch, [pool.post(worker, own, answer=True) for worker, own in asked.items()]

    for batch, answers in _in_window(posted(), ahead):
        workers = dict.fromkeys(piece.worker for piece in batch)
        frames = {worker: iter(answer.frames) for worker, answer in zip(workers, answers, strict=True)}
        for piece in batch:
            yield piece, from_frame(piece.spec, next(frames[piece.worker]))


def write_piece(whole: Tensor, piece: TensorPiece, rows: Tensor) -> None:
    """Write the received rows of a piece to their place in the whole tensor."""
    copy_region(piece.region, whole.detach(), {}, rows, piece.region)


def download_wholes(
    pool: Pool, sources: Mapping[tuple[str, str], TensorSource], *, chunks: bool = False, ahead: int = _AHEAD
) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield whole tensors in sequence, by key.

    Args:
        pool: The pool.
        sources: The tensors.
        chunks: Whether to yield those that are not split in chunks of rows, as they arrive.
        ahead: Requests in flight.

    Raises:
        OneboxError: A worker failed, or the pool is closed.
    """
    whole: Tensor | None = None
    for piece, rows in download(pool, sources.values(), ahead):
        source = sources[piece.key]
        if chunks and not source.split:
            yield piece.key, rows
            continue
        whole = torch.empty(source.spec.shape, dtype=DTYPES[source.spec.dtype]) if whole is None else whole
        write_piece(whole, piece, rows)
        if piece is source.pieces[-1]:
            yield piece.key, whole
            whole = None


# ---- between workers


@dataclass(frozen=True, kw_only=True)
class PeerExchange:
    """Instructions of direct transfers between workers: a worker sends its parts before it receives any.

    Args:
        group: The group of all senders and receivers.
        members: Its members.
        sent: Instructions of each sender.
        received: Instructions of each receiver.
    """

    group: int
    members: Sequence[int]
    sent: dict[int, list[Instruction]] = field(default_factory=dict)
    received: dict[int, list[Instruction]] = field(default_factory=dict)

    def carry(self, move: StateMove, number: int, spec: TensorSpec) -> None:
        """Add the transfer of a buffer."""
        send = Send(number, self.group, self.members.index(move.target), _CHANNEL)
        self.sent.setdefault(move.source, []).append(send)
        receive = Receive(number, spec, self.group, self.members.index(move.source), _CHANNEL)
        self.received.setdefault(move.target, []).append(receive)

    @property
    def instructions(self) -> dict[int, list[Instruction]]:
        """All instructions of each worker."""
        workers = sorted({*self.sent, *self.received})
        return {worker: [*self.sent.get(worker, ()), *self.received.get(worker, ())] for worker in workers}


class WantedPart(NamedTuple):
    """A part of the state that a worker needs.

    Args:
        item: The part.
        placement: The present sharding of the name.
        spec: Shape and type of the part.
    """

    item: StateItem
    placement: Placement
    spec: TensorSpec


def restore_parts(
    pool: Pool, copies: SnapshotLayout, worker: int, wanted: Sequence[WantedPart]
) -> Iterator[tuple[int, int]]:
    """Send a worker the parts of a snapshot that it lacks; return where in its slots all wanted parts are.

    Args:
        pool: The pool.
        copies: The snapshot; new copies are recorded in it.
        worker: The receiving worker.
        wanted: The parts that it needs.

    Raises:
        OneboxError: A worker was lost.
    """
    before, located = copies.held()
    items = [copies.unranked(each.item) for each in wanted]
    placements = {each.item.name: each.placement for each in wanted}
    after = StateLayout(parts={worker: items}, placements=placements, scalars=before.scalars)
    moves: dict[StateItem, list[StateMove]] = {}
    for move in plan_moves(before, after, between="relay"):
        moves.setdefault(move.item, []).append(move)
    lacking = [(item, each) for item, each in zip(items, wanted, strict=True) if item in moves]
    starts, size_bytes = layout(each.spec for _, each in lacking)
    slot = pool.new_number() if lacking else 0
    if lacking:
        copies.slots.add((worker, slot))
        pool.post(worker, [Write(slot, 0, size_bytes)], [b""])
    brought = {}
    for (item, each), start in zip(lacking, starts, strict=True):
        at = start
        for frame in _relayed(pool, copies, moves[item], each.spec, (before, after), located):
            pool.post(worker, [Write(slot, at, size_bytes)], [frame])
            at += len(frame)
        brought[item] = SnapshotLocation(worker, slot, start)
        if copies.placements.get(item.name, REPLICATE) == each.placement:
            copies.add(each.item, brought[item])
    for item in items:
        place = brought.get(item) or located[worker, item]
        yield place.slot, place.start


def _relayed(
    pool: Pool,
    copies: SnapshotLayout,
    moves: Sequence[StateMove],
    spec: TensorSpec,
    layouts: tuple[StateLayout, StateLayout],
    located: Mapping[tuple[int, StateItem], SnapshotLocation],
) -> Iterator[Any]:
    """Yield the bytes of a part, in pieces, as the moves bring them."""
    if moves[0].region is None:
        yield from _pieces(pool, copies, located[moves[0].source, moves[0].shard], spec)
        return
    before, after = layouts
    part = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
    for move in moves:
        assert move.region is not None
        place = located[move.source, move.shard]
        own = copies.specs[move.shard]
        shard = from_frame(own, b"".join(bytes(frame) for frame in _pieces(pool, copies, place, own)))
        copy_region(move.region, part, after.region(move.item), shard, before.region(move.shard))
    yield to_frame(part)


def _pieces(pool: Pool, copies: SnapshotLayout, place: SnapshotLocation, spec: TensorSpec) -> Iterator[Any]:
    """Yield the bytes of a tensor from its place."""
    extents = pieces([(place.start, spec.size_bytes)])
    if place.worker == CLIENT:
        slot = memoryview(copies.here[place.slot])
        yield from (bytes(slot[start : start + size]) for start, size in extents)
        return

    def posted() -> Iterator[tuple[Extent, list[Future[WorkerReply]]]]:
        for start, size in extents:
            yield (start, size), [pool.post(place.worker, [Read(place.slot, start, size)], answer=True)]

    for _, (answer,) in _in_window(posted()):
        yield answer.frames[0]


def wanted_spec(copies: SnapshotLayout, item: StateItem, placement: Placement, spec: TensorSpec) -> TensorSpec:
    """Return the spec of an optimizer entry for a shard of a parameter.

    Args:
        copies: The snapshot.
        item: The entry.
        placement: The present sharding of the parameter.
        spec: Spec of the shard.
    """
    if copies.placements.get(item.name, REPLICATE) == placement:
        return copies.specs[item]
    kept = copies.specs[StateItem(item.name, item.key, 0)]
    return TensorSpec(kept.dtype, spec.shape) if kept.shape else kept
