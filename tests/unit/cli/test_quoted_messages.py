"""The messages that the tables of the pages on faults and on monitoring explain are said by the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CODE = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))))
MESSAGES = [
    message
    for name in ("failures", "monitor")
    for table in re.findall(
        r"^\| message .*\n((?:\|.*\n)+)", (ROOT / "docs" / "how-to" / f"{name}.md").read_text(), re.MULTILINE
    )
    for message in re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
]
FILLED_IN = re.compile(r"'?\blab1\b:?\d*'?|\b\d[\d.]*\b|ana@desk|, lacking cores|…|`")
"""Names of hosts, numbers and addresses."""


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_said_somewhere(message: str) -> None:
    assert all(piece.strip(" :',") in CODE for piece in FILLED_IN.split(message))


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 20
