"""Each command of onebox in README and docs is one that the command line takes, also where no test runs it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from onebox.cli.parser import parse
from onebox.pool.spec import parse_spec

ROOT = Path(__file__).parents[3]
BLOCKS = [
    (page.stem, text)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for kind, text in re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.DOTALL)
    if kind in ("console", "sh", "text")
]
WRITTEN = [
    pytest.param(command, id=f"{page}: {command}")
    for page, text in BLOCKS
    for command in re.findall(r"^ *(?:\w*\$ )?onebox (.+[^:\n])$", text.replace("\\\n", " "), re.MULTILINE)
    if not re.search(r"\.\.\.|…|\bCOMMAND\b|--resume|--help|--version", command)  # no whole command, or reads a file
]


@pytest.mark.parametrize("command", WRITTEN)
def test_a_written_command_is_one(command: str) -> None:
    config = parse(shlex.split(command.partition(" > ")[0], comments=True))
    pool = getattr(config, "pool", None)
    if pool and not pool.endswith(".toml"):
        assert parse_spec(pool)


def test_commands_of_many_pages_are_found() -> None:
    assert len(WRITTEN) > 50
