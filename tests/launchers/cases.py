"""The cases: what is started on virtual devices, and what on the CPU by the same script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
BIN = Path(sys.executable).parent
WITHIN_S = 240.0

TORCHRUN = ("torchrun", "--nproc-per-node")
ACCELERATE = (
    *("accelerate", "launch", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
    "--num_processes",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to train with a framework.

    Args:
        framework: Whose.
        name: What of it.
        devices: Number of devices.
        script: The script, with its arguments.
        launcher: Command before the script, which has the number of devices as its last argument; empty for none.
        ranks: Whether there is a rank for each device.
        plain: Arguments that differ on the CPU: old and new ones.
        tolerance: Largest absolute difference of a loss.
        packages: Packages beside PyTorch whose versions count.
    """

    framework: str
    name: str
    devices: int
    script: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    ranks: bool = True
    plain: tuple[tuple[str, str], ...] = ()
    tolerance: float = 1e-5
    packages: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Its name among all."""
        return f"{self.framework} {self.name} {self.devices}"


def _case(framework: str, name: str, devices: int, script: str, **more: Any) -> Case:
    words = script.split()
    return Case(framework=framework, name=name, devices=devices, script=(f"{words[0]}_script.py", *words[1:]), **more)


def _transformers(name: str, devices: int, flags: str = "", **more: Any) -> Case:
    return _case("transformers", name, devices, f"transformers {flags}", packages=("transformers",), **more)


CASES = (
    _case("torchrun", "ddp", 2, "torchrun", launcher=TORCHRUN),
    _case("torchrun", "ddp", 4, "torchrun", launcher=TORCHRUN),
    _case("torch.multiprocessing", "spawn", 2, "spawn"),
    _case("torch.multiprocessing", "shared model", 1, "hogwild", ranks=False),
    _case("accelerate", "script", 1, "accelerate", ranks=False, packages=("accelerate",)),
    _case("accelerate", "launch", 2, "accelerate", launcher=ACCELERATE, packages=("accelerate",)),
    _case(
        "accelerate",
        "bf16",
        2,
        "accelerate --mixed-precision bf16",
        launcher=ACCELERATE,
        packages=("accelerate",),
        tolerance=0.02,
    ),
    _case("lightning", "auto", 1, "lightning 1 auto", packages=("lightning",)),
    _case("lightning", "ddp", 2, "lightning 2 ddp", packages=("lightning",)),
    _transformers("trainer", 1, "--batch 8"),
    _transformers("bf16", 1, "--batch 8 --set bf16", tolerance=0.02),
    _transformers("gradient checkpointing", 1, "--batch 8 --set gradient_checkpointing"),
    _transformers("torch.compile", 1, "--batch 8 --set torch_compile"),
    _transformers("ddp", 2, "--batch 4", launcher=TORCHRUN),
    _transformers("ddp", 4, "--batch 2", launcher=TORCHRUN),
    _transformers("device_map", 2, "--batch 8 --device-map", ranks=False),
    _transformers("DataParallel", 2, "--batch 4", ranks=False, plain=(("4", "8"),)),
)


@dataclass(frozen=True)
class Outcome:
    """What a script printed, and how long it took.

    Args:
        losses: Losses, in order.
        ranks: Number of ranks.
        seconds: From its start to its end.
    """

    losses: tuple[float, ...]
    ranks: int
    seconds: float


def command(case: Case, *, virtual: bool) -> list[str]:
    """Return the command of a case, on virtual devices or on the CPU."""
    script = [str(FOLDER / case.script[0]), *case.script[1:]]
    launcher = [*case.launcher, str(case.devices)] if case.launcher else []
    if not virtual:
        changes = dict(case.plain)
        script = [changes.get(word, word) for word in script]
        if case.launcher[:1] == ("accelerate",):
            launcher = ["torchrun", "--nproc-per-node", str(case.devices)]
        return [str(BIN / launcher[0]), *launcher[1:], *script] if launcher else [sys.executable, *script]
    if case.launcher[:1] == ("accelerate",):
        launcher[2:2] = ["--multi_gpu"]
    pool = ["--pool", f"cpu*{case.devices}", "--threads", "1"]
    return [str(BIN / "onebox"), "run", *pool, *launcher, *script]


def run(case: Case, *, virtual: bool) -> Outcome:
    """Run the script of a case.

    Raises:
        RuntimeError: It failed, or took too long.
    """
    settings = {"OMP_NUM_THREADS": "1", "RANKS": str(case.devices), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    environment = {**os.environ, **settings}
    if not virtual:
        environment["ACCELERATE_USE_CPU"] = "true"
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command(case, virtual=virtual),
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=WITHIN_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{case.title} took more than {WITHIN_S:.0f} s") from None
    seconds = time.monotonic() - begin_s
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"losses"')]
    if done.returncode or len(lines) != 1:
        raise RuntimeError(f"{case.title} ended with {done.returncode}: {done.stdout[-1000:]} {done.stderr[-4000:]}")
    found = json.loads(lines[0])
    return Outcome(tuple(found["losses"]), found["ranks"], seconds)


def difference(ours: Outcome, plain: Outcome) -> float:
    """Return the largest difference of a loss.

    Raises:
        RuntimeError: There are not as many, or there is none.
    """
    if len(ours.losses) != len(plain.losses) or not plain.losses:
        raise RuntimeError(f"{len(ours.losses)} losses, and {len(plain.losses)} on the CPU")
    return max(abs(a - b) for a, b in zip(ours.losses, plain.losses, strict=True))


__all__ = ["CASES", "Case", "Outcome", "command", "difference", "run"]
