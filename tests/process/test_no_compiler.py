"""A trainer needs neither the object of the virtual devices nor a compiler; a tensor of one says what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onebox.vgpu.native import build

TRAINS = """
import sys
import torch
from torch import nn
import onebox
from onebox.vgpu import native

def train():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    samples = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.zeros(16, 1))
    with onebox.open("cpu*2", threads=1) as pool:
        torch.manual_seed(3)
        with onebox.Trainer(model, nn.functional.mse_loss, optimizer, pool=pool) as trainer:
            for batch in torch.utils.data.DataLoader(samples, 8, pin_memory=True):
                assert trainer.step(*batch).item() > 0
            trainer.pull()
        with torch.random.fork_rng(devices=[0, 1], device_type="DEVICE"):
            model(torch.ones(2, 4)).sum().backward()
        torch.get_device_module("DEVICE").synchronize()
        torch.compile(model, backend="eager")(torch.ones(2, 4))
        print("trained", native.loaded())
        if "then a tensor" in sys.argv:
            torch.ones(1, device="DEVICE:0")

if __name__ == "__main__":
    train()
"""


@pytest.fixture
def lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for scripts that find no object of the virtual devices and no compiler."""
    if build.packaged().exists():
        pytest.skip("this installation has the object of the virtual devices")
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def run(folder: Path, device: str, *arguments: str, by: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the script, whose devices have a name."""
    script = folder / "script.py"
    script.write_text(TRAINS.replace("DEVICE", device), encoding="utf-8")
    command = [sys.executable, *by, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=dict(os.environ))


BY_ONEBOX_RUN = "-m", "onebox", "run", "--pool", "cpu", "--threads", "1"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("device", "by"), [("vgpu", ()), ("cuda", BY_ONEBOX_RUN)], ids=["python", "onebox run"])
def test_a_trainer_trains(device: str, by: tuple[str, ...], lacking: Path) -> None:
    done = run(lacking, device, by=by)
    assert (done.returncode, done.stdout) == (0, "trained None\n"), done.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("device", "by"), [("vgpu", ()), ("cuda", BY_ONEBOX_RUN)], ids=["python", "onebox run"])
def test_a_tensor_in_the_same_process_is_one_clear_error(device: str, by: tuple[str, ...], lacking: Path) -> None:
    done = run(lacking, device, "then a tensor", by=by)
    assert (done.returncode, done.stdout) == (1, "trained None\n"), done.stderr
    assert done.stderr.rstrip().splitlines()[-1] == (
        "onebox.errors.PoolError: virtual devices need a C++ compiler once, and there is no /nonexistent: install it, "
        "such as by apt install g++, or name another by CXX; a Trainer, agents and workers need none"
    )
