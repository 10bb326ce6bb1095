"""The page on several machines: its commands, and each file and list of hosts is one that a pool takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onebox.pool.spec import parse_hosts, parse_spec

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "machines.md").read_text()
COMMANDS = re.findall(r"^\w+\$ onebox (.+)$", PAGE, re.MULTILINE)


def test_all_commands_for_several_machines_are_there() -> None:
    assert {command.split()[0] for command in COMMANDS} == {
        "pair", "serve", "devices", "train", "run", "status", "logs"
    }  # fmt: skip


def test_the_file_of_hosts_is_one() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert [part.address for part in parse_hosts(text, "lab.toml")] == ["lab1", "lab2:7200"]  # type: ignore[union-attr]


@pytest.mark.parametrize("text", re.findall(r"`(lab\d[^`]*|cuda:0,lab1)`", PAGE))
def test_a_list_of_hosts_is_one(text: str) -> None:
    assert parse_spec(text)
