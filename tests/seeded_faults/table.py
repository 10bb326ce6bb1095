"""The table of faults: mistakes that the history names as found and mended, as changes of today's code.

Each entry of ``faults.toml``, or of ``waits.toml`` for waits of accelerators, has these keys:

- ``origin``: the commit that mended it, and its subject; none in ``waits.toml``, whose faults were never there;
- ``what``: the mistake, where the subject does not say it;
- ``within``, ``old`` and ``new``: the text that puts it back; ``old`` occurs once in the function, class or constant of
  the package that ``within`` names, in whatever file that is;
- ``tests``: tests that fail with it, as arguments of pytest; of the short tier unless ``tier = "long"`` is there.
"""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Tier = Literal["short", "long"]


PACKAGE = Path(__file__).parents[2] / "src" / "onebox"


@dataclass(frozen=True, kw_only=True)
class SeededFault:
    """A mended fault, and the change that puts it back."""

    name: str
    within: str
    old: str
    new: str
    tests: tuple[str, ...]
    origin: str = ""
    what: str = ""
    tier: Tier = "short"

    @functools.cached_property
    def file(self) -> str:
        """The file that has the text, relative to the repository.

        Raises:
            ValueError: There is none, or there are several.
        """
        found = [path for path in sorted(PACKAGE.rglob("*.py")) if self._places(path.read_text(encoding="utf-8"))]
        if len(found) != 1:
            raise ValueError(f"{self.name}: {len(found)} files have its text in {self.within}: {found}")
        return str(found[0].relative_to(PACKAGE.parents[1]))

    def seeded(self, text: str) -> str:
        """Return the file's text with the fault.

        Raises:
            ValueError: The text that it replaces is not there exactly once.
        """
        found = self._places(text)
        if len(found) != 1:
            raise ValueError(f"{self.name}: its text occurs {len(found)} times in {self.within}")
        return text[: found[0]] + self.new + text[found[0] + len(self.old) :]

    def _places(self, text: str) -> list[int]:
        """Return where the text begins."""
        if self.old not in text:
            return []
        own = [(start, end) for name, start, end in _named(text) if name == self.within]
        places = [place for place in range(len(text)) if text.startswith(self.old, place)]
        lead = len(self.old) - len(self.old.lstrip())
        last = len(self.old.rstrip())
        return [place for place in places if any(a <= place + lead and place + last <= b for a, b in own)]


@functools.lru_cache(maxsize=4)
def _named(text: str) -> list[tuple[str, int, int]]:
    """Return name, first and last place of each function, class and constant of a module."""
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def within(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                assert child.end_lineno is not None
                first = min([child.lineno, *(each.lineno for each in getattr(child, "decorator_list", ()))])
                for name in _names(child):
                    yield prefix + name, lines[first - 1], lines[child.end_lineno]
                inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                yield from within(child, f"{prefix}{child.name}." if inner else prefix)  # type: ignore[attr-defined]

    return list(within(ast.parse(text), ""))


def _names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(name)):
            return [name]
    return []


def seeded_faults(table: str = "faults.toml") -> list[SeededFault]:
    """Return all faults of a table."""
    entries = tomllib.loads(Path(__file__).with_name(table).read_text(encoding="utf-8"))
    return [
        SeededFault(name=name, **{**entry, "tests": tuple(entry["tests"])})  # an unknown key is an error
        for name, entry in entries.items()
    ]
