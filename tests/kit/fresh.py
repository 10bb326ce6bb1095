"""Modules executed anew, with state of their own."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any


def fresh(module: ModuleType) -> Any:
    """Return a copy of a module, executed anew, that no other module uses."""
    spec = importlib.util.find_spec(module.__name__)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
