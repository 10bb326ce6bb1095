"""``benchmarks/correctness.py`` runs the cases of this folder and counts what they did."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.process.plain.case import CASES, EQUAL, Case, Outcome, refused

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import correctness

NAMES = ("label_smoothing", "loss_that_is_a_dict")


def test_cases_are_found_run_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert {case.name for case in CASES} <= {case.name for case in correctness.load()}
    found = correctness.run([case for case in CASES if case.name in NAMES], verbose=False)
    result = correctness.report(found, 1.0)
    assert {key: result[key] for key in ("cases", "equal", "refused", "silent", "unhelpful", "unexpected")} == {
        "cases": 3,
        "equal": 2,
        "refused": 1,
        "silent": 0,
        "unhelpful": 0,
        "unexpected": 0,
    }
    assert "Cases that do not do" not in capsys.readouterr().out


def test_what_is_not_as_expected_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def nothing(way: object) -> None: ...

    expected = {"trainer": EQUAL, "vgpu": refused("reason")}
    case = Case(name="tried", module="", script=nothing, expected=expected, tolerance=0.0, devices=1)
    silent = Outcome(kind="silent", said="loss 3", difference=0.5)
    result = correctness.report([(case, "trainer", silent), (case, "vgpu", Outcome(kind="refused"))], 1.0)
    assert (result["silent"], result["refused"], result["unexpected"]) == (1, 1, 2)
    assert "loss 3" in capsys.readouterr().out
