"""Memory of the client while it pulls and saves: measured in a process of its own, by the kernel's high-water mark."""

from __future__ import annotations

import os
import subprocess
import sys

MODEL_BYTES = 144 << 20
LARGEST_BYTES = 16 << 20
UNDER_WAY_BYTES = 64 << 20
"""Requests of 4 MiB, four for each of two workers, as they are received, opened and queued."""

RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
"""What is freed goes back to the system at once, so that the mark is that of memory in use: glibc otherwise keeps as
much of the model in its arenas as the timing of threads happens to leave there."""

SCRIPT = f"""
import sys
import tempfile
import torch
from torch import nn
import onebox
from onebox.plan import Plan, Stage

LARGEST_BYTES = {LARGEST_BYTES}


def mark(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def extra(action):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts anew
    before = mark("VmRSS")
    action()
    return mark("VmHWM") - before


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2048, 2048, bias=False) for _ in range({MODEL_BYTES // LARGEST_BYTES})])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


torch.set_num_threads(1)
model = Model()
assert sum(p.nbytes for p in model.parameters()) == {MODEL_BYTES}
assert max(p.nbytes for p in model.parameters()) == LARGEST_BYTES
split = sys.argv[1] == "split"
names = tuple(f"model.layers.{{number}}" for number in range(len(model.layers))) if split else ()
stage = Stage(segments=names, replicas=((0, 1),) if split else ((0,), (1,)), shares=(1.0,) * (2 - split))
plan = Plan(stages=(stage,), micro_batch=2 if split else None)
optimizer = torch.optim.Adam(model.parameters())
with onebox.open("cpu*2", threads=1) as pool:
    trainer = onebox.Trainer(model, nn.functional.mse_loss, optimizer, pool=pool, plan=plan, recovery=None)
    trainer.step(torch.ones(2, 2048), torch.zeros(2, 2048))
    trainer.wait()
    for action in (trainer.pull, lambda: trainer.save(tempfile.mkdtemp())):
        print(extra(action))
    trainer._close(keep=False)
"""


def extras(kind: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | RETURNED,
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def test_pull_and_save_take_less_than_a_few_tensors() -> None:
    """Requests of 4 MiB, four under way, what the channel queues, and what each is copied to; not the model."""
    pulled, saved = extras("replicas")
    assert pulled < 2 * LARGEST_BYTES + MODEL_BYTES // 8, pulled
    assert saved < 2 * LARGEST_BYTES + MODEL_BYTES // 8, saved


def test_shares_of_split_layers_are_put_together_in_place() -> None:
    """One tensor is whole at a time, beside requests of two workers that are under way."""
    pulled, saved = extras("split")
    assert pulled < LARGEST_BYTES + UNDER_WAY_BYTES < MODEL_BYTES, pulled
    assert saved < 2 * LARGEST_BYTES + UNDER_WAY_BYTES < MODEL_BYTES, saved
