"""Every command and snippet of the README is run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
SNIPPETS = [text for kind, text in BLOCKS if kind == "python"]
COMMANDS = [
    [words for line in text.replace("\\\n", " ").splitlines() if (words := shlex.split(line, comments=True))]
    for kind, text in BLOCKS
    if kind == "sh"
]
"""For each block its commands; later ones may need what earlier ones have written."""


def test_there_is_something_to_run() -> None:
    assert len(SNIPPETS) == 1
    assert {command[0] for block in COMMANDS for command in block} == {"make", "onebox"}


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


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: " ".join(block[0]))
def test_commands(block: list[list[str]], tmp_path: Path) -> None:
    for program, *arguments in block:
        # of make what it would run: running the tests inside the tests would not end
        make = program == "make"
        start = ["make", "--dry-run"] if make else [sys.executable, "-m", "onebox"]
        done = subprocess.run(
            [*start, *arguments],
            cwd=ROOT if make else tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
