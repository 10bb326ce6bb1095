"""Every command and snippet of README and docs is run."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    (page.name, *block) for page in PAGES for block in re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.DOTALL)
]
SNIPPETS = [(page, text) for page, kind, text in BLOCKS if kind == "python"]
WRITTEN = [
    [words for line in text.replace("\\\n", " ").splitlines() if (words := shlex.split(line, comments=True))]
    for _, kind, text in BLOCKS
    if kind == "sh"
]
COMMANDS = [
    block
    for place, block in enumerate(WRITTEN)
    if not any(block == other[: len(block)] for other in WRITTEN[:place] + WRITTEN[place + 1 :] if other != block)
    and block not in WRITTEN[:place]
]
"""For each block its commands, of which later ones may need what earlier ones have written; but for blocks that another
one repeats or begins with."""


OTHERS_WARNINGS = ["-W", "ignore:`isinstance(treespec:FutureWarning"]
"""What the tested Lightning does that the newest tested PyTorch warns of."""


def run_snippet(text: str, folder: Path, *, fresh: bool = False) -> str:
    """Run a snippet as a program for which warnings are errors; also those of imports where it is a fresh process."""
    ignored = OTHERS_WARNINGS if "import lightning" in text else []
    line = [sys.executable, "-W", "error", *ignored, "-c", text]
    options: dict[str, Any] = {"cwd": folder, "text": True, "timeout": 100}
    done = subprocess.run(line, capture_output=True, check=False, **options) if fresh else warm.run(line, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_something_to_run() -> None:
    assert [page for page, _ in SNIPPETS].count("README.md") == 1
    assert {command[0] for block in COMMANDS for command in block} == {"make", "onebox"}


@pytest.mark.long
@pytest.mark.parametrize("snippet", [pytest.param(text, id=page) for page, text in SNIPPETS if page != "README.md"])
def test_snippet(snippet: str, tmp_path: Path) -> None:
    assert run_snippet(snippet, tmp_path).strip()


def test_the_short_interface(tmp_path: Path) -> None:
    """What README itself shows."""
    (snippet,) = (text for page, text in SNIPPETS if page == "README.md")
    said = run_snippet(snippet, tmp_path, fresh=True)
    assert re.match(r"loss \d+\.\d{4} Evaluation\(", said)
    assert list((tmp_path / "checkpoint").glob("step-*/model.safetensors"))
    lines = [line for line in snippet.splitlines() if line.strip()]
    assert len(lines) <= 16, "the README promises a short interface"


@pytest.mark.long
@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: " ".join(block[0]))
def test_commands(block: list[list[str]], tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "mnist_cnn.py", tmp_path / "train.py")  # any script of the reader's own
    shutil.copy(ROOT / "examples" / "digits.csv.gz", tmp_path)
    shutil.copy(ROOT / "examples" / "trainer" / "own_model.py", tmp_path)
    for program, *arguments in block:
        # of make what it would run: running the tests inside the tests would not end
        make = program == "make"
        start = ["make", "--dry-run"] if make else [sys.executable, "-m", "onebox"]
        done = subprocess.run(
            [*start, *arguments],
            cwd=ROOT if make else tmp_path,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
