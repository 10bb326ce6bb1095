"""One run that nothing disturbs, for all tests of this folder."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.process.cli.commands import POOL, command

SETTINGS = ("--data", "digits", "--model", "cnn", "--epochs", "3", "--seed", "3", *POOL)
"""Of the undisturbed run, and of those that are compared with it."""


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    folder: Path
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run; tests only look at it."""
    parent = tmp_path_factory.mktemp("undisturbed")
    done = command(["train", *SETTINGS, "--run", "run", "--every", "10"], parent)
    assert done.returncode == 0, done.stderr
    return Run(parent / "run", done)
