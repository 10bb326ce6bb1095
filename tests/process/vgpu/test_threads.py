"""Virtual devices and threads, processes and the garbage collector: whoever records what, results are right."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import onebox
from onebox.vgpu.runtime import command_queue as stream_module
from tests.process.faults.scripts import Script

JOIN_S = 60.0
ROUNDS = 30


@pytest.fixture(scope="module")
def pool() -> Iterator[onebox.Pool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "CALLS", 7)  # many boundaries, and blocks soon
        with onebox.open("cpu*2", threads=1) as opened:
            yield opened


def at_once(*tasks: Callable[[], None]) -> None:
    """Run tasks in threads of their own that begin together; raise the first error."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(tasks))

    def run(task: Callable[[], None]) -> None:
        try:
            barrier.wait(JOIN_S)
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert not any(thread.is_alive() for thread in threads)
    for error in errors:
        raise error


def trained(seed: int, device: str) -> Tensor:
    """Train a small model and return its weights, one after the other."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=generator, dtype=torch.float64))
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(ROUNDS):
        x = torch.randn(5, 4, generator=generator, dtype=torch.float64).to(device)
        optimizer.zero_grad()
        loss = (model(x) * 2.0).square().mean()
        loss.backward()
        optimizer.step()
        if step % 7 == 0:
            loss.item()
    return torch.cat([each.detach().flatten() for each in model.parameters()]).cpu()


def test_threads_that_record_on_one_device(pool: onebox.Pool) -> None:
    found: dict[int, Tensor] = {}

    def task(seed: int) -> Callable[[], None]:
        return lambda: found.__setitem__(seed, trained(seed, "vgpu:0"))

    at_once(*map(task, range(4)))
    for seed in range(4):
        torch.testing.assert_close(found[seed], trained(seed, "cpu"), rtol=0, atol=1e-12)


def test_threads_that_use_each_other_s_tensors(pool: onebox.Pool) -> None:
    base = torch.zeros(8, dtype=torch.float64, device="vgpu:0")
    made: list[Tensor] = []

    def task(number: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(ROUNDS):
                base[number].add_(number + 1.0)
                made.append(base.clone())

        return run

    at_once(*map(task, range(8)))
    assert base.tolist() == [ROUNDS * (number + 1.0) for number in range(8)]
    assert all(0 < each.sum().item() <= base.sum().item() for each in made)


def test_copies_in_both_directions_at_once(pool: onebox.Pool) -> None:
    sums: list[float] = []

    def task(here: str, there: str) -> Callable[[], None]:
        def run() -> None:
            x = torch.ones(1000, dtype=torch.float64, device=here)
            for _ in range(ROUNDS):
                x = (x.to(there) + 1).to(here)
            sums.append(x.sum().item())

        return run

    at_once(task("vgpu:0", "vgpu:1"), task("vgpu:1", "vgpu:0"), task("vgpu:0", "vgpu:1"))
    assert sums == [1000.0 * (ROUNDS + 1)] * 3


def test_tensors_that_another_thread_collects(pool: onebox.Pool) -> None:
    kept = torch.arange(6.0, device="vgpu:0")
    ready = threading.Event()

    def collect() -> None:
        while not ready.is_set():
            gc.collect()

    def make() -> None:
        try:
            for _ in range(5 * ROUNDS):
                circle: list[object] = [kept * 2, kept.clone()]
                circle.append(circle)
        finally:
            ready.set()

    gc.collect()
    before = torch.vgpu.memory_allocated(0)  # type: ignore[attr-defined]
    gc.freeze()  # no collection goes over all that other tests have left, while the other thread waits
    try:
        at_once(collect, make)
    finally:
        gc.unfreeze()
    gc.collect()
    assert torch.vgpu.memory_allocated(0) == before  # type: ignore[attr-defined]
    assert (kept * 3).tolist() == [0, 3, 6, 9, 12, 15]


def test_a_loader_that_forks_beside_virtual_devices(tmp_path: Path) -> None:
    body = """
import torch.utils.data as data

class Squares(data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.tensor(float(index)), index * index

with onebox.open("cpu", threads=1) as pool:
    ready(pool)
    scale = torch.ones((), device="vgpu:0")
    total = torch.zeros((), device="vgpu:0")
    for epoch in range(2):
        for x, y in data.DataLoader(Squares(), batch_size=8, num_workers=2, pin_memory=True):
            total += (x.to("vgpu:0") * scale).sum() + y.to("vgpu:0").sum()
    print(total.item())
    if os.fork() == 0:
        try:
            scale.item()
        except onebox.OneboxError as error:
            print(error)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
    print(total.item() == 2 * (sum(range(64)) + sum(i * i for i in range(64))))
"""
    with Script(tmp_path, body) as script:
        script.wait_until_ready()
        status, output, errors = script.end(JOIN_S)
    total = 2 * (sum(range(64)) + sum(i * i for i in range(64)))
    lines = output.splitlines()
    assert (status, errors) == (0, "")
    assert lines[0] == f"{float(total)}"
    assert "forked process" in lines[1]
    assert lines[2] == "True"
