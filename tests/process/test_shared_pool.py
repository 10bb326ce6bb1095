"""Processes that share the pool of ``onebox run``: they end, are killed and are refused, and leave nothing behind."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.process.cli.commands import POOL, WITHIN_S, assert_gone, command, read_until, running

TORCHRUN = ("torchrun", *POOL)


def script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


# ---- ranks

RESTARTED = """
import os, signal, torch, torch.distributed as dist
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.cuda.set_device(rank)
before = torch.cuda.memory_allocated()
x = torch.full((1 << 20,), rank + 1.0, device="cuda")
dist.init_process_group("nccl")
dist.all_reduce(x)
print(f"attempt {attempt} rank {rank} before {before} sum {x[0].item()}", flush=True)
while attempt == 0:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)
    x.sum().item()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_killed_rank_is_started_anew_and_its_memory_is_free(tmp_path: Path) -> None:
    done = command([*TORCHRUN, "--max-restarts", "1", script(tmp_path, RESTARTED)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"attempt {attempt} rank {rank} before 0 sum 3.0" for attempt in range(2) for rank in range(2)
    ]


TOGETHER = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
x = torch.ones(2, device="cuda:0")
dist.all_reduce(x)
print(x.sum().item())
"""


@pytest.mark.long
def test_two_ranks_on_one_device_are_refused(tmp_path: Path) -> None:
    done = command([*TORCHRUN, "--nproc-per-node", "2", script(tmp_path, TOGETHER)], tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        "device 0 is used by the collectives of another process: let each rank have a device of its own" in done.stderr
    )


FED = """
import os, sys, torch
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self): return 6
    def __getitem__(self, index): return torch.full((2,), float(index))
if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    layer = torch.nn.Linear(2, 1).cuda()
    for how in "fork", "spawn":
        total = 0
        for x in DataLoader(Data(), batch_size=2, num_workers=2, pin_memory=True, multiprocessing_context=how):
            layer(x.cuda(non_blocking=True)).sum().backward()
            total += x.cuda().sum().item()
        print(how, total, layer.weight.grad.device, flush=True)
"""


@pytest.mark.long
def test_a_rank_reads_data_by_processes_of_its_own(tmp_path: Path) -> None:
    done = command([*TORCHRUN, script(tmp_path, FED)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{how} 30.0 cuda:{rank}" for how in ("fork", "spawn") for rank in range(2)
    ]


@pytest.mark.long
def test_torchrun_needs_a_script(tmp_path: Path) -> None:
    """Where flags of torchrun come, torchrun says so itself."""
    done = command([*TORCHRUN, "--nproc-per-node", "2"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: " in done.stderr and "training_script" in done.stderr


# ---- tensors between processes

SENT = """
import torch, torch.multiprocessing as mp
def write(inbox, outbox, go):
    x, layer, part = inbox.get(), inbox.get(), inbox.get()
    go.wait()  # the sender has dropped one of its tensors
    outbox.put(part.tolist())
    del part
    x[1] = 7
    with torch.no_grad():
        layer.bias.fill_(2)
    layer(torch.ones(3, 2, device="cuda:1")).sum().backward()
    outbox.put([isinstance(layer.weight, torch.nn.Parameter), layer.weight.requires_grad, str(layer.weight.device)])
    outbox.put([layer.weight.grad.tolist()])
    torch.cuda.synchronize()
if __name__ == "__main__":
    context = mp.get_context("spawn")
    inbox, outbox, go = context.Queue(), context.Queue(), context.Event()
    child = context.Process(target=write, args=(inbox, outbox, go))
    child.start()
    x, layer = torch.arange(4.0, device="cuda:1"), torch.nn.Linear(2, 2).to("cuda:1")
    big = torch.arange(6.0, device="cuda:0").reshape(2, 3)
    before = torch.cuda.memory_allocated(0)
    for each in x, layer, big.t()[1:]:
        inbox.put(each)
    print(outbox.empty())
    del each, big
    go.set()
    for _ in range(3):
        print(outbox.get(timeout=60))
    child.join()
    print(child.exitcode, x.tolist(), layer.bias.tolist())
    print(before > 0, torch.cuda.memory_allocated(0))
