"""A snapshot that is brought back: what a worker has stays there, what it lacks comes from others as it has to be."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onebox.engine.compile.order_check import TransferRules, WorkerInstructions, order_faults
from onebox.engine.recovery.snapshot_fetch import SnapshotFetch
from onebox.engine.state.move_executor import (
    PeerExchange,
    WantedPart,
    download,
    download_wholes,
    restore_parts,
    upload,
    wanted_spec,
    write_piece,
)
from onebox.engine.state.moves import CLIENT, StateItem, StateLayout, StateMove, WorkerStateSpec, plan_moves
from onebox.engine.state.pieces import find_tensor_sources
from onebox.engine.state.snapshot_layout import SnapshotLayout, SnapshotLocation, behind_runs, join_runs
from onebox.graph.shard.placements import REPLICATE, Placement, Shard, shard_of
from onebox.pool import WorkerReply
from onebox.wire import TensorSpec, from_frame, spec_of
from onebox.wire.protocol.instructions import Get, OptimizerStep, Receive, Send
from onebox.wire.protocol.requests import Define, OptimizerSpec
from onebox.wire.protocol.responses import SnapshotContents, Tensors
from onebox.wire.protocol.snapshots import PIECE_BYTES, Fill, Read, Snapshot, Write
from tests.unit.engine.state.rigs import Rigs

WEIGHT = torch.arange(48, dtype=torch.float64).reshape(6, 8)


def snapshot_of(rigs: Rigs, placement: Placement, workers: Sequence[int], weight: Tensor = WEIGHT) -> SnapshotLayout:
    """Return a snapshot of a weight and of what AdamW remembers of it, split over some workers or whole on each."""
    copies = SnapshotLayout(placements={} if placement == REPLICATE else {"w": placement})
    for rank, worker in enumerate(workers):
        rig = rigs.rigs[worker]
        rig.put(b1=shard_of(weight, placement, rank).clone(), b2=shard_of(torch.cos(weight), placement, rank).clone())
        rig.do(Define(7, OptimizerSpec("AdamW", (((0,), {"lr": 0.1}),), (1,))), OptimizerStep(7, (2,)))
        (kept,) = rig.do(Snapshot(20, (1,), 7))
        assert isinstance(kept, SnapshotContents)
        part = WorkerStateSpec(names=("w",), trained=("w",), ranks={} if placement == REPLICATE else {"w": rank})
        copies.take(worker, 20, part, kept)
    return copies


def filled(rigs: Rigs, worker: int, wanted: Sequence[WantedPart], places: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return what a worker finds where it has been told to look."""
    numbers = tuple(range(50, 50 + len(wanted)))
    rigs.post(worker, [Fill(numbers, tuple(each.spec for each in wanted), tuple(places))])
    (listing,) = rigs.rigs[worker].do(Get(numbers))
    assert isinstance(listing, Tensors)
    frames = [bytes(frame) for frame in rigs.rigs[worker].frames_out]
    return [from_frame(spec, frame) for spec, frame in zip(listing.specs, frames, strict=True)]


def everything(copies: SnapshotLayout, placement: Placement, rank: int, whole: TensorSpec) -> list[WantedPart]:
    """Return all parts that a rank needs of the weight and of what the optimizer remembers of it."""
    spec = TensorSpec(whole.dtype, placement.local(whole.shape, rank)) if isinstance(placement, Shard) else whole
    found = [WantedPart(StateItem("w", "", rank), placement, spec)]
    for key in copies.keys("w"):
        item = StateItem("w", key, rank)
        found.append(WantedPart(item, placement, wanted_spec(copies, item, placement, spec)))
    return found


def test_what_a_worker_has_is_not_brought() -> None:
    rigs = Rigs(2)
    copies = snapshot_of(rigs, REPLICATE, [0, 1])
    wanted = everything(copies, REPLICATE, 0, spec_of(WEIGHT))
    places = list(restore_parts(rigs.pool, copies, 1, wanted))
    assert not rigs.posted
    assert len(wanted) == 4, "the weight, two moments and a count"
    assert torch.equal(filled(rigs, 1, wanted, places)[0], rigs.rigs[0].get(1))


