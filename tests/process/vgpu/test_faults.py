"""What a script on virtual devices is told when something goes wrong on a worker, and that nothing hangs."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import onebox
from onebox.errors import OperatorError, PoolError, WorkerDied, WorkerHung
from onebox.vgpu import attach
from tests.kit.pools import Pools
from tests.process.faults.scripts import REPOSITORY, Script, gone
from tests.process.faults.training import WITHIN_S, Stopwatch, fails

INTERRUPTED_S = 30.0
"""An interrupted script has ended within this time."""


@pytest.fixture
def pool() -> Iterator[onebox.Pool]:
    with onebox.open("cpu*2", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def lasting() -> Iterator[onebox.Pool]:
    """A pool for the tests that leave it as it was."""
    with onebox.open("cpu", threads=1, memory=64 << 20) as opened:
        yield opened


class Loop:
    """A training loop.

    Args:
        device: Where.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.watch = Stopwatch()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def loss(self) -> Tensor:
        x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
        return nn.functional.cross_entropy(self.model(x.to(self.device)), y.to(self.device))

    def step(self) -> float:
        self.watch.start()
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def until_it_fails(self) -> None:
        while True:
            self.step()


# ---- workers that end


@pytest.mark.feature("Virtual devices: Learn of a failure where a value is read")
def test_a_worker_that_is_killed_in_a_loop(pool: onebox.Pool) -> None:
    loop = Loop("vgpu:1")
    for _ in range(3):
        loop.step()
    os.kill(pool.process_ids[1], signal.SIGKILL)
    raised = fails(loop.until_it_fails, loop.watch)
    assert raised.after_s < WITHIN_S
    assert isinstance(raised.error, WorkerDied)
    assert (raised.error.worker, raised.error.device) == (1, "cpu")
    assert "worker 1 (cpu on localhost)" in str(raised.error)
    assert fails(lambda: torch.ones(2, device="vgpu:1").sum().item()).error is raised.error
    assert fails(lambda: torch.ones(2, device="vgpu:0").sum().item()).error is raised.error
    assert fails(lambda: loop.model.to("cpu")).error is raised.error


def test_a_worker_that_is_killed_between_forward_and_backward(pool: onebox.Pool) -> None:
    loop = Loop("vgpu:0")
    loop.step()
    loss = loop.loss()
    torch.vgpu.synchronize(0)  # type: ignore[attr-defined]
    os.kill(pool.process_ids[0], signal.SIGKILL)
    watch = Stopwatch()

    def rest() -> None:
        loss.backward()
        loss.item()

    raised = fails(rest, watch)
    assert raised.after_s < WITHIN_S
    assert isinstance(raised.error, WorkerDied)
    assert raised.error.worker == 0


def test_a_loop_that_reads_nothing_is_told_too(pool: onebox.Pool) -> None:
    x = torch.ones(4, device="vgpu:0")
    x.add_(1)
    torch.vgpu.synchronize(0)  # type: ignore[attr-defined]
    os.kill(pool.process_ids[0], signal.SIGKILL)
    watch = Stopwatch()

    def unread() -> None:
        while True:
            x.add_(1)

    raised = fails(unread, watch)
    assert raised.after_s < WITHIN_S
    assert isinstance(raised.error, WorkerDied)


def test_a_copy_from_a_worker_that_is_killed(pool: onebox.Pool) -> None:
    x = torch.ones(4, device="vgpu:0")
    assert x.to("vgpu:1").sum().item() == 4
    os.kill(pool.process_ids[0], signal.SIGKILL)
    raised = fails(lambda: x.to("vgpu:1").sum().item())
    assert raised.after_s < WITHIN_S
    assert isinstance(raised.error, WorkerDied)
    assert raised.error.worker == 0


def test_threads_that_train_together_all_hear_of_it(pool: onebox.Pool) -> None:
    loops = [Loop(f"vgpu:{number}") for number in range(2)]
    barrier = threading.Barrier(2)
    started = threading.Barrier(3)
    errors: list[BaseException] = []

    def train(loop: Loop) -> None:
        try:
            loop.step()
            started.wait(WITHIN_S)
            while True:
                barrier.wait(WITHIN_S)
                loop.step()
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            barrier.abort()
            errors.append(error)

    threads = [threading.Thread(target=train, args=(loop,)) for loop in loops]
    for thread in threads:
        thread.start()
    started.wait(60)
    os.kill(pool.process_ids[1], signal.SIGKILL)
    for thread in threads:
        thread.join(WITHIN_S)
    assert not any(thread.is_alive() for thread in threads)
    assert errors
    for error in errors:
        assert isinstance(error, WorkerDied)
        assert error.worker == 1


