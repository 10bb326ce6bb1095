"""``benchmarks/hybrid.py`` runs, with small models, and prints what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "hybrid.py"
TIMEOUT_S = 500


@pytest.mark.soak
@pytest.mark.feature("CPU workers: Place a stage on the CPU beside a device")
def test_small_models_train_with_less_memory() -> None:
    few = ["--rounds", "1", "--models", "resnet50", "--budgets", "1/4"]
    command = [sys.executable, str(SCRIPT), "--quick", *few, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["memory_error"] == 0.0, "predicted and counted peaks are the same"
    model = found["resnet50"]
    assert model["plain_peak_mib"] > 0
    budget = model["1/4"]
    assert budget["trains"]
    assert found["quarter_trains"]
    assert "quarter_trains_alone" in found
    assert min(budget[key] for key in ("ratio_to_unlimited", "ratio_to_best_trivial")) > 0
    assert set(budget) >= {"ratio_to_torch_checkpoint", "ratio_to_torch_save_on_cpu", "alone"}


def test_it_says_where_pictures_are_missing(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--models", "vgg16", "--data", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ran.returncode == 1
    assert "cifar10-train.tar is missing" in ran.stderr
    assert "--quick" in ran.stderr
