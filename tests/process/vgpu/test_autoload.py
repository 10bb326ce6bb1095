"""The entry point that PyTorch calls: nothing without the environment, devices on demand with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOKS = """
import sys, threading, torch
print("onebox.vgpu" in sys.modules, len(threading.enumerate()))
device = torch.accelerator.current_accelerator()
print(device, torch.accelerator.is_available(), torch.accelerator.device_count())
if device is not None:
    model = torch.nn.Linear(4, 2).to(device)
    model(torch.ones(3, 4, device=device)).sum().backward()
    print(model.weight.grad.device, model.weight.grad.sum().item())
"""

ACCELERATES = """
import torch
import accelerate
made = accelerate.Accelerator()
model = torch.nn.Linear(4, 2)
model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
made.backward(model(torch.ones(3, 4, device=made.device)).sum())
optimizer.step()
print(made.device, torch.accelerator.current_accelerator(), torch.cuda.device_count())
print(next(model.parameters()).grad.device, next(model.parameters()).grad.sum().item())
"""

ASKS = """
import importlib.util, sys, torch
found = importlib.util.find_spec("accelerate")
print(found is not None, torch.accelerator.current_accelerator(), "accelerate" in sys.modules)
import accelerate
print(torch.accelerator.current_accelerator(), type(accelerate.__spec__.loader).__name__)
"""

LIGHTNING = """
import torch
import lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, index):
        print(batch.device)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = lightning.Trainer(
    devices=1, max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=4))
print(trainer.strategy.root_device, torch.cuda.device_count())
"""

OPENS = """
import torch, onebox
with onebox.open("cpu", threads=1) as pool:
    print(len(pool), torch.accelerator.device_count())
"""


def run(text: str, folder: Path, pool: str | None) -> subprocess.CompletedProcess[str]:
    """Run a script as ``python`` does, perhaps with a pool in its environment."""
    (folder / "script.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if name not in ("ONEBOX_POOL", "ONEBOX_PARENT")}
    if pool is not None:
        environment["ONEBOX_POOL"] = pool
    return subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.feature("Virtual devices: Get devices by an environment variable alone")
def test_a_script_that_asks_for_an_accelerator_finds_the_pool_of_the_environment(tmp_path: Path) -> None:
    done = run(LOOKS, tmp_path, "cpu*2")
    assert done.returncode == 0, done.stderr
    before, found, used = done.stdout.splitlines()
    assert before == "True 1", "nothing is opened before it is used"
    assert (found, used) == ("vgpu True 2", "vgpu:0 24.0")


def test_without_the_variable_nothing_of_onebox_is_imported(tmp_path: Path) -> None:
    done = run(LOOKS, tmp_path, None)
    assert done.stdout.splitlines()[0] == "False 1", done.stderr


def test_a_script_that_opens_a_pool_itself_has_that_one(tmp_path: Path) -> None:
    done = run(OPENS, tmp_path, "cpu*2")
    assert done.stdout.split() == ["1", "1"], done.stderr


@pytest.mark.parametrize("first", ["from onebox import vgpu", "import onebox.pool.pool", "from onebox import Trainer"])
def test_a_package_of_this_project_may_be_imported_before_torch(first: str, tmp_path: Path) -> None:
    looks = "import sys, onebox.vgpu, torch; print(torch.accelerator.current_accelerator(), onebox.vgpu.__spec__.name)"
    done = run(f"{first}\n{looks}\nassert sys.modules['onebox.vgpu'] is onebox.vgpu", tmp_path, "cpu*2")
    assert (done.returncode, done.stdout) == (0, "vgpu onebox.vgpu\n"), done.stderr


def test_a_pool_that_cannot_be_had_is_an_error_where_a_device_is_used(tmp_path: Path) -> None:
    done = run("import torch; print('imported'); torch.ones(1, device='vgpu')", tmp_path, "cup*2")
    assert (done.returncode, done.stdout) == (1, "imported\n")
    assert "cup*2" in done.stderr


@pytest.mark.parametrize(("script", "lines"), [
    (ACCELERATES, ["cuda cuda 2", "cuda:0 24.0"]),
    (LIGHTNING, ["cuda:0", "cuda:0 2"]),
    (ASKS, ["True vgpu False", "cuda SourceFileLoader"]),
])  # fmt: skip
def test_frameworks_that_know_cuda_alone_find_the_pool_of_the_environment(
    script: str, lines: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning")
    done = run(script, tmp_path, "cpu*2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == lines
