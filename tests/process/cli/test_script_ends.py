"""However a script under ``onebox run`` ends, and whatever goes on at the time: its own exit status, nothing odd said.

Each run is a new process, as what an interpreter does at its end depends on what has been imported, and in which order.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

IMPORTS = "import os, signal, sys, threading, time\nimport torch\n"

BUSY = {
    "uploading": """
images = torch.ones(32, 3, 256, 256)
for _ in range(10):
    images.cuda(), images.cuda(1)
""",
    "ahead": """
x = torch.ones(600, 600, device="cuda")
for _ in range(60):
    x = (x @ x).clamp(0, 1)
""",
    "training": """
net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(20):
    optimizer.zero_grad()
    net(torch.randn(64, 256).cuda()).square().mean().backward()
    optimizer.step()
""",
    "loading": """
from torch.utils.data import DataLoader
batches = iter(DataLoader(torch.ones(4096, 512), 32, num_workers=2, pin_memory=True))
kept = [next(batches).cuda(non_blocking=True) for _ in range(3)]
""",
    "between devices": """
a = torch.ones(1 << 20, device="cuda")
for _ in range(20):
    a = (a.to("cuda:1") + 1).to("cuda")
""",
    "tensors in cycles": """
import builtins
class Node: pass
node = Node()
node.self, node.tensor = node, torch.ones(1000, 1000, device="cuda")
builtins.kept = [torch.ones(3, device="cuda:1"), node]
""",
    "compiled": """
step = torch.compile(lambda x: (x * 2).relu().sum())
for n in range(3):
    step(torch.ones(8, 8, device="cuda"))
""",
}

ENDS = {
    "": 0,
    "1 / 0": 1,
    "sys.exit(3)": 3,
    "os._exit(4)": 4,
    "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)": 143,
    "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)": -2,
    "threading.Timer(0.2, os._exit, [5]).start(); time.sleep(60)": 5,
}

FLAGS = (
    (),
    ("--profile", "trace.json"),
    ("--recover",),
    ("--page",),
    ("--verbose",),
    ("--synchronous",),
    ("--memory", "300MiB", "--memory-policy", "offload"),
)

ODD = re.compile("Assertion|pyzmq|Fatal|Exception|core dumped|terminate called|double free|Segmentation")

FEW, ALL = 4, 200


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.soak if seed >= FEW else pytest.mark.long) for seed in range(ALL)],
)
def test_a_script_ends_as_by_itself(seed: int, tmp_path: Path) -> None:
    drawn = random.Random(seed)
    busy, (end, status), flags = drawn.choice([*BUSY]), drawn.choice([*ENDS.items()]), drawn.choice(FLAGS)
    (tmp_path / "script.py").write_text(f"{IMPORTS}{BUSY[busy]}{end}\n")
    line = [sys.executable, "-m", "onebox", "run", "--pool", "cpu*2", "--threads", "1", *flags, "script.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, ODD.findall(done.stderr)) == (status, []), (busy, end, flags, done.stderr)