def test_what_a_worker_lacks_is_brought_in_pieces_and_is_then_kept_there_too() -> None:
    rigs = Rigs(3)
    long = torch.randn(2, PIECE_BYTES // 8 + 3, dtype=torch.float64)
    copies = snapshot_of(rigs, REPLICATE, [0, 1], weight=long)
    wanted = everything(copies, REPLICATE, 0, spec_of(long))
    first = list(restore_parts(rigs.pool, copies, 2, wanted))
    assert rigs.posted[Read] == rigs.posted[Write] - 1 == 3 * 3 + 1, "and once to make the slot"
    expected = filled(rigs, 0, wanted, list(restore_parts(rigs.pool, copies, 0, wanted)))
    for found, one in zip(filled(rigs, 2, wanted, first), expected, strict=True):
        assert torch.equal(found, one)
    copies.lose([0, 1])
    assert copies.missing() is None
    assert list(restore_parts(rigs.pool, copies, 2, wanted)) == first


def test_what_the_client_has_fetched_is_brought_to_a_worker() -> None:
    rigs = Rigs(2)
    long = torch.randn(2, PIECE_BYTES // 8 + 3, dtype=torch.float64)
    copies = snapshot_of(rigs, REPLICATE, [0], weight=long)
    starts = {item: places[0].start for item, places in copies.places.items()}
    runs = join_runs(starts, copies.specs, lambda item: item.name == "w")
    fetch = SnapshotFetch(rigs.pool, 0, 20, runs, over_s=0.0)
    looks = 0
    while not fetch.whole:
        fetch.look()
        looks += 1
    assert rigs.posted[Read] == -(-len(fetch.buffer) // PIECE_BYTES) > looks > 1
    copies.here[77] = fetch.buffer
    for item, start in behind_runs(starts, runs, lambda item: item.name == "w").items():
        copies.add(item, SnapshotLocation(CLIENT, 77, start))
    wanted = everything(copies, REPLICATE, 0, spec_of(long))
    expected = filled(rigs, 0, wanted, list(restore_parts(rigs.pool, copies, 0, wanted)))
    copies.lose([0])
    places = list(restore_parts(rigs.pool, copies, 1, wanted))
    for found, one in zip(filled(rigs, 1, wanted, places), expected, strict=True):
        assert torch.equal(found, one)


def test_what_is_fetched_is_spread_over_time() -> None:
    rigs = Rigs(1)
    copies = snapshot_of(rigs, REPLICATE, [0])
    fetch = SnapshotFetch(rigs.pool, 0, 20, [(0, copies.specs[StateItem("w", "", 0)].size_bytes)], over_s=3600.0)
    fetch.look()
    fetch.look()
    assert rigs.posted[Read] == 1, "the next one is not due yet"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (Shard(0, (3, 3)), Shard(0, (2, 2, 2))),
        (Shard(0, (4, 2)), Shard(1, (5, 3))),
        (Shard(1, (2, 2), blocks=2), REPLICATE),
        (REPLICATE, Shard(1, (1, 7))),
    ],
    ids=["over more", "along another dimension", "no longer", "only now"],
)
def test_what_is_split_otherwise_is_put_together(before: Placement, now: Placement) -> None:
    rigs = Rigs(4)
    holders = range(len(before.sizes)) if isinstance(before, Shard) else range(1)
    copies = snapshot_of(rigs, before, holders)
    whole = Rigs(1)
    unsplit = snapshot_of(whole, REPLICATE, [0])
    wanted = everything(unsplit, REPLICATE, 0, spec_of(WEIGHT))
    expected = filled(whole, 0, wanted, list(restore_parts(whole.pool, unsplit, 0, wanted)))
    for rank in range(len(now.sizes) if isinstance(now, Shard) else 1):
        wanted = everything(copies, now, rank, spec_of(WEIGHT))
        found = filled(rigs, 3, wanted, list(restore_parts(rigs.pool, copies, 3, wanted)))
        for share, each in zip(found, expected, strict=True):
            assert torch.equal(share, shard_of(each, now, rank) if each.dim() else each)
    assert all(place.worker != 3 for places in copies.places.values() for place in places), "it is no copy of these"


@pytest.mark.parametrize(
    "placement",
    [REPLICATE, Shard(0, (4, 2)), Shard(1, (5, 3)), Shard(1, (1, 3), blocks=2)],
    ids=["whole", "rows", "columns", "columns of two blocks"],
)
@pytest.mark.parametrize("columns", [8, PIECE_BYTES // 8], ids=["short", "long"])
def test_a_tensor_is_uploaded_and_downloaded(placement: Placement, columns: int) -> None:
    rigs, whole = Rigs(2), torch.randn(6, columns, dtype=torch.float64)
    if isinstance(placement, Shard) and placement.dim and columns > 8:
        placement = Shard(1, tuple(size * columns // 8 for size in placement.sizes), placement.blocks)
    split = isinstance(placement, Shard)
    parts = [[StateItem("w", "", rank if split else 0), StateItem("v", "", 0)] for rank in range(2)]
    layout = StateLayout(parts=dict(enumerate(parts)), placements={"w": placement})
    other = torch.arange(3)
    numbers, wholes = {"w": 1, "v": 2}, {"w": whole, "v": other}
    moves = plan_moves(StateLayout(parts={CLIENT: [StateItem(n, "", 0) for n in "wv"]}), layout)
    upload(rigs.pool, moves, layout.placements, wholes.items(), numbers)
    for rank in range(2):
        assert torch.equal(rigs.rigs[rank].get(1), shard_of(whole, placement, rank))
        assert torch.equal(rigs.rigs[rank].get(2), other)
    read = StateLayout(parts=layout.parts if split else {1: parts[1]}, placements=layout.placements)
    specs = {item: spec_of(rigs.rigs[w].get(numbers[item.name])) for w, own in read.parts.items() for item in own}
    sources = find_tensor_sources(read, specs, lambda item, first, rows: Get((numbers[item.name],), first, rows))
    assert sources["w", ""].split == split
    found = dict(download_wholes(rigs.pool, sources))
    assert torch.equal(found["w", ""], whole)
    assert torch.equal(found["v", ""], other)
    chunks = [rows for key, rows in download_wholes(rigs.pool, sources, chunks=True) if key == ("w", "")]
    assert torch.equal(torch.cat(chunks), whole)
    assert (len(chunks) > 1) == (columns > 8 and not split)
    target = torch.zeros_like(whole)
    for piece, rows in download(rigs.pool, [sources["w", ""]]):
        write_piece(target, piece, rows)
    assert torch.equal(target, whole)


def test_a_worker_sends_its_parts_before_it_receives_any() -> None:
    exchange = PeerExchange(group=9, members=(2, 5))
    part, spec = StateItem("w", "", 0), spec_of(WEIGHT)
    exchange.carry(StateMove(5, 2, part, part, None, "peer"), 1, spec)
    exchange.carry(StateMove(2, 5, part, part, None, "peer"), 3, spec)
    assert exchange.instructions == {
        2: [Send(3, 9, 1, 0), Receive(1, spec, 9, 1, 0)],
        5: [Send(1, 9, 0, 0), Receive(3, spec, 9, 0, 0)],
    }


# ---- transfers between workers have no tags between GPUs


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_migration_is_in_one_order(data: st.DataObject) -> None:
    """Parts of one size, of which any worker may need any: each is received as the part that is sent."""
    names, workers = (
        [f"w{number}" for number in range(data.draw(st.integers(1, 6)))],
        range(data.draw(st.integers(2, 4))),
    )
    owners = {name: data.draw(st.sets(st.sampled_from(workers), min_size=1)) for name in names}

    def layout(held: Mapping[str, set[int]]) -> StateLayout:
        return StateLayout(parts={w: [StateItem(name, "", 0) for name in names if w in held[name]] for w in workers})

    moves = plan_moves(layout(owners), layout({name: data.draw(st.sets(st.sampled_from(workers))) for name in names}))
    specs = {10 + number: TensorSpec("float32", (4, 1 + number % 3)) for number in range(len(names))}
    exchange = PeerExchange(group=1, members=tuple(workers))
    for move in data.draw(st.permutations(moves)):
        number = 10 + names.index(move.item.name)
        exchange.carry(move, number, specs[number])

    def faults(rules: TransferRules | None = None) -> list[str]:
        posted = {w: WorkerInstructions(instructions=i, specs=specs) for w, i in exchange.instructions.items()}
        return [fault.kind for fault in order_faults(posted, {1: tuple(workers)}, rules or TransferRules())]

    assert not faults()
    both = {(move.source, move.target) for move in moves} & {(move.target, move.source) for move in moves}
    assert bool(both) <= bool(faults(TransferRules(paired=True))), "one communicator for both directions would hang"
    for received in exchange.received.values():
        first, *rest = received
        assert isinstance(first, Receive)
        other = [
            each for each in rest if isinstance(each, Receive) and (each.peer, each.spec) != (first.peer, first.spec)
        ]
        for each in other[:1]:
            if each.peer == first.peer:
                received.remove(each)
                received.insert(0, each)
                assert "mismatch" in faults()
                return


def test_few_bytes_are_under_way_while_tensors_are_read() -> None:
    """Workers that answer late: the next tensor is read when most of the bytes before it have arrived."""
    size, count = 8 << 20, 12
    late: deque[tuple[int, Future[WorkerReply]]] = deque()
    most = 0

    class Late(Rigs):
        def post(
            self, worker: int, instructions: Sequence[Any], frames: Sequence[Any] = (), *, answer: bool = False
        ) -> Future[WorkerReply]:
            future: Future[WorkerReply] = Future()
            late.append((len(frames[0]), future))
            if answer:
                threading.Timer(0.05, arrive).start()
            return future

    def arrive() -> None:
        while late:
            late.popleft()[1].set_result(WorkerReply((), (), ()))

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(count):
            most = max(most, sum(size_bytes for size_bytes, _ in late))
            yield f"w{number}", torch.zeros(size, dtype=torch.uint8)

    names = {f"w{number}": number for number in range(count)}
    items = [StateItem(name, "", 0) for name in names]
    moves = plan_moves(StateLayout(parts={CLIENT: items}), StateLayout(parts={0: items}))
    upload(Late(1).pool, moves, {}, tensors(), names, wait=True)
    assert 0 < most <= (32 + 16) << 20, most
