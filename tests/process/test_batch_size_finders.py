"""Scripts that go on after a lack of memory, in the ways of libraries and people: they decide by class and text."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.process.cli.commands import command

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from memory_scripts import WAYS, arguments

USUAL = {"accelerate find_executable_batch_size", "transformers auto_find_batch_size", "halved, by its words"}


@pytest.mark.parametrize("way", [pytest.param(each, marks=() if each in USUAL else pytest.mark.long) for each in WAYS])
def test_a_script_goes_on_with_what_fits(tmp_path: Path, way: str) -> None:
    done = command(arguments(way, tmp_path), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "found" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_script_goes_on_also_where_each_operator_is_waited_for(tmp_path: Path, way: str) -> None:
    done = command(arguments(way, tmp_path, "--synchronous"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "found" in done.stdout