"""


@pytest.mark.long
def test_a_tensor_and_a_module_arrive_as_the_same_memory(tmp_path: Path) -> None:
    done = command(["run", *POOL, script(tmp_path, SENT)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "True",
        "[[1.0, 4.0], [2.0, 5.0]]",
        "[True, True, 'cuda:1']",
        "[[[3.0, 3.0], [3.0, 3.0]]]",
        "0 [0.0, 7.0, 2.0, 3.0] [2.0, 2.0]",
        "True 0",
    ]


FORKED = """
import os, sys, torch
x = torch.arange(3.0, device="cuda:1")
x.sum().item()
sys.stdout.flush()
if (child := os.fork()) == 0:
    mine = torch.ones(4, device="cuda:1")
    print("child", mine.sum().item(), torch.cuda.device_count(), flush=True)
    sys.exit(0)
print("status", os.waitpid(child, 0)[1], x.tolist())
"""


@pytest.mark.long
def test_a_forked_process_uses_the_devices_too(tmp_path: Path) -> None:
    done = command(["run", *POOL, script(tmp_path, FORKED)], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["child 4.0 2", "status 0 [0.0, 1.0, 2.0]"]


# ---- the end

LONGER = """
import os, time, torch
x = torch.ones(2, device="cuda")
x.sum().item()
open("attached", "w").close()
while os.path.exists("parent"):
    time.sleep(0.05)
time.sleep(1)
print("child", x.sum().item(), flush=True)
"""

SHORTER = """
import os, subprocess, sys, time
open("parent", "w").close()
subprocess.Popen([sys.executable, "longer.py"])
while not os.path.exists("attached"):
    time.sleep(0.05)
os.unlink("parent")
print("parent", flush=True)
"""


@pytest.mark.long
def test_the_pool_stays_for_processes_that_use_it(tmp_path: Path) -> None:
    (tmp_path / "longer.py").write_text(LONGER)
    done = command(["run", *POOL, script(tmp_path, SHORTER)], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["parent", "child 2.0"]


ENDLESS = """
import os, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["RANK"]))
dist.init_process_group("nccl")
x = torch.zeros(2, device="cuda")
dist.all_reduce(x)
x.sum().item()
print("at", os.environ["ONEBOX_PARENT"], flush=True)
while True:
    dist.all_reduce(x)
    x.sum().item()
"""


def test_ctrl_c_ends_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    with running([*TORCHRUN, script(tmp_path, ENDLESS)], tmp_path) as process:
        (address,) = read_until(process, "^at (.*)")
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 4 and Path(address).exists()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WITHIN_S)
        assert process.returncode in (1, 130, -signal.SIGINT)
        assert_gone(started)
    assert not Path(address).parent.exists()


ORPHAN = """
import subprocess, sys, time, torch
child = subprocess.Popen([sys.executable, "-c", '''
import signal, torch
signal.signal(signal.SIGINT, signal.SIG_IGN)
x = torch.ones(2, device="cuda")
print("begun", x.sum().item(), flush=True)
try:
    while True:
        x.sum().item()
except Exception as error:
    print(type(error).__name__, error, flush=True)
'''])
time.sleep(60)
"""


@pytest.mark.long
def test_a_process_whose_pool_has_ended_gets_an_error(tmp_path: Path) -> None:
    with running(["run", *POOL, script(tmp_path, ORPHAN)], tmp_path) as process:
        read_until(process, "begun 2.0")
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=WITHIN_S)
        assert printed.splitlines() == ["PoolError the process that shares its devices with this one has ended"]
        assert_gone(started)
