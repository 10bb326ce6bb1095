"""What a script is bound by is said at its end, with the line that waits most."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.process.cli.test_run_command import run, script

READS = """
import torch
net = torch.nn.Linear(1024, 1024, device="cuda")
x = torch.randn(1024, 1024, device="cuda")
for step in range(20):
    out = net(x).sum()
    total = out.item()
"""

UPLOADS = """
import torch
images = torch.ones(32, 3, 256, 256)
for step in range(20):
    first = images.cuda()[0, 0, 0, 0].item()
"""

SLOW = """
import torch
x = torch.randn(512, 512, device="cuda")
for step in range(100):
    x = (x @ x).tanh()
print(x.sum().item())
"""

TRAINS = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
x = torch.ones(4, device="cuda")
for step in range(3):
    dist.all_reduce(x)
    seen = x.sum().item()
dist.destroy_process_group()
"""


@pytest.mark.feature("Monitoring: Hear what a script is bound by")
def test_the_line_that_reads_most_is_named(tmp_path: Path) -> None:
    script(tmp_path, READS)
    done = run(tmp_path, "--verbose", "script.py")
    assert (done.returncode, done.stdout) == (0, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("onebox: ") and re.search(r"busy cuda:0 \d+ %: ", line)
    if "waited for values" in line:  # unless the device or the script took still longer
        assert ", most at script.py:7 total = out.item() (" in line


@pytest.mark.feature("Monitoring: Hear what a script is bound by")
def test_uploads_are_named(tmp_path: Path) -> None:
    script(tmp_path, UPLOADS)
    done = run(tmp_path, "--verbose", "script.py")
    assert done.returncode == 0
    assert re.search(r"^onebox: .* bound by uploads: 480 MiB took \d+ %; busy cuda:0 \d+ %: ", done.stderr), done.stderr


@pytest.mark.feature("Monitoring: Hear what a script is bound by")
def test_a_device_is_named_and_one_that_is_idle(tmp_path: Path) -> None:
    script(tmp_path, SLOW.replace("import torch", "import torch\ntorch.ones(1, device='cuda:1')"))
    done = run(tmp_path, "--verbose", "script.py", pool=("--pool", "cpu@0.05,cpu", "--threads", "1"))
    assert done.returncode == 0
    said = r"^onebox: .*, bound by the device cuda:0; busy cuda:0 \d+ %, cuda:1 \d+ %: give cuda:1 more of the work$"
    assert re.search(said, done.stderr), done.stderr


def test_a_short_script_is_not_commented(tmp_path: Path) -> None:
    script(tmp_path, "import torch\nprint(torch.ones(2).cuda().sum().item())\n")
    done = run(tmp_path, "script.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n", "")


def test_one_rank_tells_for_all(tmp_path: Path) -> None:
    script(tmp_path, TRAINS)
    pool = ("--pool", "cpu*2", "--threads", "1")
    done = run(tmp_path, "--verbose", "torchrun", "--nproc-per-node", "gpu", "script.py", pool=pool)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "busy cuda:" in line]
    assert len(lines) == 1 and lines[0].startswith("onebox: rank 0: ") and "busy cuda:0 " in lines[0], done.stderr
