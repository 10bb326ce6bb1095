"""The page of the command line, from the parsers themselves."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from onebox import __version__
from onebox.cli.command_help import print_help
from onebox.cli.parser import OPTIONS, parse

PAGE = Path(__file__).parent / "reference" / "command-line.md"

_WIDE = {"COLUMNS": "5000"}
"""A terminal on which no text of the help is wrapped."""

_BEGIN = """\
# Command line

<!-- made by docs/tables.py from the commands' own help -->

```text
{overview}
```

Options may be written with dashes or underscores, and as `--name VALUE` or `--name=VALUE`. `onebox COMMAND --help`
prints the usual options of a command, `--help-all` all of them. An explicit option takes precedence over the settings
of a resumed run, and over [environment variables](environment.md).

| exit status | meaning |
|---|---|
| 0 | success; for `onebox memory`: the model fits |
| 1 | a failure while running; for `onebox memory`: the model does not fit |
| 2 | an invalid option, value or file; one line on standard error says what came, what is allowed and what to do |
| 129, 130, 143 | ended by SIGHUP, Ctrl-C, SIGTERM |
| 141 | the reader of the output has gone |

`onebox run` ends with the status of its script.
"""


def page() -> str:
    """Return the page."""
    parts = [_BEGIN.format(overview=_printed(["--help"]))]
    parts += [section(command) for command in OPTIONS]
    parts.append(f"## onebox torchrun\n\n```text\n{_printed(['torchrun', '--help'])}\n```\n")
    return "\n".join(parts)


def section(command: str) -> str:
    """Return the section of a command: its description and a table of its options."""
    usual, every = (_help(command, full=full) for full in (False, True))
    description = usual.partition("\n\n")[2].partition("\n\n╭")[0]
    description = re.sub(rf"\n\nonebox {command} --help-all shows .*", "", description)
    rows, first = _rows(every), len(_rows(usual))
    text = [f"## onebox {command}\n", *map(_paragraph, description.split("\n\n"))]
    parts = [("", rows[:first]), ("Other options, shown by `--help-all`:\n\n", rows[first:])]
    for title, shown in parts:
        if shown:
            table = ["| option | default | meaning |", "|---|---|---|", *shown]
            text.append(title + "\n".join(table) + "\n")
    if not rows:
        text.append(f"`onebox {command}` has no options.\n")
    return "\n".join(text)


def _paragraph(text: str) -> str:
    """Return a paragraph of a description; what is indented below its first line is printed as it is."""
    title, *lines = text.splitlines()
    if lines and all(line.startswith("  ") for line in lines):
        return "\n".join([f"{title[0].upper()}{title[1:]}\n", "```text", *(line[2:] for line in lines), "```\n"])
    return _escaped(text) + "\n"


def _help(command: str, *, full: bool) -> str:
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with patch.dict(os.environ, _WIDE), contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        print_help(OPTIONS[command], f"onebox {command}", full=full)
    said.seek(0)
    return said.read()


def _printed(arguments: Sequence[str]) -> str:
    """Return what a command line that asks for help prints."""
    said = io.StringIO()
    with patch.dict(os.environ, _WIDE), contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        parse(arguments)
    return said.getvalue().rstrip().replace(f"onebox {__version__}:", "onebox:")


def _rows(text: str) -> list[str]:
    """Return the rows of the options in the boxes of a command's help."""
    found: list[list[str]] = []
    for line in re.findall(r"^│ (.*) │$", text, re.MULTILINE):
        if re.match(r"\S", line):
            option, _, meaning = line.strip().partition("  ")
            found.append([option, meaning.strip()])
        else:
            found[-1][1] = f"{found[-1][1]} {line.strip()}".strip()
    return [_row(option, meaning) for option, meaning in found if not option.startswith("-h")]


def _row(option: str, meaning: str) -> str:
    default = re.search(r" ?\((?:default: (.*)|(required))\)$", meaning)
    text = meaning[: default.start()] if default else meaning
    value = "" if default is None else f"`{default[1]}`" if default[1] else "required"
    shown = option.replace("|", "\\|")
    return f"| `{shown}` | {value} | {_escaped(text)} |"


def _escaped(text: str) -> str:
    """Return text in which Markdown finds no markup but links to pages that it names."""
    plain = re.sub(r"([*_<>|\[\]`])", r"\\\1", text)
    return re.sub(r"docs/([\w/-]+)\.md", r"[\1](../\1.md)", plain)
