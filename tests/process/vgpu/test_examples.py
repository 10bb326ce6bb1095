"""The scripts of ``examples/`` give under ``onebox run`` what they give on the CPU, though they know nothing of it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit import warm

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
COMMANDS = {
    line.split("`")[1]: [shlex.split(command) for command in re.findall("`(.*?)`", line.split(" | ")[1])]
    for line in (ROOT / "examples" / "README.md").read_text().splitlines()
    if line.startswith("| `")
}
"""The commands of the README's table: for each script the plain one, and that on the pool."""
SHORT = {
    "amp.py": "--steps 8 --width 8",
    "char_gpt.py": "--steps 8 --dropout 0 --generate 12",
    "checkpointed.py": "--steps 8 --dropout 0 --layers 4",
    "data_parallel.py": "--epochs 1 --batch-size 240 --dropout 0",
    "finetune_transformers.py": "--sentences 256 --epochs 1 --dropout 0",
    "gan.py": "--steps 12",
    "mnist_cnn.py": "--epochs 1 --batch-size 180 --log-interval 1 --dropout 0",
    "resnet_two_gpus.py": "--steps 8",
    "threads_data_parallel.py": "--steps 8",
}
"""What makes the runs short, and leaves out what a device draws from its own random numbers."""
WITHIN_S = 120.0
CLOSE = 1e-5


KNOWN: dict[tuple[str, ...], dict[str, Any]] = {}
"""What plain commands have written, which several tests compare with."""


def results(folder: Path, *commands: Sequence[str]) -> list[dict[str, Any]]:
    """Run commands of the README side by side, and return what each has written; the same plain one is run once."""
    asked = [tuple(command) for command in commands]
    fresh = iter(_run(folder, *(command for command in asked if command not in KNOWN)))
    found = [KNOWN[command] if command in KNOWN else next(fresh) for command in asked]
    KNOWN.update({command: result for command, result in zip(asked, found, strict=True) if command[0] == "python"})
    return found


def _run(folder: Path, *commands: Sequence[str]) -> list[dict[str, Any]]:
    environment = {**warm.single(), "CUDA_VISIBLE_DEVICES": ""}
    programs = {"python": [sys.executable], "onebox": [sys.executable, "-m", "onebox"]}
    files = [folder / f"{number}.json" for number in range(len(commands))]
    processes = []
    try:
        for (program, *arguments), file in zip(commands, files, strict=True):
            if program == "python":
                arguments[0] = str(ROOT / arguments[0])
            line = [*programs[program], *arguments, "--json", str(file)]
            pipe = subprocess.PIPE
            processes.append(
                warm.Popen(line, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, errors="replace")
            )
        for process in processes:
            printed, complaints = process.communicate(timeout=WITHIN_S)
            assert process.returncode == 0, printed + complaints
            assert "Warning" not in complaints
    finally:
        for process in processes:
            with process:
                process.kill()
    return [json.loads(file.read_text()) for file in files]


def both(script: str, *more: str) -> list[list[str]]:
    """Return the short forms of a script's plain command and of that on the pool."""
    return [[*command, *SHORT[script].split(), *more] for command in COMMANDS[script]]


def on_one_device(script: str, *more: str) -> list[str]:
    """Return the short form of a script's command on the pool, which then has one device."""
    return ["cpu" if word == "cpu*2" else word for word in both(script, *more)[1]]


def places(result: dict[str, Any]) -> list[str]:
    """Return the devices that a script says it has used."""
    return result.get("devices") or [result["device"]]


def assert_same(plain: dict[str, Any], pooled: dict[str, Any]) -> None:
    """Check that two runs agree in all that does not depend on the clock or on the kind of the device."""
    assert plain.keys() == pooled.keys()
    for name in plain.keys() - {"device", "devices", "samples_per_s", "peak_bytes"}:
        if isinstance(plain[name], str):
            assert plain[name] == pooled[name]
        else:
            assert pooled[name] == pytest.approx(plain[name], rel=CLOSE, abs=CLOSE), name


def test_scripts_are_ordinary_and_listed() -> None:
    assert {script.name for script in SCRIPTS} == COMMANDS.keys() == SHORT.keys()
    for script in SCRIPTS:
        assert not re.search("onebox|vgpu", script.read_text(), re.IGNORECASE)
        plain, pooled = COMMANDS[script.name]
        assert plain[:2] == ["python", f"examples/{script.name}"]
        assert pooled[:7] == ["onebox", "run", "--pool", "cpu*2", "--threads", "1", plain[1]]
        assert plain[2:] == pooled[7:]


@pytest.mark.feature("Virtual devices: Run an unmodified script on a pool")
@pytest.mark.parametrize("script", sorted(SHORT.keys() - {"amp.py"}))
def test_losses_are_those_of_the_cpu(script: str, tmp_path: Path) -> None:
    plain, pooled = results(tmp_path, *both(script))
    assert len(plain["losses"]) >= 6
    assert len(set(plain["losses"])) > 1
    assert {place.split(":")[0] for place in places(plain)} == {"cpu"}
    assert {place.split(":")[0] for place in places(pooled)} == {"cuda"}
    assert_same(plain, pooled)


def test_four_threads_share_two_devices(tmp_path: Path) -> None:
    plain, pooled = results(tmp_path, *both("threads_data_parallel.py", "--gpus", "4", "--steps", "4"))
    assert places(pooled) == ["cuda:0", "cuda:1"] * 2
    assert pooled["apart"] == 0.0
    assert_same(plain, pooled)


@pytest.mark.feature("Virtual devices: Train in mixed precision with a gradient scaler")
def test_mixed_precision(tmp_path: Path) -> None:
    """Which operators run in which precision differs between kinds of devices: the curves are near, not equal."""
    plain, pooled = results(tmp_path, *both("amp.py"))
    assert pooled["outputs"] == "torch.float16"
    assert pooled["losses"][-1] < pooled["losses"][0]
    assert pooled["losses"] == pytest.approx(plain["losses"], abs=0.02)
    assert places(pooled) == ["cuda"]


@pytest.mark.feature("Virtual devices: Checkpoint activations with the same random numbers")
def test_recomputed_activations_draw_the_same_random_numbers(tmp_path: Path) -> None:
    draw = ("--dropout", "0.2", "--steps", "6")
    kept, recomputed, reentrant, plain = results(
        tmp_path,
        on_one_device("checkpointed.py", *draw, "--no-checkpoint"),
        on_one_device("checkpointed.py", *draw),
        on_one_device("checkpointed.py", *draw, "--reentrant"),
        both("checkpointed.py", *draw)[0],
    )
    assert_same(kept, recomputed)
    assert_same(kept, reentrant)
    assert abs(kept["losses"][0] - plain["losses"][0]) > CLOSE, "random numbers of a device are its own"
    assert kept["peak_bytes"] > recomputed["peak_bytes"] > 0


@pytest.mark.parametrize("script", ["char_gpt.py", "mnist_cnn.py"])
def test_a_run_with_dropout_repeats_itself(script: str, tmp_path: Path) -> None:
    again = on_one_device(script, "--dropout", "0.3")
    first, second, without = results(tmp_path, again, again, both(script)[0])
    assert first == second
    assert abs(first["losses"][0] - without["losses"][0]) > CLOSE, "something was dropped"
