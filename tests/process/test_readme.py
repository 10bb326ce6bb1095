"""Every command and snippet of README and docs is run, tutorials from an empty folder, and the site is built."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit import warm

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
ALONE = sorted(
    (page for page in TUTORIALS if page.stem not in ("index", "two-machines")),
    key=lambda page: page.stem != "first-run",
)
"""Tutorials of one machine, the first one in front."""
PAGES = [README, *sorted(set((ROOT / "docs").rglob("*.md")) - set(TUTORIALS))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Return the kind and the text of each block of code of a page."""
    return re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.DOTALL)


def commands_in(text: str) -> list[str]:
    """Return the commands of a block of shell, without comments."""
    lines = re.sub(r"\s+#.*", "", text.replace("\\\n", " ")).splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


BLOCKS = [(name_of(page), *block) for page in PAGES for block in blocks_of(page)]
SNIPPETS = [(page, text) for page, kind, text in BLOCKS if kind == "python"]
OF_PAGES = [(page, text) for page, text in SNIPPETS if page != "README.md"]
SCRIPTS = [text for _, kind, text in BLOCKS if kind == "sh"]
WRITTEN = [commands_in(text) for text in SCRIPTS]
COMMANDS = [
    text
    for place, (text, block) in enumerate(zip(SCRIPTS, WRITTEN, strict=True))
    if not any(block == other[: len(block)] for other in WRITTEN[:place] + WRITTEN[place + 1 :] if other != block)
    and block not in WRITTEN[:place]
]
"""The blocks of shell, of which later commands may need what earlier ones have written; but for blocks that another one
repeats or begins with."""

PREAMBLE = f"""
set -euo pipefail
make() {{ command make --dry-run --directory "{ROOT}" "$@"; }}
onebox() {{ "{sys.executable}" -m onebox "$@"; }}
python() {{ "{sys.executable}" "$@"; }}
"""
"""Definitions of what blocks call: this onebox and this Python, and of make what it would run, as running the tests
inside of the tests would not end."""

OTHERS_WARNINGS = ["-W", "ignore:`isinstance(treespec:FutureWarning"]
"""What the tested Lightning does that the newest tested PyTorch warns of."""


def run_snippet(text: str, folder: Path, *, fresh: bool = False) -> str:
    """Run a snippet as a program for which warnings are errors; also those of imports where it is a fresh process."""
    ignored = OTHERS_WARNINGS if "import lightning" in text else []
    line = [sys.executable, "-W", "error", *ignored, "-c", text]
    options: dict[str, Any] = {"cwd": folder, "text": True, "timeout": 300}
    done = subprocess.run(line, capture_output=True, check=False, **options) if fresh else warm.run(line, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_commands(text: str, folder: Path, timeout_s: float = 500) -> str:
    """Run a block of shell in a folder and return its output; a command that fails ends it."""
    environment = os.environ | {"COLUMNS": "120"}
    done = subprocess.run(
        ["bash", "-c", PREAMBLE + text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout + done.stderr


def some(parameters: Sequence[Any], every: int) -> list[Any]:
    """Return parameters of which the long tier has some, and make soak the others."""
    marks = [pytest.mark.soak if place % every else pytest.mark.long for place in range(len(parameters))]
    return [pytest.param(each, marks=mark) for each, mark in zip(parameters, marks, strict=True)]


def lay_out(folder: Path) -> None:
    """Put into a folder what blocks outside of tutorials use: examples, environment, and files of the reader's own."""
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / ".venv").symlink_to(sys.prefix)
    for own, example in (
        ("train.py", "mnist_cnn.py"),
        ("digits.csv.gz", "digits.csv.gz"),
        ("own_model.py", "trainer/own_model.py"),
    ):
        (folder / own).write_bytes((ROOT / "examples" / example).read_bytes())


def test_there_is_something_to_run() -> None:
    assert [page for page, _ in SNIPPETS].count("README.md") == 1
    assert len(SNIPPETS) > 15 and len(COMMANDS) > 5
    assert len(README.read_text().splitlines()) <= 150


@pytest.mark.parametrize("snippet", some(OF_PAGES, 4), ids=[page for page, _ in OF_PAGES])
def test_snippet(snippet: tuple[str, str], tmp_path: Path) -> None:
    assert run_snippet(snippet[1], tmp_path).strip()


@pytest.mark.long
def test_the_short_interface(tmp_path: Path) -> None:
    """What README itself shows."""
    (snippet,) = (text for page, text in SNIPPETS if page == "README.md")
    said = run_snippet(snippet, tmp_path, fresh=True)
    assert re.match(r"loss \d+\.\d{4} Evaluation\(", said)
    assert list((tmp_path / "checkpoint").glob("step-*/model.safetensors"))
    lines = [line for line in snippet.splitlines() if line.strip()]
    assert len(lines) <= 16, "the README promises a short interface"


@pytest.mark.parametrize("block", some(COMMANDS, 3), ids=lambda block: commands_in(block)[0])
def test_commands(block: str, tmp_path: Path) -> None:
    lay_out(tmp_path)
    assert run_commands(block, tmp_path).strip()


def masked(text: str) -> str:
    """Return output with one sign for each number, in which runs and machines differ."""
    return " ".join(re.sub(r"\d[\d,.:]*|\b(?:nan|inf)\b", "#", text).split())


@pytest.mark.parametrize("page", some(ALONE, len(ALONE)), ids=lambda page: page.stem)
def test_tutorial(page: Path, tmp_path: Path) -> None:
    """A file has the name that comes last before its block; output is compared with all but its numbers and tables.

    Two machines are in ``tests/net/test_tutorial.py``.
    """
    said, ran = "", 0
    for before, kind, text in re.findall(r"(.*?)```(\w+)\n(.*?)```", page.read_text(), re.DOTALL):
        if kind == "python":
            (tmp_path / re.findall(r"`(\w+\.py)`", before)[-1]).write_text(text)
        elif kind == "sh":
            said, ran = run_commands(text, tmp_path), ran + 1
        else:
            assert kind == "text", kind
            lines = [
                line for line in text.splitlines() if line.strip() and line[0] not in "┏┃┡│├└" and "..." not in line
            ]
            missing = [line for line in lines if masked(line) not in masked(said)]
            assert not missing, f"{missing} in\n{said}"
    assert ran > 1


@pytest.mark.long
def test_the_site_is_built_without_a_warning_and_asks_for_nothing_else(tmp_path: Path) -> None:
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "-n", "-q", "-b", "html", "-d", tmp_path / "trees", ROOT / "docs", site],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    pages = sorted(site.rglob("*.html"))
    assert {page.relative_to(site).as_posix() for page in pages} >= {"index.html", "tutorials/first-run.html"}
    remote = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    assert not [tag for page in pages for tag in remote.findall(page.read_text())]
    styles = "".join(style.read_text() for style in site.rglob("*.css"))
    assert not re.findall(r"@import[^;]*//|url\([\"']?(?:https?:)?//", styles)