THREADS = """
import runpy
import onebox.vgpu
onebox.vgpu.alias_cuda()
with onebox.open("cpu*2", threads=1) as pool:
    ready(pool)
    sys.argv = ["threads_data_parallel.py", "--gpus", "2", "--batch-size", "20", "--steps", "100000"]
    runpy.run_path(os.path.join({folder!r}, sys.argv[0]), run_name="__main__")
"""


def test_the_script_with_threads_ends_with_the_error_of_a_killed_worker(tmp_path: Path) -> None:
    with Script(tmp_path, THREADS.format(folder=str(REPOSITORY / "examples"))) as script:
        script.wait_until_ready()
        script.wait_for("step  10")
        os.kill(script.workers[1], signal.SIGKILL)
        status, _, errors = script.end(INTERRUPTED_S)
        assert status == 1
        assert "onebox.errors.WorkerDied: worker 1 (cpu on localhost)" in errors
        assert gone(script.workers, 0)


def test_a_worker_that_stops_is_taken_for_hung(pool: onebox.Pool) -> None:
    loop = Loop("vgpu:1")
    loop.step()
    os.kill(pool.process_ids[1], signal.SIGSTOP)
    raised = fails(loop.until_it_fails, loop.watch)
    assert raised.after_s < WITHIN_S
    assert isinstance(raised.error, WorkerHung)
    assert raised.error.worker == 1


# ---- the client's end

TRAIN = """
import torch.nn as nn
with onebox.open("cpu*2", threads=1) as pool:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).to("vgpu:1")
    x = torch.randn(512, 512, device="vgpu:1")
    model(x).sum().item()
    ready(pool)
    while True:
        {body}
"""


@pytest.mark.parametrize(
    "body",
    ["model(x).sum().item()", "model(x).sum().backward()", "x.add_(1)"],
    ids=["reading", "backward", "not reading"],
)
def test_ctrl_c_ends_the_workers(tmp_path: Path, body: str) -> None:
    with Script(tmp_path, TRAIN.format(body=body)) as script:
        script.wait_until_ready()
        script.signal(signal.SIGINT, group=True)  # as a terminal does
        status, _, errors = script.end(INTERRUPTED_S)
        assert status == -signal.SIGINT, errors
        assert "KeyboardInterrupt" in errors
        assert gone(script.workers, 0)


@pytest.mark.parametrize("closed", ["pool.close()", ""], ids=["closed", "left open"])
def test_an_interpreter_that_ends_with_tensors_alive(tmp_path: Path, closed: str) -> None:
    body = f"""
pool = onebox.open("cpu", threads=1)
kept = torch.ones(4, device="vgpu:0", requires_grad=True)
(kept * 2).sum().backward()
generator = torch.Generator("vgpu:0")
circle = [kept]
circle.append(circle)
ready(pool)
{closed}
"""
    with Script(tmp_path, body) as script:
        script.wait_until_ready()
        assert script.end(INTERRUPTED_S) == (0, "", "")
        assert gone(script.workers, 0)


def test_tensors_of_a_pool_that_is_closed(pools: Pools) -> None:
    attach(pools(2))  # whose devices are the current ones after the end of the other pool
    with onebox.open("cpu*2", threads=1) as pool:
        loop = Loop("vgpu:0")
        x = torch.ones(3, device="vgpu:0", requires_grad=True)
        loss = (x * 2).sum()
        assert pool.process_ids
    questions = (
        lambda: [x + 1, x.sum().item()],
        lambda: x.detach().cpu(),
        lambda: x.to("vgpu:1"),
        lambda: repr(x),
        lambda: [loss.backward(), x.grad.sum().item()],  # type: ignore[union-attr]
        loop.until_it_fails,
    )
    for question in questions:
        raised = fails(question)  # type: ignore[arg-type]
        assert isinstance(raised.error, PoolError)
        assert "onebox.open()" in str(raised.error)
        assert raised.after_s < WITHIN_S
    with onebox.open("cpu", threads=1):
        assert torch.ones(2, device="vgpu:0").sum().item() == 2
        assert isinstance(fails(lambda: x.detach().cpu()).error, PoolError)


# ---- operators that fail on the worker


