"""Scripts that users start by torchrun, accelerate, Lightning and transformers: the same losses as on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launchers.cases import CASES, Case, difference, run

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "launchers.py"

TIERS = {
    "torchrun DistributedDataParallel 2": pytest.mark.short,
    "torchrun fully_shard 2": pytest.mark.short,
    "torchrun tensor parallelism 2": pytest.mark.long,
    "torchrun functional collectives 2": pytest.mark.long,
    "accelerate launch 2": pytest.mark.long,
    "lightning ddp 2": pytest.mark.long,
    "trl SFTTrainer 2": pytest.mark.long,  # the Trainer of transformers, with PEFT
}
"""Those of the short and the long tier; make soak has all others."""


@pytest.mark.feature("Launchers: Run a script of Lightning unchanged")
@pytest.mark.feature("Launchers: Run a script of accelerate unchanged")
@pytest.mark.feature("Launchers: Run a script of torchrun unchanged")
@pytest.mark.feature("Launchers: Run a script of transformers unchanged")
@pytest.mark.feature("Launchers: Run a script of trl, PEFT or diffusers unchanged")
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.title, marks=TIERS.get(case.title, pytest.mark.soak)) for case in CASES]
)
def test_a_script_has_the_losses_of_the_cpu(case: Case) -> None:
    ours, plain = run(case, virtual=True), run(case, virtual=False)
    assert ours.ranks == (case.devices if case.ranks else 1)
    assert difference(ours, plain) <= case.tolerance


def test_the_doubled_loss_of_a_classifier_is_that_of_transformers_on_the_cpu() -> None:
    """Two ranks on the CPU log twice the loss of one process with the same batch, without any virtual device."""
    (case,) = (each for each in CASES if each.name == "DataParallel, classifier")
    doubled = run(case, virtual=False)
    once = run(Case(framework="transformers", name="classifier", devices=1, script=_whole(case)), virtual=False)
    assert doubled.losses[0] == pytest.approx(2 * once.losses[0], rel=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["even", "uneven"])
def test_planned_steps_are_compared_with_those_of_data_parallel(name: str) -> None:
    line = [
        sys.executable,
        str(BENCHMARK),
        "--only",
        f"planned {name}",
        "--rounds",
        "1",
        "--steps",
        "5",
        "--width",
        "32",
    ]
    done = subprocess.run([*line, "--json"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failed"] == 0, result
    assert result[f"planned_over_dataparallel_{name}"] > 0
    assert len(result["rows"]) == 1


def _whole(case: Case) -> tuple[str, ...]:
    """Return the script of a case with the batches of all devices on one."""
    return tuple("8" if word == "4" else word for word in case.script)
