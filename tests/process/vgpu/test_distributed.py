"""``torch.distributed`` with ranks that are threads: collectives, and DistributedDataParallel against one process."""

from __future__ import annotations

import argparse
import copy
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import onebox
from onebox.vgpu import spawn
from onebox.vgpu.box import current_box

RANKS = 3
EXACT = {"rtol": 0.0, "atol": 1e-12}


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[onebox.Pool]:
    with onebox.open(f"cpu*{RANKS}", threads=1) as opened:
        yield opened


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def together(function: Callable[..., Any], *args: Any, backend: str = "onebox", ranks: int = RANKS) -> list[Any]:
    """Run a function on each rank, in a default group, and return what each returned."""
    returned: dict[int, Any] = {}

    def main(rank: int) -> None:
        dist.init_process_group(backend)
        returned[rank] = function(rank, *args)
        dist.destroy_process_group()

    spawn(main, nprocs=ranks)
    return [returned[rank] for rank in range(ranks)]


def of_rank(rank: int, device: str | None = None) -> Tensor:
    """Return a tensor that differs from rank to rank; small whole numbers, so that all sums are exact."""
    made = torch.arange(6, dtype=torch.float64).view(2, 3).t() + 10 * rank  # not contiguous
    return made.to(f"vgpu:{rank}" if device is None else device)


all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
ALL = [of_rank(rank, "cpu") for rank in range(RANKS)]


# ---- collectives


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
        stream = current_box().streams[rank]
        before = stream.waits
        for _ in range(5):
            dist.all_reduce(x)
            dist.broadcast(x, 0)
            x = x / 2
        work = dist.all_reduce(x, async_op=True)
        assert not work.is_completed()
        future = work.get_future().then(lambda done: done.value()[0] + 1)
        assert work.is_completed()
        waits = stream.waits - before
        return [waits, x.tolist(), future.wait().tolist()]

    results = together(run)
    assert [waits for waits, _, _ in results] == [0] * RANKS
    total = sum(ALL).clone()
    for _ in range(5):
        total = total * 3 / 2
    for _, x, more in results:
        assert x == (3 * total).tolist()
        assert more == (3 * total + 1).tolist()


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


# ---- DistributedDataParallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.GroupNorm(3, 3)
        self.head = nn.Linear(3 * 5 * 5, 4)
        self.same = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.head(torch.relu(self.norm(self.conv(x))).flatten(1))
        return self.same(torch.tanh(self.same(hidden)))