@pytest.mark.feature("Virtual devices: Learn of a failure where a value is read")
def test_an_index_out_of_range_is_told_where_it_is_read(lasting: onebox.Pool) -> None:
    table = nn.Embedding(4, 3).to("vgpu:0")
    other = torch.ones(3, device="vgpu:0")
    bad = table(torch.tensor([1, 9], device="vgpu:0"))
    worse = (bad * 2).sum()
    later = other + 1
    other.add_(1)
    for read in (other, bad, worse, later):  # the first of them is told, and those that are void
        with pytest.raises(OperatorError, match=r"aten\.embedding\.default failed .*index out of range") as caught:
            read.tolist()
        assert caught.value.operator == "aten.embedding.default"
        assert (caught.value.worker, caught.value.device) == (0, "cpu")
        assert any("before this line" in note for note in caught.value.__notes__)
    assert other.tolist() == [1, 1, 1]
    assert (other + 1).tolist() == [2, 2, 2]
    assert table(torch.tensor([1], device="vgpu:0")).shape == (1, 3)
    assert table.weight.isfinite().all()


def test_steps_after_one_that_failed(lasting: onebox.Pool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(6, 2)).double()
    remote = nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(6, 2)).double()
    remote.load_state_dict(model.state_dict())
    remote.to("vgpu:0")

    def gradient(net: nn.Module, words: Tensor) -> Tensor:
        net.zero_grad()
        net(words).square().sum().backward()
        return torch.cat([each.grad.flatten() for each in net.parameters()])  # type: ignore[union-attr]

    good, bad = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0, 1], [2, 4]])
    for _ in range(6):  # the failure is in a block, too
        with pytest.raises(OperatorError, match="embedding"):
            gradient(remote, bad.to("vgpu:0")).cpu()
        torch.testing.assert_close(gradient(remote, good.to("vgpu:0")).cpu(), gradient(model, good), rtol=0, atol=1e-14)


def test_what_fails_in_place_is_as_the_operator_left_it(lasting: onebox.Pool) -> None:
    x, y = torch.zeros(4, device="vgpu:0"), torch.ones(2, device="vgpu:0")
    x.index_add_(0, torch.tensor([1, 7], device="vgpu:0"), y)
    with pytest.raises(OperatorError, match="index_add_"):
        x.tolist()
    assert y.tolist() == [1, 1]
    plain = torch.zeros(4)
    with pytest.raises(IndexError):
        plain.index_add_(0, torch.tensor([1, 7]), torch.ones(2))
    assert x.tolist() == plain.tolist()


def test_a_singular_matrix(lasting: onebox.Pool) -> None:
    with pytest.raises((OperatorError, RuntimeError), match="singular"):
        torch.linalg.inv(torch.zeros(3, 3, device="vgpu:0")).cpu()
    assert torch.linalg.inv(torch.eye(3, device="vgpu:0")).sum().item() == 3


def test_tensors_of_a_closed_pool_that_nothing_else_knows_fail_as_such() -> None:
    with onebox.open("cpu", threads=1) as opened:
        attach(opened)
        x = torch.ones(3, device="vgpu:0")
    del opened
    gc.collect()
    with onebox.open("cpu", threads=1) as other:
        attach(other)
        with pytest.raises(OperatorError):  # before it, all tensors are looked at
            torch.ones(2, device="vgpu:0").index_select(0, torch.tensor([5], device="vgpu:0")).tolist()
    with pytest.raises(PoolError, match="the pool is closed"):
        x.tolist()


# ---- memory


@pytest.mark.feature("Virtual devices: Go on after a step that failed")
def test_memory_that_runs_out_and_comes_back(lasting: onebox.Pool) -> None:
    (torch.ones(2, device="vgpu:0") * 2).sum().item()  # what PyTorch imports for it keeps frames alive for a while
    gc.collect()
    before = torch.vgpu.memory_allocated(0)  # type: ignore[attr-defined]
    for _ in range(3):
        held = [torch.ones(4 << 20, device="vgpu:0") for _ in range(2)]
        with pytest.raises(torch.OutOfMemoryError, match="the quota is"):
            [each * 2 for each in held * 2][-1].sum().item()
        assert held[0].sum().item() == 4 << 20
        del held
        assert torch.vgpu.memory_allocated(0) == before  # type: ignore[attr-defined]
        assert torch.ones(12 << 20, device="vgpu:0").sum().item() == 12 << 20


def test_an_upload_that_does_not_fit(lasting: onebox.Pool) -> None:
    large = torch.ones(17 << 20)
    with pytest.raises(torch.OutOfMemoryError, match="the quota is"):
        large.to("vgpu:0").sum().item()
    assert large[:5].to("vgpu:0").sum().item() == 5


def test_errors_of_a_stream_that_waits_stand_at_their_own_line(lasting: onebox.Pool) -> None:
    from onebox.vgpu import set_synchronous

    set_synchronous(True)
    try:
        with pytest.raises(IndexError, match="index out of range"):
            nn.functional.embedding(torch.tensor([9], device="vgpu:0"), torch.ones(4, 3, device="vgpu:0"))
    finally:
        set_synchronous(False)
