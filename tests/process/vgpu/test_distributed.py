"""``torch.distributed`` with ranks that are threads: collectives, and jobs that fail."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel

import onebox
from onebox.vgpu import spawn
from onebox.vgpu.runtime.context import current_context
from tests.process.vgpu.jobs import EXACT, RANKS, Net, share, together

DEVICES = RANKS
pytestmark = pytest.mark.usefixtures("pool", "in_float64")


def of_rank(rank: int, device: str | None = None) -> Tensor:
    """Return a tensor that differs from rank to rank; small whole numbers, so that all sums are exact."""
    made = torch.arange(6, dtype=torch.float64).view(2, 3).t() + 10 * rank  # not contiguous
    return made.to(f"vgpu:{rank}" if device is None else device)


all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
ALL = [of_rank(rank, "cpu") for rank in range(RANKS)]


# ---- collectives


@pytest.mark.feature("Virtual devices: Use collectives of torch.distributed")
@pytest.mark.parametrize("device", [None, "cpu"])
def test_all_reduce_in_place(device: str | None) -> None:
    def reduced(rank: int) -> list[Any]:
        results = []
        for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
            x = of_rank(rank, device)
            view = x[1:]
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            assert view.tolist() == x[1:].tolist(), "views of the tensor see it"
            results.append(x.cpu())
        return results

    stacked = torch.stack(ALL)
    expected = [stacked.sum(0), stacked.mean(0), stacked.prod(0), stacked.amin(0), stacked.amax(0)]
    for results in together(reduced):
        for value, known in zip(results, expected, strict=True):
            torch.testing.assert_close(value, known, **EXACT)


def test_all_reduce_of_other_types() -> None:
    def reduced(rank: int) -> list[Any]:
        device = f"vgpu:{rank}"
        mask = torch.tensor([True, rank == 1, False], device=device)
        bits = torch.tensor([1 << rank, 7, rank], device=device)
        results = []
        for op, x in (
            ("SUM", mask.clone()),
            ("MIN", mask.clone()),
            ("BAND", bits.clone()),
            ("BOR", bits.clone()),
            ("BXOR", bits.clone()),
            ("AVG", bits.clone()),
            ("SUM", torch.tensor(rank + 1j, device=device)),
            ("SUM", torch.ones(2, dtype=torch.bfloat16, device=device)),
            ("SUM", torch.empty(0, 3, device=device)),
        ):
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            results.append(x.tolist())
        return results

    for results in together(reduced):
        assert results == [
            [True, True, False],
            [True, False, False],
            [0, 7, 0],
            [7, 7, 3],
            [7, 7, 3],
            [2, 7, 1],
            3 + 3j,
            [3.0, 3.0],
            [],
        ]


@pytest.mark.feature("Virtual devices: Use collectives of torch.distributed")
@pytest.mark.parametrize("device", [None, "cpu"])
def test_one_to_all_and_all_to_one(device: str | None) -> None:
    def run(rank: int) -> list[Any]:
        x = of_rank(rank, device)
        dist.broadcast(x, src=1)
        total = of_rank(rank, device)
        dist.reduce(total, dst=2)
        parts = [torch.empty_like(x) for _ in range(RANKS)] if rank == 2 else None
        dist.gather(of_rank(rank, device), parts, dst=2)
        mine = torch.empty_like(x)
        dist.scatter(mine, [each.to(x.device) * 2 for each in ALL] if rank == 1 else None, src=1)
        return [x.cpu(), total.cpu(), [part.cpu() for part in parts or ()], mine.cpu()]

    for rank, (x, total, parts, mine) in enumerate(together(run)):
        assert x.tolist() == ALL[1].tolist()
        assert mine.tolist() == (2 * ALL[rank]).tolist()
        if rank == 2:
            assert total.tolist() == sum(ALL).tolist()
            assert [part.tolist() for part in parts] == [each.tolist() for each in ALL]
        else:
            assert total.tolist() == ALL[rank].tolist()


@pytest.mark.feature("Virtual devices: Use collectives of torch.distributed")
@pytest.mark.parametrize("device", [None, "cpu"])
def test_all_to_all(device: str | None) -> None:
    def run(rank: int) -> list[Any]:
        place = f"vgpu:{rank}" if device is None else device
        parts = [torch.empty(other + 1, 2, device=place) for other in range(RANKS)]
        dist.all_gather(parts, torch.full((rank + 1, 2), float(rank), device=place))
        whole = torch.empty(RANKS * 3, 2, device=place)
        all_gather_single(whole, of_rank(rank, place))
        mine = torch.empty(2, device=place)
        dist.reduce_scatter(mine, list(of_rank(rank, place)), dist.ReduceOp.MAX)
        row = torch.empty(1, 2, device=place)
        reduce_scatter_single(row, of_rank(rank, place))
        got = [torch.empty(2, device=place) for _ in range(RANKS)]
        dist.all_to_all(got, list(of_rank(rank, place)))
        sizes = [[1, 0, 2], [0, 1, 1], [2, 1, 0]]  # from rank to rank
        out = torch.empty(sum(line[rank] for line in sizes), device=place)
        given = torch.arange(float(sum(sizes[rank])), device=place) + 10 * rank
        dist.all_to_all_single(out, given, [line[rank] for line in sizes], sizes[rank])
        return [parts, whole.tolist(), mine.tolist(), row.tolist(), [each.tolist() for each in got], out.tolist()]

    joined = torch.stack(ALL)
    known = [[0.0, 20.0, 21.0], [10.0, 22.0], [1.0, 2.0, 11.0]]
    for rank, (parts, whole, mine, row, got, out) in enumerate(together(run)):
        assert [part.tolist() for part in parts] == [[[float(each)] * 2] * (each + 1) for each in range(RANKS)]
        assert whole == joined.flatten(0, 1).tolist()
        assert mine == joined[:, rank].amax(0).tolist()
        assert row == [joined[:, rank].sum(0).tolist()]
        assert got == joined[:, rank].tolist()
        assert out == known[rank]


def test_from_rank_to_rank() -> None:
    """Ranks that receive before they send do not wait for each other."""

    def run(rank: int) -> list[Any]:
        left, right = (rank - 1) % RANKS, (rank + 1) % RANKS
        x, got = of_rank(rank), torch.zeros(3, 2, device=f"vgpu:{rank}")
        ops = [dist.P2POp(dist.irecv, got, left), dist.P2POp(dist.isend, x, right)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        tagged = [torch.zeros(1, device=f"vgpu:{rank}") for _ in range(2)]
        if rank == 0:
            for tag in (5, 6):
                dist.send(torch.tensor([float(tag)], device="vgpu"), 1, tag=tag)
        elif rank == 1:
            for tag in (6, 5):
                dist.recv(tagged[tag - 5], 0, tag=tag)
        return [got.tolist(), [each.item() for each in tagged]]

    results = together(run)
    assert [got for got, _ in results] == [ALL[2].tolist(), ALL[0].tolist(), ALL[1].tolist()]
    assert results[1][1] == [5.0, 6.0]


def test_groups_of_some_ranks_and_objects() -> None:
    def run(rank: int) -> list[Any]:
        pair = dist.new_group([2, 0])
        x = of_rank(rank)
        if rank != 1:
            dist.all_reduce(x, group=pair)
        objects = [None] * RANKS
        dist.all_gather_object(objects, {"rank": rank})
        shared = [f"from {rank}"]
        dist.broadcast_object_list(shared, src=2)
        return [x.cpu(), objects, shared, dist.get_rank(), dist.get_world_size(), dist.get_backend()]

    for rank, (x, objects, shared, number, size, backend) in enumerate(together(run)):
        assert x.tolist() == (ALL[1] if rank == 1 else ALL[0] + ALL[2]).tolist()
        assert objects == [{"rank": other} for other in range(RANKS)]
        assert (shared, number, size, backend) == (["from 2"], rank, RANKS, "onebox")


def test_nothing_waits_for_a_collective() -> None:
    """A rank issues collectives and what uses them without an answer of a worker; what is asynchronous can wait."""

    def run(rank: int) -> list[Any]:
        x = of_rank(rank)
        dist.all_reduce(x)  # forms the group
        stream = current_context().queues[rank]
        before = stream.channel.waits
        for _ in range(5):
            dist.all_reduce(x)
            dist.broadcast(x, 0)
            x = x / 2
        work = dist.all_reduce(x, async_op=True)
        assert not work.is_completed()
        future = work.get_future().then(lambda done: done.value()[0] + 1)
        assert work.is_completed()
        waits = stream.channel.waits - before
        return [waits, x.tolist(), future.wait().tolist()]

    results = together(run)
    assert [waits for waits, _, _ in results] == [0] * RANKS
    total = sum(ALL).clone()
    for _ in range(5):
        total = total * 3 / 2
    for _, x, more in results:
        assert x == (3 * total).tolist()
        assert more == (3 * total + 1).tolist()


def test_a_collective_whose_work_is_collected_is_written_before_the_next_use() -> None:
    """The garbage collector runs anywhere, also where the client holds a lock or records a call: a finalizer must not
    issue an operator there. Results of works that nobody waits for arrive all the same, in order."""

    def run(rank: int) -> list[Any]:
        x, y, host = of_rank(rank), of_rank(rank), of_rank(rank, "cpu")
        dist.all_reduce(torch.zeros(1, device=x.device))  # forms the group
        torch.stack([x, y])  # the next use is an operator that the device knows
        queue = current_context().queues[rank]
        for tensor in (x, x, host):  # x twice: three times the sum
            dropped: list[Any] = [dist.all_reduce(tensor, async_op=True)]
            if tensor is x:
                dropped.append(dropped)  # found by the garbage collector alone
            records = queue.native.recorded
            with queue.lock:
                del dropped
                for _ in range(1000):  # a collection does nothing while another thread's goes on
                    gc.collect()
                    if queue.unwaited:
                        break
                    time.sleep(0.01)
            assert queue.unwaited
            assert queue.native.recorded == records, "a finalizer has issued an operator"
        gathered = torch.stack([x, y])[0].tolist()
        x.zero_()
        dist.all_reduce(y, async_op=True)
        dist.all_reduce(torch.zeros(1, device=x.device))
        moved = y.cpu().tolist()
        return [gathered, x.tolist(), moved, host.tolist()]

    total = sum(ALL).clone()
    expected = [(3 * total).tolist(), (0 * total).tolist(), total.tolist(), total.tolist()]
    assert together(run) == [expected] * RANKS


def test_collectives_of_a_tensor_are_in_order_without_waits() -> None:
    def run(rank: int) -> list[Any]:
        x, host = of_rank(rank), of_rank(rank, "cpu")
        last = [dist.all_reduce(tensor[:], async_op=True) for tensor in (x, host, x, host)][2:]
        parts = [torch.empty_like(x) for _ in range(RANKS)]
        dist.all_gather(parts, x)
        for work in last:
            work.wait()
        return [x.tolist(), host.tolist(), parts[rank].tolist()]

    total = (RANKS * sum(ALL)).tolist()
    assert together(run) == [[total, total, total]] * RANKS


def test_collectives_of_a_tensor_are_in_order_while_a_work_is_being_collected() -> None:
    """The garbage collector clears weak references to a work first, and finalizes it later, in another thread."""
    ready = threading.Barrier(RANKS + 1, timeout=60)
    cleared, done = ([threading.Event() for _ in range(RANKS)] for _ in range(2))
    callbacks: list[Any] = []

    def run(rank: int) -> list[Any]:
        x = of_rank(rank)

        def between(_: Any) -> None:
            cleared[rank].set()
            done[rank].wait(60)

        garbage: list[Any] = [dist.all_reduce(x, async_op=True)]
        garbage.append(garbage)
        callbacks.append(weakref.ref(garbage[0], between))
        del garbage
        ready.wait()
        assert cleared[rank].wait(60)
        dist.all_reduce(x)
        done[rank].set()
        return x.tolist()

    collector = threading.Thread(target=lambda: (ready.wait(), gc.collect()))
    collector.start()
    enabled = gc.isenabled()
    gc.disable()
    try:
        assert together(run) == [(RANKS * sum(ALL)).tolist()] * RANKS
    finally:
        collector.join(200)
        if enabled:
            gc.enable()


def test_a_barrier_waits_for_all() -> None:
    came: list[int] = []
    lock = threading.Lock()

    def run(rank: int) -> int:
        with lock:
            came.append(rank)
        dist.barrier()
        return len(came)

    assert together(run) == [RANKS] * RANKS


def test_several_jobs_after_each_other() -> None:
    def run(rank: int) -> float:
        dist.destroy_process_group()
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method="env://", timeout=timedelta(seconds=60))
        x = torch.ones((), device="vgpu")
        dist.all_reduce(x)
        return x.item()

    assert together(run) == [RANKS] * RANKS
    assert not dist.is_initialized()


def test_a_rank_that_fails_ends_the_job() -> None:
    def run(rank: int) -> Any:
        x = of_rank(rank)
        dist.all_reduce(x)
        if rank == 1:
            raise KeyError("of rank 1")
        dist.all_reduce(x)
        return x.tolist()

    for _ in range(2):
        with pytest.raises(ProcessRaisedException, match=r"(?s)Process 1 terminated with the following.*of rank 1"):
            together(run)
        test_groups_of_some_ranks_and_objects()
        (copied,) = {tuple(of_rank(0).to(f"vgpu:{rank}").tolist()[0]) for rank in range(RANKS)}
        assert copied == (0.0, 3.0)


def test_an_operator_that_fails_ends_the_job_with_its_own_error() -> None:
    """The worker that has nothing to add leaves the group, and the error is that of the operator."""

    def run(rank: int) -> Any:
        table = torch.ones(3, 2, device=f"vgpu:{rank}")
        x = nn.functional.embedding(torch.tensor([rank + 1], device=f"vgpu:{rank}"), table)  # of rank 2 out of range
        dist.all_reduce(x)
        return x.tolist()

    with pytest.raises(ProcessRaisedException, match=r"aten\.embedding\.default failed on .*: index out of range"):
        together(run)
    assert together(lambda rank: dist.get_rank()) == [0, 1, 2]


def test_a_worker_that_dies_ends_the_job() -> None:
    with onebox.open("cpu*2", threads=1) as pool:
        met = threading.Barrier(2, timeout=60)

        def run(rank: int) -> None:
            model = DistributedDataParallel(Net().to(f"vgpu:{rank}"))
            for step in range(1000):
                x, y = share(rank, 0)
                nn.functional.cross_entropy(model(x), y).backward()
                if step == 3:
                    met.wait()
                    if rank == 0:
                        os.kill(pool.process_ids[1], signal.SIGKILL)
            dist.barrier()

        with pytest.raises(ProcessRaisedException, match=r"worker 1 \(cpu on localhost\).*signal 9|SIGKILL|killed"):
            together(run, ranks=2)


def test_ranks_need_devices_of_their_own() -> None:
    def run(rank: int) -> None:
        dist.all_reduce(torch.ones(1, device="vgpu:0"))

    for _ in range(2):
        with pytest.raises(ProcessRaisedException, match="vgpu:0 is another rank's already"):
            together(run, ranks=2)
    with pytest.raises(ProcessRaisedException, match=r"rank [01] of 5, but 2 ranks have been started"):
        spawn(lambda rank: dist.init_process_group("nccl", rank=rank, world_size=5), nprocs=2)
    with pytest.raises(ValueError, match="at least one rank"):
        spawn(lambda rank: None, nprocs=0)
