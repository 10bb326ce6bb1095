"""The page of the documentation on monitoring: its commands are those of the command line, its messages those of the
code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from onebox.cli.parser import parse

ROOT = Path(__file__).parents[3]
PATH = ROOT / "docs" / "how-to" / "monitor.md"
PAGE = PATH.read_text()
SOURCE = "".join(
    re.sub(r'"\n\s+f?"', "", path.read_text())
    for path in sorted((ROOT / "src" / "onebox" / "report" / "page").glob("*.py"))
)


@pytest.mark.parametrize("command", re.findall(r"^(?:\w+\$ )?onebox (.+)$", PAGE, re.MULTILINE))
def test_a_command_is_one(command: str) -> None:
    parse(shlex.split(command, comments=True))


def test_its_messages_are_those_of_the_page() -> None:
    messages = re.findall(r"^\| `([^`]+)` \|", PAGE[PAGE.index("| message |") :], re.MULTILINE)
    assert len(messages) == 5
    for message in messages:
        for part in message.split("…"):
            assert part.strip().replace("127.0.0.1", "{ADDRESS}") in SOURCE, message


def test_its_pictures_exist() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGE)
    assert pictures and all((PATH.parent / each).is_file() for each in pictures)
