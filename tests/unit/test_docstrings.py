"""The examples in the docstrings of all modules run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import onebox

SOURCE = Path(onebox.__file__).parent


def _name(path: Path) -> str:
    parts = ("onebox", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(part for part in parts if part != "__init__")


MODULES = sorted(_name(path) for path in SOURCE.rglob("*.py") if ">>>" in path.read_text())


def test_there_are_examples() -> None:
    assert len(MODULES) > 50


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
