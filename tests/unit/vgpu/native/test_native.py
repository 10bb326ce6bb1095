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


def run_checks(*names: str, every: int = 12, variables: dict[str, str] | None = None) -> dict[str, str]:
    """Run checks in a process of their own; return what was wrong with each.

    Args:
        names: The checks; all if none.
        every: How many of PyTorch's operators share one that is tried.
        variables: Of its environment, beside this process's own.
    """
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        pytest.skip("there is no C++ compiler, which virtual devices need once")
    # one object for all processes of the tests, whose own caches are gone when they end
    env = {**os.environ, "XDG_CACHE_HOME": str(Path(sys.prefix) / "cache"), "EVERY": str(every)}
    env |= variables or {}
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


@pytest.mark.soak  # compiles the device once more, and runs slowly
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """Neither that of addresses nor that of undefined behaviour, in the device's own code."""
    compiler = tmp_path / "cxx"
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1"
    compiler.write_text(f'#!/bin/sh\nexec g++ {flags} "$@"\n', encoding="utf-8")
    compiler.chmod(0o700)
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    variables = {
        "CXX": str(compiler),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own are many
    }
    assert not any(run_checks(variables=variables).values())
