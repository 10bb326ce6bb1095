"""Scripts on the device in C++: tests of this folder once more, in a process where it is in use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = ("values", "operators", "layers", "indexing", "round_trips", "versions", "autograd_graphs")
"""Those of the others follow, once all of them pass in any order."""


@pytest.mark.long  # the first use compiles the device
def test_scripts_have_the_values_that_they_have_elsewhere() -> None:
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        pytest.skip("there is no C++ compiler, which virtual devices need once")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # one object for all processes of the tests, whose own caches are gone when they end
    env |= {"ONEBOX_DEVICE": "native", "XDG_CACHE_HOME": str(Path(sys.prefix) / "cache")}
    files = [f"tests/process/vgpu/test_{name}.py" for name in FILES]
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "short", *files]
    run = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
