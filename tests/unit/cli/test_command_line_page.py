"""The page of the command line is what the parsers say now, and has every option of every command."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path
from typing import get_type_hints

import pytest
import tyro

from onebox.cli.parser import OPTIONS

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "reference" / "command-line.md").read_text()


def test_the_page_is_current() -> None:
    made = runpy.run_path(str(DOCS / "command_line.py"))["page"]()
    assert made == PAGE, "write it anew: python docs/command_line.py"


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_is_there(command: str) -> None:
    (section,) = re.findall(rf"^## onebox {command}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE)
    hints = get_type_hints(OPTIONS[command], include_extras=True)
    fields = [field.name for field in dataclasses.fields(OPTIONS[command])]
    shown = [name for name in fields if tyro.conf.Suppress not in getattr(hints[name], "__metadata__", ())]
    assert len(rows) == len(shown)
    flags = {row.split()[0] for row in rows if row.startswith("--")}
    assert flags <= {f"--{name.replace('_', '-')}" for name in shown}
