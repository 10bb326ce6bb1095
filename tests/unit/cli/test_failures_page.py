"""The page on faults quotes what is said: each text is in the code, each metric is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onebox.agent.metrics import AgentMetrics
from onebox.wire.protocol.agents import Offer, Stock

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "how-to" / "failures.md").read_text()
CODE = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
TEXTS = [text for row in re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE) for text in [row.partition("` …")[0]]]


def test_there_are_texts() -> None:
    assert len(TEXTS) >= 10


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_said_somewhere(text: str) -> None:
    """What stands between names of hosts, numbers and addresses: those are filled in."""
    pieces = [
        piece.strip(" :'")
        for piece in re.split(r"'?\blab1\b:?\d*'?|\b\d+\b|ana@desk|0\.0\.0\.0|, lacking cores|…", text)
    ]
    joined = re.sub(r'"\s*\n\s*f?"', "", CODE)
    assert all(piece in joined for piece in pieces)


def test_the_metrics_are_there() -> None:
    stock = Stock(1, (Offer("cpu", "chip", 1, 1, 1),))
    names = {f"{metric.name}_total" for metric in AgentMetrics(lambda: stock, lambda: {}).collect()}
    named = set(re.findall(r"`(onebox_agent_\w+)`", PAGE))
    assert named
    assert named <= names
