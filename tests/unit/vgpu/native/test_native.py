"""The device in C++, with this process as its worker: the checks run in a process of their own."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
NAMES = [
    node.name
    for node in ast.parse((HERE / "checks.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and any(getattr(one, "id", "") == "check" for one in node.decorator_list)
]


def run_checks(*names: str, every: int = 12) -> dict[str, str]:
    """Run checks in a process of their own; return what was wrong with each.

    Args:
        names: The checks; all if none.
        every: How many of PyTorch's operators share one that is tried.
    """
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        pytest.skip("there is no C++ compiler, which virtual devices need once")
    # one object for all processes of the tests, whose own caches are gone when they end
    env = {**os.environ, "XDG_CACHE_HOME": str(Path(sys.prefix) / "cache"), "EVERY": str(every)}
    run = subprocess.run(
        [sys.executable, "-m", "tests.unit.vgpu.native.checks", *names],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert run.returncode == 0, (run.returncode, run.stderr[-4000:])  # also the end, with tensors alive
    lines = [line.partition("\t") for line in run.stdout.splitlines()]
    return {name: ast.literal_eval(wrong) if wrong else "" for name, _, wrong in lines}


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """What was wrong with each check."""
    return run_checks()


@pytest.mark.long  # the first of them compiles the device
@pytest.mark.parametrize("name", NAMES)
def test_the_device_in_a_process_of_its_own(name: str, found: dict[str, str]) -> None:
    assert found[name] == "", found[name]


@pytest.mark.soak
def test_every_operator_of_the_database() -> None:
    name = "operators_have_the_values_of_the_host"
    assert run_checks(name, every=1) == {name: ""}
