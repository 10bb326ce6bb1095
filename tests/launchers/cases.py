"""The cases: what is started on virtual devices, and what on the CPU by the same script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

FOLDER = Path(__file__).parent
BIN = Path(sys.executable).parent
WITHIN_S = 240.0

GLOO_ENDS = "terminate called without an active exception"
"""A process with Gloo's threads may abort as it ends, after its last loss (pytorch/pytorch#190489). Ranks on virtual
devices have no such threads and must not."""


TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node")
ACCELERATE = (
    *(
        "accelerate",
        "launch",
        "--multi_gpu",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ),
    "--num_processes",
)

BFLOAT16 = 0.015
"""Tolerance in bfloat16, whose 8 bits round a loss of 4 by up to 0.008: autocast on the CPU computes other operators in
float32 than autocast on a GPU."""

HALF = 0.002
"""Tolerance in float16, whose 11 bits round a loss of 4 by up to 0.001; the CPU computes in full precision."""


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
        plain: Arguments that differ on the CPU: old and new ones, empty to leave one out.
        plain_ranks: Whether there is a rank for each device on the CPU, by torchrun, though not on virtual devices.
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
    plain_ranks: bool = False
    tolerance: float = 1e-5
    packages: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Its name among all."""
        return f"{self.framework} {self.name} {self.devices}"


def _case(framework: str, name: str, devices: int, script: str, **more: Any) -> Case:
    words = script.split()
    return Case(framework=framework, name=name, devices=devices, script=(f"{words[0]}_script.py", *words[1:]), **more)


def _accelerate(name: str, devices: int, flags: str = "", **more: Any) -> Case:
    launch = {"launcher": ACCELERATE} if devices > 1 else {"ranks": False}
    return _case("accelerate", name, devices, f"accelerate {flags}", packages=("accelerate",), **launch, **more)


def _finetuning(feature: str, name: str) -> Case:
    packages = ("accelerate", "transformers", "datasets")
    return _case(
        "accelerate", f"pretrained, {name}", 2, f"finetuning {feature}", launcher=ACCELERATE, packages=packages
    )


def _lightning(name: str, devices: int, **more: Any) -> Case:
    return _case("lightning", name, devices, f"lightning {devices} {name}", packages=("lightning",), **more)


def _transformers(name: str, devices: int, flags: str = "", **more: Any) -> Case:
    packages = ("transformers", "accelerate", *(("peft",) if "--adapters" in flags else ()))
    return _case("transformers", name, devices, f"transformers {flags}", packages=packages, **more)


