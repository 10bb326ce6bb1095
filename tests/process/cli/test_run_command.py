"""``onebox run``: a script ends, fails and is interrupted as under Python itself, and leaves nothing running."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.process.cli.commands import POOL, WITHIN_S, assert_gone, command, read_until, running, workers_of

LOOKS = """
import atexit, concurrent.futures, sys, threading, time, torch
print(__name__, __file__, __spec__ and __spec__.name, sys.path[0], sys.argv[1:])
print(torch.cuda.is_available(), torch.cuda.device_count(), (torch.ones(2).cuda(1) * 3).sum().item())
def late():
    time.sleep(0.2)
    print("late", torch.ones(3, device="cuda").sum().item())
threading.Thread(target=late).start()
idle = concurrent.futures.ThreadPoolExecutor()
idle.submit(print, "submitted").result()
atexit.register(lambda: print("last", torch.ones(4, device="cuda").sum().item()))
sys.exit(7)
"""


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


ONE = ("--pool", "cpu", "--threads", "1")


def run(folder: Path, *arguments: str, pool: Sequence[str] = ONE) -> subprocess.CompletedProcess[str]:
    return command(["run", *pool, *arguments], folder)


# ---- as Python does it


@pytest.mark.feature("Command line: Run a script or module")
def test_a_script_is_the_main_module(tmp_path: Path) -> None:
    path = script(tmp_path, LOOKS, "there/script.py")
    done = run(tmp_path, "there/script.py", "--lr", "0.1", "--help", "-m", "x", pool=POOL)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines() == [
        f"__main__ {path} None {path.parent} ['--lr', '0.1', '--help', '-m', 'x']",
        "True 2 6.0",
        "submitted",
        "late 3.0",
        "last 4.0",
    ]


IMPORTS = """
import sys, psutil
needless = "torch._dynamo", "sympy", "matplotlib", "onebox.plan", "onebox.engine"
print(*(name for name in needless if name in sys.modules))
print(*(child.name() for child in psutil.Process().children()))
"""


def test_a_script_waits_for_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    """The compiler of PyTorch and the planner take seconds to import. One zygote is started, early."""
    line = [sys.executable, "-m", "onebox", "run", *ONE, str(script(tmp_path, IMPORTS))]  # nothing is imported before
    done = subprocess.run(line, capture_output=True, text=True, timeout=WITHIN_S, check=True)
    assert done.stdout.splitlines() == ["", "onebox-zygote"], done.stderr


@pytest.mark.feature("Command line: Run a script or module")
def test_a_module_is_found_from_the_current_folder(tmp_path: Path) -> None:
    path = script(tmp_path, LOOKS, "package/__main__.py")
    done = run(tmp_path, "-m", "package", "--pool", "cpu", pool=POOL)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines()[0] == f"__main__ {path} package.__main__ {tmp_path} ['--pool', 'cpu']"


def test_an_error_shows_the_lines_of_the_script_alone(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import torch\n"
        "def product(x):\n"
        "    return x @ torch.ones(3, 3, device='cuda')\n"
        "product(torch.ones(2, 2, device='cuda'))\n",
    )
    done = run(tmp_path, "script.py")
    assert done.returncode == 1
    lines = [line.strip() for line in done.stderr.splitlines() if not set(line.strip()) <= set("^~")]
    assert lines == [
        "Traceback (most recent call last):",
        f'File "{path}", line 4, in <module>',
        "product(torch.ones(2, 2, device='cuda'))",
        f'File "{path}", line 3, in product',
        "return x @ torch.ones(3, 3, device='cuda')",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x2 and 3x3)",
    ]


# ---- processes of the script


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_processes_of_the_script(tmp_path: Path, how: str) -> None:
    script(
        tmp_path,
        "import multiprocessing, os, sys, torch\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Data(Dataset):\n"
        "    def __len__(self): return 6\n"
        "    def __getitem__(self, index): return torch.full((2,), float(index)), os.getpid()\n"
        "def child(): print('child of', os.getppid() == int(os.environ['PARENT']), flush=True)\n"
        "if __name__ == '__main__':\n"
        "    how = sys.argv[1]\n"
        "    os.environ['PARENT'] = str(os.getpid())\n"
        "    layer = torch.nn.Linear(2, 1).cuda()\n"
        "    loader = DataLoader(Data(), batch_size=2, num_workers=2, pin_memory=True, multiprocessing_context=how)\n"
        "    total = 0\n"
        "    for x, process in loader:\n"
        "        assert os.getpid() not in process.tolist()\n"
        "        layer(x.cuda(non_blocking=True)).sum().backward()\n"
        "        total += x.cuda().sum().item()\n"
        "    print(total, layer.weight.grad.is_cuda, flush=True)\n"
        "    process = multiprocessing.get_context(how).Process(target=child)\n"
        "    process.start(); process.join()\n"
        "    print(process.exitcode)\n",
    )
    done = run(tmp_path, "script.py", how)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n") == ["30.0 True", "child of True", "0", ""]


DISTRIBUTED = """
import os, socket, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
def main(rank, size):
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.cuda.set_device(rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).cuda()
    for parameter in model.parameters():  # ranks share the random numbers of the host, so none are drawn
        nn.init.constant_(parameter, rank).data.view(-1)[::2] = 0.5
    model = DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(64.0).reshape(16, 4) / 64, torch.linspace(0, 1, 16)[:, None])
    sampler = DistributedSampler(data, size, rank)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8 // size, sampler=sampler, pin_memory=True):
            loss = nn.functional.mse_loss(model(x.to(rank, non_blocking=True)), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    if rank == size - 1:
        print(dist.get_backend(), next(model.parameters()).device, f"{mean.item():.5f}")
    dist.destroy_process_group()
if __name__ == "__main__":
    with socket.create_server(("localhost", 0)) as free:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(free.getsockname()[1])
    mp.spawn(main, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
"""


def test_a_distributed_script_has_its_ranks_on_the_devices(tmp_path: Path) -> None:
    script(tmp_path, DISTRIBUTED)
    words = {}
    for devices in (1, 2):
        done = command(["run", "--pool", f"cpu*{devices}", "--threads", "1", "script.py"], tmp_path)
        assert done.returncode == 0, done.stderr
        words[devices] = done.stdout.split()
        assert words[devices][:2] == ["nccl", f"cuda:{devices - 1}"]
    assert words[1][2] == words[2][2]


# ---- what is wrong


def test_a_pool_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    script(tmp_path, "print('never')")
    done = command(["run", "--pool", "no thing", "script.py"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("onebox: pool 'no thing' is not understood") and done.stderr.count("\n") == 1


LATE = """
import torch
embedding = torch.nn.Embedding(3, 2).cuda()
x = embedding(torch.tensor([7], device="cuda"))  # wrong
y = x * 2
print("issued")
print(y)  # read
"""


@pytest.mark.parametrize(("flags", "line", "printed"), [([], 7, "issued\n"), (["--synchronous"], 4, "")])
def test_an_error_on_a_worker_is_raised_where_it_is_noticed(
    tmp_path: Path, flags: list[str], line: int, printed: str
) -> None:
    script(tmp_path, LATE)
    done = run(tmp_path, *flags, "script.py")
    assert (done.returncode, done.stdout) == (1, printed)
    assert f"line {line}, in <module>" in done.stderr
    assert "index out of range" in done.stderr and ("aten.embedding" in done.stderr or flags)
    assert "onebox/vgpu" not in done.stderr


def test_an_error_that_nobody_reads_fails_the_command(tmp_path: Path) -> None:
    script(tmp_path, LATE.partition("print(y)")[0])
    done = run(tmp_path, "script.py")
    assert (done.returncode, done.stdout) == (1, "issued\n")
    assert done.stderr.startswith("onebox: ") and "aten.embedding" in done.stderr


def test_an_error_that_nobody_reads_is_the_end_on_the_page(tmp_path: Path) -> None:
    waits = "import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.05)\n"
    script(tmp_path, LATE.partition("print(y)")[0] + waits)
    with running(["run", *ONE, "--page", "script.py"], tmp_path) as process:
        assert process.stderr is not None
        url = next(found[1] for line in process.stderr if (found := re.search(r"page at (\S+)", line)))
        with urllib.request.urlopen(f"{url}events", timeout=WITHIN_S) as events:
            heads = []
            for line in events:
                if line.startswith(b"data: {") and (head := json.loads(line[6:]).get("head")):
                    heads.append((head["state"], head["text"]))
                    (tmp_path / "go").touch()
        assert heads == [("running", ""), ("failed", "the script has ended with status 1")]


def test_a_device_with_too_little_memory(tmp_path: Path) -> None:
    script(
        tmp_path,
        "import torch\n"
        "try:\n"
        "    print(torch.ones(1 << 20, device='cuda').sum().item())\n"
        "except torch.cuda.OutOfMemoryError as error:\n"
        "    print('out of memory', torch.ones(8, device='cuda').sum().item())\n",
    )
    done = run(tmp_path, "--memory", "1MiB", "script.py")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "out of memory 8.0\n")


# ---- devices without work

IDLE = (
    "onebox: 1 of 2 devices was used; cuda:1 had no work: move some there with .to('cuda:1'), start a rank for each "
    "device with onebox torchrun, divide the training with onebox.Trainer, or open fewer devices with --pool\n"
)
RANK = (
    "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import torch; torch.ones(1).cuda({})'], check=True)"
)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        pytest.param("torch.manual_seed(0); torch.ones(1, device='cuda')", IDLE, id="one"),
        pytest.param("torch.ones(1, device='cuda'); torch.ones(1).to('cuda:1')", "", id="both"),
        pytest.param("x = torch.ones(1).cuda(); atexit.register(x.to, 'cuda:1')", "", id="late"),
        pytest.param("torch.cuda.synchronize(1)", "", id="none"),
        pytest.param("torch.ones(1).cuda(); sys.exit(3)", "", id="failed"),
        pytest.param("torch.ones(1).cuda(); import onebox; onebox.Trainer", "", id="trainer"),
        pytest.param(f"torch.ones(1).cuda(); {RANK.format(1)}", "", id="child"),
        pytest.param(RANK.format(0), IDLE, id="only child"),
    ],
)
def test_devices_without_work_are_named(lines: str, said: str, tmp_path: Path) -> None:
    script(tmp_path, f"import atexit, sys, torch\n{lines}\n")
    line = [sys.executable, "-m", "onebox", "run", *POOL, "script.py"]  # no trainer is imported before
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert (done.returncode, done.stderr) == (3 if "exit(3)" in lines else 0, said)


def test_a_device_without_work_is_named_beside_a_page_too(tmp_path: Path) -> None:
    script(tmp_path, "import torch\ntorch.ones(1, device='cuda')\n")
    line = [sys.executable, "-m", "onebox", "run", *POOL, "--page", "script.py"]  # the page imports no trainer
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 0
    assert done.stderr.splitlines(keepends=True)[1:] == [IDLE]


# ---- nothing is left


LONG = """
import time, torch
x = torch.ones(64, 64, device="cuda:1")
print("begun", flush=True)
while True:
    x = (x @ x).clamp(0, 1)
    x.sum().item()
"""


def test_ctrl_c_ends_script_and_workers(tmp_path: Path) -> None:
    script(tmp_path, LONG)
    with running(["run", *POOL, "script.py"], tmp_path) as process:
        read_until(process, "begun")
        workers = workers_of(process)
        assert len(workers) >= 2
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=WITHIN_S)
        assert process.returncode in (130, -signal.SIGINT)  # Python may end itself by the signal; a shell says 130
        assert said.startswith("Traceback") and said.endswith("KeyboardInterrupt\n") and "in <module>" in said
        assert "src/onebox/" not in said
        assert_gone(workers)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_script_that_is_told_to_end_lets_go_of_its_devices(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    script(tmp_path, "import atexit; atexit.register(print, 'its end')\n" + LONG)
    with running(["run", *POOL, "script.py"], tmp_path) as process:
        read_until(process, "begun")
        workers = workers_of(process)
        process.send_signal(number)
        output, said = process.communicate(timeout=WITHIN_S)
    assert process.returncode == status
    assert output.endswith("its end\n")
    assert said == (
        f"onebox: ended by {number.name}; its devices are released, and what the script had not saved is lost\n"
    )
    assert_gone(workers)


def test_a_script_that_does_not_end_is_ended_when_the_time_is_over(tmp_path: Path) -> None:
    script(
        tmp_path,
        "import time\n"
        "while True:\n"
        "    try:\n"
        "        print('begun', flush=True)\n"
        "        time.sleep(60)\n"
        "    except SystemExit:\n"
        "        pass\n",
    )
    with running(["run", *ONE, "--stop-within", "0.5", "script.py"], tmp_path) as process:
        read_until(process, "begun")
        workers = workers_of(process)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 143
    assert said.startswith("onebox: ended by SIGTERM") and said.endswith("it did not end by itself\n")
    assert_gone(workers)


def test_a_script_may_catch_ctrl_c_again_and_again(tmp_path: Path) -> None:
    script(
        tmp_path,
        "import time, torch\n"
        "for number in range(2):\n"
        "    try:\n"
        "        print('begun', flush=True)\n"
        "        time.sleep(30)\n"
        "    except KeyboardInterrupt:\n"
        "        print('caught', torch.ones(2).cuda().sum().item(), flush=True)\n",
    )
    with running(["run", *ONE, "script.py"], tmp_path) as process:
        for _ in range(2):
            read_until(process, "begun")
            process.send_signal(signal.SIGINT)
            read_until(process, "caught 2.0")
        _, said = process.communicate(timeout=WITHIN_S)
        assert (process.returncode, said) == (0, "")


def test_a_worker_that_dies_is_an_error_of_the_line_that_needs_it(tmp_path: Path) -> None:
    script(tmp_path, LONG)
    with running(["run", *POOL, "script.py"], tmp_path) as process:
        read_until(process, "begun")
        workers = workers_of(process)
        os.kill(workers[-1].pid, signal.SIGKILL)
        _, said = process.communicate(timeout=WITHIN_S)
        assert process.returncode == 1
        assert "in <module>" in said and "WorkerDied" in said and "worker 1" in said
        assert "src/onebox/" not in said.split("last words")[0].replace("onebox.errors", "")
        assert_gone(workers)


COMPILES = """
import torch
from torch import nn
torch._dynamo.reset()
model = torch.compile(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).to("cuda"))
for _ in range(2):
    model(torch.ones(2, 3, 8, 8, device="cuda")).sum().backward()
torch._dynamo.reset()
print(all(p.grad.isfinite().all().item() for p in model.parameters()))
"""


def test_a_script_compiles_with_the_default_backend(tmp_path: Path) -> None:
    """Also where the model is the first to name a device; resets forget CUDA graphs, of which there are none."""
    done = run(tmp_path, str(script(tmp_path, COMPILES)))
    assert (done.returncode, done.stdout.splitlines()) == (0, ["True"]), done.stderr
