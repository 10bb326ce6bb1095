"""Every command and snippet of the README is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
SNIPPETS = [text for kind, text in BLOCKS if kind == "python"]
COMMANDS = [
    line.split("#")[0].strip() for kind, text in BLOCKS if kind == "sh" for line in text.splitlines() if line.strip()
]


def test_there_is_something_to_run() -> None:
    assert len(SNIPPETS) == 1
    assert {command.split()[0] for command in COMMANDS} == {"make", "onebox"}


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet(snippet: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", snippet],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"loss \d+\.\d{4} Evaluation\(", done.stdout)
    assert list((tmp_path / "checkpoint").glob("step-*/model.safetensors"))
    lines = [line for line in snippet.splitlines() if line.strip()]
    assert len(lines) <= 16, "the README promises a short interface"


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str) -> None:
    program, *arguments = command.split()
    # of make what it would run: running the tests inside the tests would not end
    start = ["make", "--dry-run"] if program == "make" else [sys.executable, "-m", "onebox"]
    done = subprocess.run([*start, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
