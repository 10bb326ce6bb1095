"""Scripts whose workers are killed or stopped at random moments have the bits of an undisturbed run."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from lost_workers import NAMES, Outcome, random_losses, run
from lost_workers_script import STEPS

TIERS = {1: pytest.mark.short, **dict.fromkeys(range(2, 6), pytest.mark.long)}
"""The tiers of a script's first rounds: 24 in the long tier and before it, 200 with ``make soak``."""


@functools.cache
def undisturbed(name: str) -> Outcome:
    return run(name, [])


@pytest.mark.feature("Virtual devices: A script survives the loss of its workers")
@pytest.mark.parametrize("round_number", [pytest.param(k, marks=TIERS.get(k, pytest.mark.soak)) for k in range(1, 35)])
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_those_of_an_undisturbed_run(name: str, round_number: int) -> None:
    losses = random_losses(1000 * round_number + NAMES.index(name), STEPS)
    found, expected = run(name, losses), undisturbed(name)
    assert found.status == 0, found.said
    assert expected.status == 0, expected.said
    assert found.sent
    assert found.recovered_s
    assert found.bits == expected.bits, losses
