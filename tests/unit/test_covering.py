"""Covering arrays against all runs that there are."""

from __future__ import annotations

import itertools

from tests.kit.covering import Run, covering_array, pairs_of

KINDS = {
    "colour": ("red", "green", "blue"),
    "size": ("small", "large"),
    "shape": ("round", "square", "flat"),
    "lid": "yn",
}


def refused(run: Run) -> bool:
    """Allow no large red thing, and a lid on round things alone: so that no flat thing has one."""
    lidded = run.get("lid") == "y" and run.get("shape", "round") != "round"
    return lidded or (run.get("colour") == "red" and run.get("size") == "large")


def test_every_pair_of_an_allowed_run_is_in_one_and_few_runs_are_needed() -> None:
    every = [dict(zip(KINDS, values, strict=True)) for values in itertools.product(*KINDS.values())]
    allowed = [run for run in every if not refused(run)]
    found = covering_array(KINDS, refused)
    assert all(run in allowed for run in found)
    assert {pair for run in found for pair in pairs_of(run)} == {pair for run in allowed for pair in pairs_of(run)}
    assert 9 <= len(found) <= 12 < len(allowed)
    assert found == covering_array(KINDS, refused)
