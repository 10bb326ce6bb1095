"""Each command, file of hosts and pool in README and docs is one that onebox takes, also where no test runs it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from onebox.cli.parser import parse
from onebox.pool.spec import parse_hosts, parse_spec

ROOT = Path(__file__).parents[3]
HOW_TO = ROOT / "docs" / "how-to"
BLOCKS = [
    (page.stem, kind, text)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for kind, text in re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.DOTALL)
]
WRITTEN = [
    pytest.param(command, id=f"{page}: {command}")
    for page, kind, text in BLOCKS
    if kind in ("console", "sh", "text")
    for command in re.findall(r"^ *(?:\w*\$ )?onebox (.+[^:\n])$", text.replace("\\\n", " "), re.MULTILINE)
    if not re.search(r"\.\.\.|…|\bCOMMAND\b|--resume|--help|--version", command)  # no whole command, or reads a file
]


@pytest.mark.parametrize("command", WRITTEN)
def test_a_written_command_is_one(command: str) -> None:
    config = parse(shlex.split(command.partition(" > ")[0], comments=True))
    pool = getattr(config, "pool", None)
    if pool and not pool.endswith(".toml"):
        assert parse_spec(pool)


@pytest.mark.parametrize("text", [pytest.param(text, id=page) for page, kind, text in BLOCKS if kind == "toml"])
def test_a_file_of_hosts_is_one(text: str) -> None:
    assert len(parse_hosts(text, "lab.toml")) > 1


@pytest.mark.parametrize("text", re.findall(r"`(lab\d[^`]*|cuda:0,lab1)`", (HOW_TO / "machines.md").read_text()))
def test_a_list_of_hosts_is_one(text: str) -> None:
    assert parse_spec(text)


def test_commands_of_many_pages_are_found() -> None:
    assert len(WRITTEN) > 50
