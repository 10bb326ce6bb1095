"""Restoring a snapshot: each worker reads its own copies, and receives the missing parts from other workers.

Missing parts pass through the client in pieces, of which a few are in flight: client memory is bounded for a state of
any size, and no connection between workers is needed while workers come and go. After the loss of one worker of many,
the missing parts are a small fraction of the state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from torch import Tensor

from onebox.engine.partition.sharding_spec import ShardingSpec
from onebox.engine.state.snapshot_layout import CLIENT, SnapshotLayout, SnapshotLocation, StateItem
from onebox.graph.shard.placements import REPLICATE, Placement, Shard, shard_of, unshard
from onebox.pool import Pool, WorkerReply, raise_first
from onebox.wire import TensorSpec, from_frame, spec_of, to_frame
from onebox.wire.protocol.requests import Put
from onebox.wire.protocol.snapshots import Read, Write, layout, pieces

_AHEAD = 4
"""Pieces in flight to the client."""


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
    """Send a worker the parts that it lacks; return where in its slots all wanted parts are.

    Args:
        pool: The pool.
        copies: The snapshot; new copies are recorded in it.
        worker: The receiving worker.
        wanted: The parts that it needs.

    Raises:
        OneboxError: A worker was lost.
    """
    found = [None if _resplit(copies, each) else copies.at(worker, each.item) for each in wanted]
    lacking = [each for each, place in zip(wanted, found, strict=True) if place is None]
    starts, size_bytes = layout(each.spec for each in lacking)
    slot = pool.new_number() if lacking else 0
    if lacking:
        copies.slots.add((worker, slot))
        pool.post(worker, [Write(slot, 0, size_bytes)], [b""])
    brought = []
    for each, start in zip(lacking, starts, strict=True):
        at = start
        for frame in _fetched(pool, copies, each):
            pool.post(worker, [Write(slot, at, size_bytes)], [frame])
            at += len(frame)
        place = SnapshotLocation(worker, slot, start)
        brought.append(place)
        if not _resplit(copies, each):
            copies.add(each.item, place)
    left = iter(brought)
    for own in found:
        place = own or next(left)
        yield place.slot, place.start


def _resplit(copies: SnapshotLayout, wanted: WantedPart) -> bool:
    """Return whether the sharding of a part has changed."""
    before = copies.placements.get(wanted.item.name, REPLICATE)
    return before != wanted.placement and (isinstance(before, Shard) or isinstance(wanted.placement, Shard))


def _fetched(pool: Pool, copies: SnapshotLayout, wanted: WantedPart) -> Iterator[Any]:
    """Yield the bytes of a part, in pieces."""
    item = wanted.item
    if not _resplit(copies, wanted):
        yield from _pieces(pool, copies, copies.places[item][0], copies.specs[item])
        return
    before = copies.placements.get(item.name, REPLICATE)
    ranks = len(before.sizes) if isinstance(before, Shard) else 1
    items = [StateItem(item.name, item.key, rank) for rank in range(ranks)]
    shares = [_tensor(pool, copies, copies.places[each][0], copies.specs[each]) for each in items]
    if item.key and not shares[0].dim():  # such as a step count, which every shard has
        yield to_frame(shares[0])
        return
    whole = unshard(shares, before) if ranks > 1 else shares[0]
    yield to_frame(shard_of(whole, wanted.placement, item.rank))


def _tensor(pool: Pool, copies: SnapshotLayout, place: SnapshotLocation, spec: TensorSpec) -> Tensor:
    return from_frame(spec, b"".join(bytes(frame) for frame in _pieces(pool, copies, place, spec)))


def _pieces(pool: Pool, copies: SnapshotLayout, place: SnapshotLocation, spec: TensorSpec) -> Iterator[Any]:
    """Yield the bytes of a tensor from its place."""
    running: deque[Future[WorkerReply]] = deque()
    for start, size in pieces([(place.start, spec.size_bytes)]):
        if place.worker == CLIENT:
            yield bytes(memoryview(copies.here[place.slot])[start : start + size])
            continue
        running.append(pool.post(place.worker, [Read(place.slot, start, size)], answer=True))
        if len(running) >= _AHEAD:
            yield raise_first([running.popleft()])[0].frames[0]
    while running:
        yield raise_first([running.popleft()])[0].frames[0]


def wanted_spec(copies: SnapshotLayout, item: StateItem, placement: Placement, spec: TensorSpec) -> TensorSpec:
    """Return the spec of an optimizer entry for a shard of a parameter.

    Args:
        copies: The snapshot.
        item: The entry.
        placement: The present sharding of the parameter.
        spec: Spec of the shard.
    """
    before = copies.placements.get(item.name, REPLICATE)
    if before == placement:
        return copies.specs[item]
    kept = copies.specs[StateItem(item.name, item.key, 0)]
    return TensorSpec(kept.dtype, spec.shape) if kept.shape else kept


def put_shares(
    pool: Pool, worker: int, whole: Mapping[str, Tensor], numbers: Mapping[str, int], holdings: ShardingSpec
) -> None:
    """Write a worker's shards of tensors that the client has into buffers.

    Args:
        pool: The pool.
        worker: The worker.
        whole: The tensors, by name.
        numbers: The buffer of each.
        holdings: The sharding.

    Raises:
        OneboxError: The pool is broken or closed.
    """
    for name, tensor in whole.items():
        placement = holdings.placement(name)
        part = shard_of(tensor, placement, holdings.ranks[worker]) if isinstance(placement, Shard) else tensor
        pool.post(worker, [Put((numbers[name],), (spec_of(part),))], [to_frame(part.contiguous())])
