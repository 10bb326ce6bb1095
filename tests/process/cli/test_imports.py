"""Version, help and errors in flags are printed without PyTorch, whose import takes seconds."""

from __future__ import annotations

import subprocess
import sys

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
