"""Help on a command: its everyday options, or all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import re
import shutil
import sys
import textwrap
from typing import Any, get_type_hints

import tyro

HELP = ("--help", "-h")
HELP_ALL = "--help-all"

_WIDEST = 100
_TITLE = "DESCRIPTION"


def print_help(kind: type[Any], command: str, *, full: bool) -> None:
    """Print the help on a command.

    Args:
        kind: The class of its options; its attribute ``EVERYDAY``, if it has one, names those that come first, and
            ``EXAMPLES`` has command lines.
        command: The command.
        full: Whether to print the other options, too.
    """
    everyday, others = _divided(kind)
    more = "" if full or not others else f"\n\n{command} {HELP_ALL} shows {len(others)} more options."
    shown = everyday + others if full else everyday
    hints = get_type_hints(kind, include_extras=True)
    options = dataclasses.make_dataclass(
        kind.__name__,
        [
            (one.name, hints[one.name], dataclasses.field(default=one.default, kw_only=True))
            if one.default is not dataclasses.MISSING
            else (one.name, hints[one.name], dataclasses.field(kw_only=True))
            for one in shown
        ],
        namespace={"__doc__": documentation(kind)},
    )
    examples = "".join(f"\n  {line}" for line in getattr(kind, "EXAMPLES", ()))
    summary = (inspect.getdoc(kind) or "").partition("\n\nArgs:")[0] + more
    columns = min(shutil.get_terminal_size().columns, _WIDEST)
    description = "\n\n".join(textwrap.fill(paragraph, columns) for paragraph in summary.split("\n\n"))
    description += f"\n\nexamples:{examples}" if examples else ""
    shown_help = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding)
    try:
        with contextlib.redirect_stdout(shown_help):
            tyro.cli(options, args=[HELP[0]], prog=command, description=_TITLE)
    finally:
        shown_help.seek(0)
        print(shown_help.read().replace(_TITLE, description, 1), end="")  # tyro would join the lines of a paragraph


def _divided(kind: type[Any]) -> tuple[list[dataclasses.Field[Any]], list[dataclasses.Field[Any]]]:
    """Divide the options into everyday ones, in the order in which they are named, and the others."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    names = getattr(kind, "EVERYDAY", tuple(fields))
    return [fields[name] for name in names], [field for name, field in fields.items() if name not in names]


def documentation(kind: type[Any]) -> str:
    """Return a docstring with the arguments of a class, of its bases, and of the groups that it has options of."""
    sections = []
    for each in (*getattr(kind, "GROUPS", ()), *reversed(kind.__mro__)):  # the last word on an option counts
        match = re.search(r"^Args:\n(.*?)(?:\n\n|\Z)", inspect.cleandoc(each.__doc__ or ""), re.DOTALL | re.MULTILINE)
        if match:
            text = re.sub(r"\n {8,}", " ", match[1])  # a wrapped line may begin like a list
            sections.append(re.sub(r"``([^`]*)``", r"\1", text))
    return "Options.\n\nArgs:\n" + "\n".join(sections)