STEPS, EACH = 4, 3


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of all ranks."""
    source = torch.Generator().manual_seed(step)
    return torch.randn(RANKS * EACH, 2, 5, 5, generator=source), torch.randint(4, (RANKS * EACH,), generator=source)


def share(rank: int, step: int) -> list[Tensor]:
    """Return a rank's part of a batch, on its device."""
    return [part.chunk(RANKS)[rank].to(f"vgpu:{rank}") for part in batch(step)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plainly_trained(model: nn.Module) -> nn.Module:
    optimizer = sgd(model)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def assert_same(model: nn.Module, states: list[dict[str, Tensor]]) -> None:
    """Check that the ranks have ended with the same parameters to the last bit, and with those of a model."""
    for name, value in model.state_dict().items():
        assert all(torch.equal(state[name], states[0][name]) for state in states)
        torch.testing.assert_close(states[0][name], value, **EXACT)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1e-4},
        {"find_unused_parameters": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"device_ids": None},
    ],
    ids=str,
)
def test_ddp_trains_as_one_process(options: dict[str, Any]) -> None:
    def run(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(rank)  # they start with the parameters of rank 0
        model = DistributedDataParallel(
            copy.deepcopy(models[rank]).to(f"vgpu:{rank}"), **{"device_ids": [rank], **options}
        )
        optimizer = sgd(model)
        for step in range(STEPS):
            x, y = share(rank, step)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return state_of(model.module)

    models = [Net() for _ in range(RANKS)]
    states = together(run, backend="nccl")
    assert_same(plainly_trained(models[0]), states)


@pytest.mark.parametrize("hook", ["allreduce", "fp16", "power"])
def test_ddp_with_communication_hooks(hook: str) -> None:
    def run(rank: int) -> dict[str, Tensor]:
        model = DistributedDataParallel(copy.deepcopy(plain).to(f"vgpu:{rank}"), bucket_cap_mb=1e-3)
        if hook == "power":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            model.register_comm_hook(None, getattr(default_hooks, f"{hook}_hook", default_hooks.fp16_compress_hook))
        optimizer = sgd(model)
        for step in range(STEPS):
            x, y = share(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return state_of(model.module)

    plain = Net()
    states = together(run)
    if hook == "allreduce":
        assert_same(plainly_trained(plain), states)
        return
    for name, value in plainly_trained(plain).state_dict().items():
        assert all(torch.equal(state[name], states[0][name]) for state in states)
        torch.testing.assert_close(states[0][name], value, rtol=0, atol=1e-3 if hook == "fp16" else 0.5)


class Forked(nn.Module):
    """A model that uses some of its parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(4, 2) for _ in range(RANKS + 1)])

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](x) + self.branches[0](x)


def test_ddp_with_parameters_that_some_ranks_do_not_use() -> None:
    def run(rank: int) -> dict[str, Tensor | None]:
        model = DistributedDataParallel(copy.deepcopy(plain).to(f"vgpu:{rank}"), find_unused_parameters=True)
        for _ in range(2):
            model.zero_grad()
            model(x.to(f"vgpu:{rank}"), rank).square().sum().backward()
        named = model.module.named_parameters()
        return {name: None if value.grad is None else value.grad.cpu() for name, value in named}

    plain = Forked()
    x = torch.randn(3, 4)
    grads = together(run)
    sum(plain(x, rank).square().sum() for rank in range(RANKS)).backward()
    for name, value in plain.named_parameters():
        for each in grads:
            if value.grad is None:
                assert each[name] is None
            else:
                torch.testing.assert_close(each[name], value.grad / RANKS, **EXACT)


def test_ddp_accumulates_gradients_without_exchange() -> None:
    def run(rank: int) -> list[Tensor]:
        model = DistributedDataParallel(copy.deepcopy(plain).to(f"vgpu:{rank}"))
        with model.no_sync():
            x, y = share(rank, 0)
            nn.functional.cross_entropy(model(x), y).backward()
        own = [value.grad.cpu() for value in model.parameters()]
        x, y = share(rank, 1)
        nn.functional.cross_entropy(model(x), y).backward()
        return own + [value.grad.cpu() for value in model.parameters()]

    plain = Net()
    results = together(run)
    for step in range(2):
        x, y = batch(step)
        nn.functional.cross_entropy(plain(x), y).backward()
    count = len(list(plain.parameters()))
    assert not torch.equal(results[0][0], results[1][0])
    for result in results:
        for value, known in zip(result[count:], plain.parameters(), strict=True):
            torch.testing.assert_close(value, known.grad, **EXACT)


def test_ddp_shares_buffers_of_rank_0() -> None:
    def run(rank: int) -> list[dict[str, Tensor]]:
        torch.manual_seed(rank)
        norm = nn.BatchNorm1d(4).to(f"vgpu:{rank}")
        norm.running_mean.fill_(rank + 1)
        model = DistributedDataParallel(norm)
        states = [state_of(norm)]
        for step in range(2):
            model(torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank)).to(f"vgpu:{rank}"))
            states.append(state_of(norm))
        model.eval()
        model(torch.randn(5, 4, device=f"vgpu:{rank}"))
        return states

    states = together(run)
    assert all(each[0]["running_mean"].eq(1).all() for each in states)
    plain = nn.BatchNorm1d(4)
    plain.running_mean.fill_(1)
    for step in range(2):
        plain(torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step)))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(states[0][2][name], value, **EXACT)
    assert not torch.equal(states[1][2]["running_mean"], states[0][2]["running_mean"]), "until the next forward"


def test_ddp_with_uneven_inputs() -> None:
    """Rank r has r + 1 batches; ranks that have no more shadow the others' exchanges."""

    def run(rank: int) -> dict[str, Tensor]:
        model = DistributedDataParallel(copy.deepcopy(plain).to(f"vgpu:{rank}"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=False):
            for step in range(rank + 1):
                x, y = share(rank, step)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        return state_of(model.module)

    plain = Net()
    states = together(run)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(RANKS):
        x, y = (torch.cat(part.chunk(RANKS)[step:]) for part in batch(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    assert_same(plain, states)


# ---- a script as it is written for processes


def main_worker(gpu: int, gpus: int, args: argparse.Namespace) -> None:
    args.gpu = gpu
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group(backend="nccl", init_method="env://", world_size=gpus, rank=gpu)
    torch.vgpu.set_device(args.gpu)  # type: ignore[attr-defined]
    torch.manual_seed(args.seed)
    x, y = batch(0)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True, seed=args.seed)
    loader = DataLoader(data, batch_size=1, sampler=sampler)
    model = DistributedDataParallel(Net().to(f"vgpu:{args.gpu}"), device_ids=[args.gpu])
    optimizer = sgd(model)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y.to(args.gpu))
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save({"state": model.state_dict(), "optimizer": optimizer.state_dict()}, args.file)
    dist.barrier()
    saved = torch.load(args.file, map_location={"vgpu:0": f"vgpu:{gpu}"})
    assert saved["state"]["module.conv.weight"].get_device() == gpu
    model.load_state_dict(saved["state"])
    optimizer.load_state_dict(saved["optimizer"])
    correct = torch.tensor([0.0, 0.0], device=args.gpu)
    with torch.no_grad():
        for x, y in loader:
            correct += torch.stack([(model(x.to(gpu)).argmax(1) == y.to(gpu)).sum(), torch.tensor(len(y), device=gpu)])
    dist.all_reduce(correct)
    args.results.put((gpu, loss.item(), correct.tolist()))
    dist.destroy_process_group()


def test_a_script_for_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # the script sets them; afterwards they are as before
    results: queue.Queue[Any] = queue.Queue()  # cannot be copied, which ranks share as processes do
    args = argparse.Namespace(seed=5, file=tmp_path / "saved.pt", results=results)
    spawn(main_worker, nprocs=RANKS, args=(RANKS, args))
    assert not hasattr(args, "gpu"), "ranks have copies of their own"
    found = sorted(results.get_nowait() for _ in range(RANKS))
    assert [gpu for gpu, _, _ in found] == list(range(RANKS))
    assert len({loss for _, loss, _ in found}) == RANKS, "each has samples of its own"
    assert len({tuple(correct) for _, _, correct in found}) == 1
    assert found[0][2][1] == RANKS * EACH


class Halves(nn.Module):
    """A model over two devices."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.places = first, second
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2)

    def place(self) -> Halves:
        self.first.to(self.places[0])
        self.second.to(self.places[1])
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.to(self.places[0]))).to(self.places[1]))


def test_ddp_of_a_model_over_devices() -> None:
    def run(rank: int) -> dict[str, Tensor]:
        model = copy.deepcopy(plain)
        model.places = f"vgpu:{rank}", f"vgpu:{rank + 2}"
        parallel = DistributedDataParallel(model.place())
        optimizer = sgd(parallel)
        for step in range(3):
            optimizer.zero_grad()
            parallel(x.chunk(2)[rank] + step).square().mean().backward()
            optimizer.step()
        return state_of(model)

    plain = Halves("cpu", "cpu")
    x = torch.randn(6, 4)
    with onebox.open("cpu*4", threads=1):
        states = together(run, ranks=2)
    optimizer = sgd(plain)
    for step in range(3):
        optimizer.zero_grad()
        plain(x + step).square().mean().backward()
        optimizer.step()
    assert_same(plain, states)


def test_a_step_waits_for_nothing() -> None:
    def run(rank: int) -> list[int]:
        model = DistributedDataParallel(Net().to(f"vgpu:{rank}"), device_ids=[rank])
        optimizer = sgd(model)
        stream = current_box().streams[rank]
        waited = []
        for step in range(6):
            x, y = share(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            waited.append(stream.waits)
        return waited

    for waited in together(run):
        assert waited[-1] == waited[2], "the buckets are as they remain, and all operators are known"


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


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_over_all_ranks(affine: bool) -> None:
    """Statistics and gradients are those of the whole batch, also where the ranks' parts are unequal."""
    sizes = (4, 1, 3)

    def run(rank: int) -> list[Any]:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)).to(f"vgpu:{rank}")
        parallel = DistributedDataParallel(model, device_ids=[rank])
        part = x.split(sizes)[rank].to(f"vgpu:{rank}").requires_grad_()
        out = parallel(part)
        (out.pow(3).sum() * RANKS).backward()
        grads = [value.grad.cpu() for value in model.parameters()]
        return [out.detach().cpu(), part.grad.cpu(), grads, state_of(model)]

    plain = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, affine=affine))
    x = torch.randn(sum(sizes), 2, 3, 3)
    results = together(run)
    whole = x.clone().requires_grad_()
    out = plain(whole)
    out.pow(3).sum().backward()
    torch.testing.assert_close(torch.cat([each[0] for each in results]), out.detach(), **EXACT)
    torch.testing.assert_close(torch.cat([each[1] for each in results]), whole.grad * RANKS, rtol=0, atol=1e-10)
    for each in results:
        for value, known in zip(each[2], plain.parameters(), strict=True):
            torch.testing.assert_close(value, known.grad, rtol=0, atol=1e-10)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(each[3][name], value, **EXACT)