CASES = (
    _case("torchrun", "DistributedDataParallel", 2, "torchrun", launcher=TORCHRUN),
    _case("torchrun", "DistributedDataParallel", 4, "torchrun", launcher=TORCHRUN),
    _case("torchrun", "fully_shard", 2, "sharded fully_shard", launcher=TORCHRUN),
    _case("torchrun", "tensor parallelism", 2, "sharded tensor_parallel", launcher=TORCHRUN),
    _case("torchrun", "functional collectives", 2, "sharded functional", launcher=TORCHRUN),
    _case("torch.multiprocessing", "spawn", 2, "spawn"),
    _case("torch.multiprocessing", "shared model", 1, "hogwild", ranks=False),
    _accelerate("python", 1),
    _accelerate("launch", 2),
    _accelerate("gradient accumulation", 2, "--accumulate 2"),
    _accelerate("bf16", 2, "--mixed-precision bf16", tolerance=BFLOAT16),
    _accelerate("fp16", 2, "--mixed-precision fp16", tolerance=HALF, plain=(("fp16", "no"),)),
    _finetuning("nlp", "gathered metrics"),
    _finetuning("accumulation", "gradient accumulation"),
    _finetuning("automatic-accumulation", "automatic gradient accumulation"),
    _finetuning("checkpointing", "resumed in an epoch"),
    _finetuning("cross-validation", "cross validation"),
    _finetuning("early-stopping", "early stopping"),
    _finetuning("local-sgd", "local SGD"),
    _finetuning("memory", "find_executable_batch_size"),
    _finetuning("parallel-options", "options of DistributedDataParallel"),
    _finetuning("profiler", "profiler"),
    _finetuning("split-batches", "split batches"),
    _finetuning("tracking", "tracking"),
    _lightning("auto", 1),
    _lightning("ddp", 2),
    _lightning("ddp_spawn", 2),
    _lightning("ddp_fork", 2),
    _transformers("Trainer", 1, "--batch 8"),
    _transformers("bf16", 1, "--batch 8 --set bf16", tolerance=BFLOAT16),
    _transformers("fp16", 1, "--batch 8 --set fp16", tolerance=HALF, plain=(("--set", ""), ("fp16", ""))),
    _transformers("gradient checkpointing", 1, "--batch 8 --set gradient_checkpointing"),
    _transformers("torch_compile", 1, "--batch 8 --set torch_compile", plain=(("--set", ""), ("torch_compile", ""))),
    _transformers("DistributedDataParallel", 2, "--batch 4", launcher=TORCHRUN),
    _transformers("DistributedDataParallel", 4, "--batch 2", launcher=TORCHRUN),
    _transformers("from_pretrained", 2, "--batch 4 --pretrained", launcher=TORCHRUN),
    _transformers("device_map", 2, "--batch 8 --layers 6 --device-map", ranks=False),
    _transformers("DataParallel", 2, "--batch 4", ranks=False, plain=(("4", "8"),)),
    _transformers("DataParallel, classifier", 2, "--batch 4 --classifier", ranks=False, plain_ranks=True),
    _transformers("LoRA", 1, "--batch 8 --adapters lora"),
    _transformers("DoRA", 1, "--batch 8 --adapters dora"),
    _transformers("LoRA, DistributedDataParallel", 2, "--batch 4 --adapters lora", launcher=TORCHRUN),
    _case("trl", "SFTTrainer", 1, "trl", ranks=False, packages=("trl", "transformers")),
    _case("trl", "SFTTrainer", 2, "trl --batch 4", launcher=TORCHRUN, packages=("trl", "transformers")),
    _case(
        "trl",
        "SFTTrainer, from_pretrained",
        2,
        "trl --batch 4 --pretrained",
        launcher=TORCHRUN,
        packages=("trl", "transformers"),
    ),
    _case("diffusers", "UNet2DModel", 1, "diffusers", ranks=False, packages=("diffusers", "accelerate")),
    _case("diffusers", "UNet2DModel", 2, "diffusers", launcher=ACCELERATE, packages=("diffusers", "accelerate")),
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
    if virtual:
        launcher = [*case.launcher, str(case.devices)] if case.launcher else []
        return [str(BIN / "onebox"), "run", "--pool", f"cpu*{case.devices}", "--threads", "1", *launcher, *script]
    changes = dict(case.plain)
    script = [word for word in (changes.get(word, word) for word in script) if word]
    if case.launcher or case.plain_ranks:
        return [str(BIN / TORCHRUN[0]), *TORCHRUN[1:], str(case.devices), *script]
    return [sys.executable, *script]


def run(case: Case, *, virtual: bool) -> Outcome:
    """Run the script of a case.

    Raises:
        RuntimeError: It failed, or took too long.
    """
    plain = {} if virtual else {"ACCELERATE_USE_CPU": "true"}
    settings = {"RANKS": str(case.devices), **plain}
    begin_s = time.monotonic()
    found = result_of(case.title, command(case, virtual=virtual), settings, may_abort=not virtual)
    return Outcome(tuple(found["losses"]), found["ranks"], time.monotonic() - begin_s)


def result_of(
    title: str, line: Sequence[str], settings: Mapping[str, str], *, may_abort: bool = False
) -> dict[str, Any]:
    """Run a command with one thread, and return the JSON object with losses that it prints.

    Args:
        title: Name of the command in errors.
        line: The command.
        settings: Environment variables.
        may_abort: Whether it may abort as it ends, in Gloo's threads.

    Raises:
        RuntimeError: It failed, or took too long.
    """
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, **settings}
    with tempfile.TemporaryDirectory() as folder:
        pipe = subprocess.PIPE
        with subprocess.Popen(line, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                output, said = process.communicate(timeout=WITHIN_S)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"{title} took more than {WITHIN_S:.0f} s") from None
            finally:
                if process.poll() is None:  # with what it has started, of which launchers make sessions of their own
                    for each in psutil.Process(process.pid).children(recursive=True):
                        each.kill()
                    process.kill()
    lines = [line for line in output.splitlines() if line.startswith('{"losses"')]
    failed = process.returncode != 0 and not (may_abort and GLOO_ENDS in said)
    if failed or len(lines) != 1:
        raise RuntimeError(f"{title} ended with {process.returncode}: {output[-1000:]} {said[-4000:]}")
    found: dict[str, Any] = json.loads(lines[0])
    return found


def difference(ours: Outcome, plain: Outcome) -> float:
    """Return the largest difference of a loss.

    Raises:
        RuntimeError: There are not as many, or there is none.
    """
    if len(ours.losses) != len(plain.losses) or not plain.losses:
        raise RuntimeError(f"{len(ours.losses)} losses, and {len(plain.losses)} on the CPU")
    return max(abs(a - b) for a, b in zip(ours.losses, plain.losses, strict=True))


def table(versions: Mapping[str, str]) -> str:
    """Return the cases as a table for people, in Markdown.

    Args:
        versions: Versions of packages by name.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for case in CASES:
        packages = ", ".join(f"{name} {versions[name]}" for name in case.packages or ("torch",))
        key = (case.framework, case.name, packages, f"{case.tolerance:g}")
        found.setdefault(key, []).append(str(case.devices))
    rows = [
        f"| {framework} | {name} | {', '.join(devices)} | {packages} | {tolerance} |"
        for (framework, name, packages, tolerance), devices in found.items()
    ]
    return "\n".join(("| framework | what | devices | tested with | losses within |", "|---|---|---|---|---|", *rows))


def pinned_versions() -> dict[str, str]:
    """Return the versions of packages with which the cases are tested."""
    lines = (FOLDER.parents[1] / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


__all__ = [
    "BIN",
    "CASES",
    "FOLDER",
    "Case",
    "Outcome",
    "command",
    "difference",
    "pinned_versions",
    "result_of",
    "run",
    "table",
]
