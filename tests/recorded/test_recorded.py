"""What the code computes is what was recorded: to the last bit on a machine like that of the recording, and on every
machine the plans, the messages to the workers, and the predicted memory."""

from __future__ import annotations

import json

import pytest

from tests.recorded.record import FILE, differences, execute, machine
from tests.recorded.runs import EVERYWHERE, runs

STORED = json.loads(FILE.read_text())
RUNS = runs()


def test_the_recording_is_of_these_runs() -> None:
    assert list(STORED["runs"]) == list(RUNS)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak if place % 3 else pytest.mark.long) for place, name in enumerate(RUNS)],
)
def test_a_run_is_as_recorded(name: str) -> None:
    same_machine = STORED["machine"] == machine()
    expected = STORED["runs"][name]
    found = execute(RUNS[name])
    assert list(differences(name, found, expected, same_machine=same_machine)) == []
    if not same_machine:
        only = ", ".join(part for part in EVERYWHERE if part in expected)
        pytest.skip(f"recorded with {STORED['machine']}, this is {machine()}; compared: {only or 'nothing'}")
