"""The table of faults: mistakes that the history names as found and mended, as changes of today's code.

Each entry of ``faults.toml``, or of ``waits.toml`` for waits of accelerators, has these keys:

- ``origin``: the commit that mended it, and its subject; none in ``waits.toml``, whose faults were never there;
- ``what``: the mistake, where the subject does not say it;
- ``file``, ``old`` and ``new``: the text that puts it back; ``old`` occurs once in the file;
- ``tests``: tests that fail with it, as arguments of pytest; of the short tier unless ``tier = "long"`` is there.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Tier = Literal["short", "long"]


@dataclass(frozen=True, kw_only=True)
class SeededFault:
    """A mended fault, and the change that puts it back."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    origin: str = ""
    what: str = ""
    tier: Tier = "short"

    def seeded(self, text: str) -> str:
        """Return the file's text with the fault.

        Raises:
            ValueError: The text that it replaces is not there exactly once.
        """
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: its text occurs {found} times in {self.file}")
        return text.replace(self.old, self.new)


def seeded_faults(table: str = "faults.toml") -> list[SeededFault]:
    """Return all faults of a table."""
    entries = tomllib.loads(Path(__file__).with_name(table).read_text(encoding="utf-8"))
    return [
        SeededFault(name=name, **{**entry, "tests": tuple(entry["tests"])})  # an unknown key is an error
        for name, entry in entries.items()
    ]
