"""Table of features and of the tests that show each: ``python -m tests.features`` writes ``tests/features.md``.

A test is marked with what it shows, ``@pytest.mark.feature("Area: what the user can do")``. A row stays until its
feature is struck by hand, with the reason in the place of the tests: ``| ~~feature~~ | reason |``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

FILE = Path(__file__).with_name("features.md")

MOST = 3
"""Tests of one feature."""

INTRODUCTION = """\
# Features

What users of onebox can do, by area, and one to three tests that show it. `python -m tests.features` writes this page
from the marks of the tests. A feature that is dropped on purpose is struck here, `~~feature~~`, with the reason, by the
change that drops it; no other row may lose its tests.
"""

HEAD = ("| feature | test |", "|---|---|")

_FEATURE = re.compile(r"[^:|~\n]+: [^|~\n]+")
_ROW = re.compile(r"\| (~~)?([^|~]+)(?:~~)? \| ([^|]*) \|")


class Refusal(Exception):
    """Marks, or a committed page, of which no page can be made."""


def sources() -> Iterator[tuple[str, str]]:
    """Yield path and text of each file of tests."""
    for file in sorted(FILE.parent.rglob("test_*.py")):
        yield file.relative_to(FILE.parent.parent).as_posix(), file.read_text(encoding="utf-8")


def marks(files: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the tests of each feature, from the marks above functions in sources.

    Raises:
        Refusal: A mark is not one literal text of an area and a feature.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for path, text in files:
        tree = ast.parse(text if "mark.feature" in text else "")
        for function in (each for each in tree.body if isinstance(each, ast.FunctionDef)):
            for mark in function.decorator_list:
                if not ast.unparse(mark).startswith("pytest.mark.feature"):
                    continue
                said = mark.args[0] if isinstance(mark, ast.Call) and len(mark.args) == 1 else None
                feature = said.value if isinstance(said, ast.Constant) else None
                if not isinstance(feature, str) or not _FEATURE.fullmatch(feature):
                    raise Refusal(f'{path}:{mark.lineno}: a mark is feature("Area: what the user can do")')
                found[feature].append(f"{path}::{function.name}")
    return dict(found)


def page(shown: Mapping[str, Sequence[str]], committed: str) -> str:
    """Return the page of features.

    Args:
        shown: Tests by feature.
        committed: The page as it is, whose struck rows stay.

    Raises:
        Refusal: A row would lose its tests, a struck feature is shown, or a feature has too many tests.
    """
    rows = dict[tuple[str, str], str]()
    for feature, tests in shown.items():
        area, _, name = feature.partition(": ")
        rows[area, name] = f"| {name} | {', '.join(f'`{test}`' for test in sorted(tests))} |"
    faults = [f"{feature}: more than {MOST} tests" for feature, tests in shown.items() if len(tests) > MOST]
    area = ""
    for line in committed.splitlines():
        area = line.removeprefix("## ") if line.startswith("## ") else area
        if not line.startswith("|") or line in HEAD:
            continue
        row = _ROW.fullmatch(line)
        struck, name, rest = row.groups() if row else (None, line, "")
        feature = f"{area}: {name}"
        if not struck and feature not in shown:
            faults.append(f"{feature}: no test has its mark; mark another one, or strike the row with a reason")
        elif struck and feature in shown:
            faults.append(f"{feature}: is struck, but a test has its mark")
        elif struck and not rest:
            faults.append(f"{feature}: is struck without a reason")
        elif struck:
            rows[area, name] = line
    if faults:
        raise Refusal("\n".join(faults))
    text = INTRODUCTION
    for area in sorted({area for area, _ in rows}):
        names = sorted((name for of, name in rows if of == area), key=str.lower)
        text += "\n".join(("", f"## {area}", "", *HEAD, *(rows[area, name] for name in names), ""))
    return text


def main() -> int:
    """Write the page and return the exit status."""
    try:
        committed = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
        FILE.write_text(page(marks(sources()), committed), encoding="utf-8")
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
