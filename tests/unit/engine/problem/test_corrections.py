"""Corrections of profiles in the cache: they add up, and a load of other programs does not go on for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from onebox.cost import store
from onebox.engine.problem.corrections import LOAD_HOLDS_S, keep_correction, kept_correction
from onebox.plan.replan.profile_correction import TimeFactors

NOW_S = 1e9


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_corrections_are_kept_one_upon_another() -> None:
    assert kept_correction("k") == TimeFactors()
    keep_correction("k", TimeFactors(devices={1: 2.0}), now_s=NOW_S)
    keep_correction("k", TimeFactors(devices={1: 2.0}, load={"h": 0.5}), now_s=NOW_S)
    assert kept_correction("k", now_s=NOW_S) == TimeFactors(devices={1: 4.0}, load={"h": 0.5})
    assert kept_correction("another", now_s=NOW_S) == TimeFactors()


def test_a_load_holds_for_an_hour_and_the_rest_until_the_model_is_measured_again() -> None:
    keep_correction("k", TimeFactors(devices={1: 2.0}, load={"h": 0.5}), now_s=NOW_S)
    assert kept_correction("k", now_s=NOW_S + LOAD_HOLDS_S).load == {"h": 0.5}
    for now_s in (NOW_S + LOAD_HOLDS_S + 1, NOW_S - 1):
        assert kept_correction("k", now_s=now_s) == TimeFactors(devices={1: 2.0})
    keep_correction("k", TimeFactors(devices={1: 1.5}), now_s=NOW_S + 2 * LOAD_HOLDS_S)
    assert kept_correction("k", now_s=NOW_S + 2 * LOAD_HOLDS_S) == TimeFactors(devices={1: 3.0}), "not that load again"


def test_a_damaged_correction_counts_as_none() -> None:
    store("k", {"factors": {"devices": {"1": -2.0}}, "at_s": NOW_S})
    assert kept_correction("k", now_s=NOW_S) == TimeFactors()
