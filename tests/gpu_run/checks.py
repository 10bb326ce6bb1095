"""The checks of a GPU in the order in which they run: what each command would reveal, and how long it may take.

What is quick and what everything else rests on comes first; benchmarks come last, as a figure of a wrong result is
worth nothing. The limits are several times what a check takes, and bound a check that hangs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["cuda", "model", "cpu"]
"""Devices that are checked: GPUs, the modelled accelerator, or CPU workers for a rehearsal."""

TEST_S = 60
"""Time limit of one test, earlier than that of a whole check; it ends with the stacks of all threads."""

SPARE_S = 10
"""Least time that is worth starting a check for."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A command whose exit status says whether something holds.

    Args:
        name: Short name, also that of its log.
        reveals: What a failure would show.
        command: Arguments of the Python interpreter; ``{device}`` stands for the kind of devices, ``{folder}`` for the
            folder of the report.
        limit_s: Longest run; all of its processes are ended then.
        devices: Number of devices that it needs.
        tests: Whether the command is pytest's, which writes a listing of results.
        rehearsal: Further arguments where no GPU is checked.
    """

    name: str
    reveals: str
    command: tuple[str, ...]
    limit_s: float
    devices: int = 1
    tests: bool = False
    rehearsal: tuple[str, ...] = ()


def suite(name: str, reveals: str, *selection: str, limit_s: float, devices: int = 1) -> Check:
    """Return a check that runs tests.

    A warning is none of its business: PyTorch has warnings of its own on each kind of GPU.

    Args:
        name: Of the check.
        reveals: What a failure would show.
        selection: Files of tests, and other arguments of pytest.
        limit_s: Longest run.
        devices: Number of devices that it needs.
    """
    usual = ("-m", "pytest", "-v", "-W", "default", "-p", "no:cacheprovider")
    return Check(name=name, reveals=reveals, command=(*usual, *selection), limit_s=limit_s, devices=devices, tests=True)


_PAIR = "tests/gpu/test_two_gpus.py"

CHECKS: tuple[Check, ...] = (
    Check(
        name="machine",
        reveals="whether the driver, PyTorch and all packages work without onebox",
        command=("-m", "tests.gpu_run.machine", "{device}"),
        limit_s=90,
    ),
    suite(
        "open",
        "the sandbox refuses device files, libraries or system calls that CUDA needs",
        "tests/gpu/test_open.py",
        limit_s=120,
    ),
    suite(
        "equality",
        "wrong results: float64 on one worker against plain PyTorch",
        "tests/gpu/test_equality.py",
        limit_s=180,
    ),
    suite(
        "operators",
        "operators whose shapes or types differ from those that the CPU's capture promised",
        "tests/gpu/test_operators.py",
        limit_s=240,
    ),
    suite(
        "clocks",
        "times of instructions that are those of the host's calls instead of the GPU's work",
        "tests/gpu/test_clocks.py",
        limit_s=90,
    ),
    suite("offload", "a copy that memory is taken from too early", "tests/gpu/test_offload.py", limit_s=120),
    suite(
        "host update",
        "gradients or parameters that are read before they are made",
        "tests/gpu/test_host_update.py",
        limit_s=120,
    ),
    suite("versions", "versions of parameters that share memory", "tests/gpu/test_versions.py", limit_s=90),
    suite(
        "transfers",
        "tensors between a GPU and a CPU that arrive wrong or late",
        "tests/gpu/test_transfers.py",
        limit_s=90,
    ),
    suite(
        "bad label",
        "a device-side assertion whose worker stays in the pool with a broken context",
        "tests/gpu/test_bad_label.py",
        limit_s=120,
    ),
    suite(
        "memory",
        "peaks that are not those predicted, budgets that do not bind",
        "tests/gpu/test_memory.py",
        limit_s=120,
    ),
    suite("numerics", "TF32 or nondeterminism that nobody asked for", "tests/gpu/test_numerics.py", limit_s=90),
    suite("one GPU twice", "two workers of one GPU: NCCL refuses them", "tests/gpu/test_one_gpu_twice.py", limit_s=120),
    suite("virtual", "the virtual device on a GPU", "tests/gpu/test_virtual.py", limit_s=120),
    suite("two: replicas", "averaging over NCCL", _PAIR, "-k", "replicas", limit_s=90, devices=2),
    suite(
        "two: pipelines", "a deadlock of sends and receives over NCCL", _PAIR, "-k", "schedules", limit_s=240, devices=2
    ),
    suite(
        "two: skips", "channels of one pair that swap: NCCL has no tags", _PAIR, "-k", "skips", limit_s=90, devices=2
    ),
    suite(
        "two: migration",
        "a plan that takes over while groups of the last one close",
        _PAIR,
        "-k",
        "migration",
        limit_s=120,
        devices=2,
    ),
    suite("two: peer killed", "a wait of NCCL that nothing interrupts", _PAIR, "-k", "killed", limit_s=180, devices=2),
    suite("two: idle", "NCCL's own threads: heartbeat and watchdog", _PAIR, "-k", "idle", limit_s=150, devices=2),
    Check(
        name="steps",
        reveals="speed: remote over plain eager PyTorch, the target is at most 1.02; with a kernel timeline",
        command=("benchmarks/gpu_steps.py", "--pool", "{device}", "--limit", "420", "--timeline", "{folder}", "--json"),
        limit_s=540,
        rehearsal=("--tiny", "--rounds", "2"),
    ),
)
