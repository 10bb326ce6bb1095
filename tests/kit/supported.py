"""Versions that the project says it supports."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

_PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
(_TORCH,) = (one for one in map(Requirement, _PROJECT["dependencies"]) if one.name == "torch")

TORCH_MINORS = [minor for minor in (f"2.{number}" for number in range(100)) if f"{minor}.0" in _TORCH.specifier]
"""Minor versions of PyTorch, such as 2.13."""
