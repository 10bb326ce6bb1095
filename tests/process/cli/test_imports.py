"""Version, help, errors in flags and the status of agents are printed without PyTorch, whose import takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from onebox.cli import main
status = main(sys.argv[1:])
print(status, *(name for name in ("torch", "numpy") if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("--version", 0),
        ("", 2),
        ("--help", 0),
        ("trian", 2),
        ("train --help", 0),
        ("plan --help", 0),
        ("completion bash", 0),
        ("train --modle cnn", 2),
        ("train --epochs 0", 2),
        ("plan --schedules 1f2b", 2),
        ("serve --memory lots", 2),
    ],
)
def test_neither_torch_nor_numpy_is_imported(line: str, status: int) -> None:
    command = [sys.executable, "-c", PROGRAM, *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == str(status), done.stderr


PROGRAM_STATUS = """
import sys
from onebox.cli import main
from onebox.pool.keys.keyring import KnownAgent, remember_agent
from onebox.wire import new_keys
remember_agent(KnownAgent("127.0.0.1:1", new_keys().public, "nobody"))  # where nothing listens
status = main(["status", "--json", "--pool", "127.0.0.1:1"])
print(status, *(name for name in ("torch",) if name in sys.modules))
"""


def test_the_status_of_agents_needs_no_torch(tmp_path: Path) -> None:
    command, environment = [sys.executable, "-c", PROGRAM_STATUS], {**os.environ, "ONEBOX_CONFIG": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "1", done.stderr
