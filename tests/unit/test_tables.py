"""The tables in docs are those that the code makes, and what makes them."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal, get_type_hints

import pytest
import tyro

from docs import command_line, tables
from onebox.cli.parser import OPTIONS


def test_generated_equals_committed() -> None:
    stale = [page.name for page, made in tables.pages().items() if made != page.read_text(encoding="utf-8")]
    assert stale == [], "make tables writes them anew"


def test_the_metrics_that_pages_name_are_in_the_table() -> None:
    texts = [page.read_text(encoding="utf-8") for page in tables.DOCS.rglob("*.md")]
    assert {name for text in texts for name in re.findall(r"`onebox_agent_\w+`", text)} <= set(
        re.findall(r"`\w+`", tables.agent_metrics())
    )


def test_a_table_takes_its_place() -> None:
    text = "a\n<!-- docs/tables.py: x -->\nold\n<!-- end -->\nb\n"
    once = tables.filled(text, {"x": "new"})
    assert once == "a\n<!-- docs/tables.py: x -->\n\nnew\n\n<!-- end -->\nb\n" == tables.filled(once, {"x": "new"})


def test_types_are_those_of_json() -> None:
    assert tables.hint_text(tuple[tuple[int, ...], ...]) == "list of lists of integers"
    assert tables.hint_text(tuple[float, float] | None) == "list of two numbers or `null`"
    assert tables.hint_text(Literal["a", "b"] | None) == "`a`, `b` or `null`"


def test_meanings_are_those_of_a_docstring() -> None:
    class Documented:
        """A summary.

        Args:
            first: The first, as ``x``,
                of :class:`~a.Thing`. More.
            NCCL: ``None`` | 1.

        Raises:
            ValueError: Never.
        """

    assert tables.described(Documented) == {"first": "the first, as `x`, of `Thing`. More", "NCCL": "`None` \\| 1"}


def test_fields_of_an_error_may_be_set_after_it_was_made() -> None:
    class Failed(Exception):
        """A failure.

        Args:
            path: The file.
        """

        def __init__(self, message: str, *, path: str = "") -> None:
            super().__init__(message)
            self.path = path
            self.where: str | None = None
            """The line."""

    assert tables.error_fields(Failed) == {"path": "the file", "where": "the line"}


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_of_a_command_has_a_row(command: str) -> None:
    hints = get_type_hints(OPTIONS[command], include_extras=True)
    names = [field.name for field in dataclasses.fields(OPTIONS[command])]
    shown = [name for name in names if tyro.conf.Suppress not in getattr(hints[name], "__metadata__", ())]
    assert command_line.section(command).count("\n| `") == len(shown)
