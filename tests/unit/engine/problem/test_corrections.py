"""Corrections of profiles in the cache: they add up, and what other programs cause does not go on for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from onebox.cost import store
from onebox.engine.problem.corrections import (
    DEVICE_HOLDS_S,
    LOAD_HOLDS_S,
    AppliedCorrection,
    keep_correction,
    kept_correction,
)
from onebox.plan.replan.profile_correction import TimeFactors

NOW_S = 1e9


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def keep(factors: TimeFactors, onto: TimeFactors | None = None, after_s: float = 0.0) -> None:
    """Store the correction of a problem that was made with another one."""
    keep_correction(AppliedCorrection(key="k", factors=onto or TimeFactors()), factors, now_s=NOW_S + after_s)


def kept(after_s: float = 0.0) -> TimeFactors:
    return kept_correction("k", now_s=NOW_S + after_s)


def test_corrections_are_kept_one_upon_another() -> None:
    assert kept_correction("k") == TimeFactors()
    keep(TimeFactors(devices={1: 2.0}))
    keep(TimeFactors(devices={1: 2.0}, load={"h": 0.5}), onto=kept())
    assert kept() == TimeFactors(devices={1: 4.0}, load={"h": 0.5})
    assert kept_correction("another", now_s=NOW_S) == TimeFactors()


def test_runs_of_one_plan_do_not_correct_it_again_and_again() -> None:
    keep(TimeFactors(devices={0: 3.0}, segments={"cpu": {"a": (2.0, 1.0, 1.0)}}))
    first = kept()
    for _ in range(3):
        keep(TimeFactors(devices={1: 2.0}, segments={"cpu": {"b": (2.0, 1.0, 1.0)}}), onto=first)
    assert kept() == TimeFactors(
        devices={0: 3.0, 1: 2.0}, segments={"cpu": {"a": (2.0, 1.0, 1.0), "b": (2.0, 1.0, 1.0)}}
    )


def test_what_a_run_beside_has_found_of_other_devices_stays() -> None:
    keep(TimeFactors(devices={0: 3.0}, load={"h": 0.5}))
    keep(TimeFactors(devices={1: 2.0}, load={"i": 0.25}))
    assert kept() == TimeFactors(devices={0: 3.0, 1: 2.0}, load={"h": 0.5, "i": 0.25})


def test_a_load_holds_for_an_hour_a_device_for_a_day_and_segments_until_the_model_is_measured_again() -> None:
    segments = {"cpu": {"a": (2.0, 1.0, 1.0)}}
    keep(TimeFactors(devices={1: 2.0}, segments=segments, load={"h": 0.5}))
    assert kept(LOAD_HOLDS_S).load == {"h": 0.5}
    assert kept(LOAD_HOLDS_S + 1) == TimeFactors(devices={1: 2.0}, segments=segments)
    assert kept(DEVICE_HOLDS_S + 1) == kept(-1) == TimeFactors(segments=segments)
    keep(TimeFactors(devices={1: 1.5}), onto=kept(2 * DEVICE_HOLDS_S), after_s=2 * DEVICE_HOLDS_S)
    assert kept(2 * DEVICE_HOLDS_S) == TimeFactors(devices={1: 1.5}, segments=segments), "not what was found before"


def test_a_correction_without_a_load_does_not_prolong_an_earlier_one() -> None:
    keep(TimeFactors(devices={1: 2.0}, load={"h": 0.5}))
    keep(TimeFactors(devices={0: 3.0}), onto=kept(), after_s=LOAD_HOLDS_S)
    assert kept(LOAD_HOLDS_S) == TimeFactors(devices={0: 3.0, 1: 2.0}, load={"h": 0.5})
    assert kept(LOAD_HOLDS_S + 1) == TimeFactors(devices={0: 3.0, 1: 2.0})
    assert kept(DEVICE_HOLDS_S + 1) == TimeFactors(devices={0: 3.0})


@pytest.mark.parametrize(
    "factors",
    [
        {"devices": {"1": -2.0}},
        {"load": {"h": -1.0}},
        {"devices": {"1": "x"}},
        {"segments": {"a": [2.0, 1.0, 1.0]}},
        {"x": 1},
    ],
    ids=["negative", "negative load", "no number", "segments of no type of device", "unknown"],
)
def test_a_damaged_correction_counts_as_none(factors: dict[str, object]) -> None:
    at_s = {"devices_at_s": {"1": NOW_S}, "load_at_s": {"h": NOW_S}}
    store("k", {"factors": factors, **at_s})
    assert kept() == TimeFactors()
    store("k", {"factors": {"devices": {"1": 2.0}}, **at_s})
    assert kept() == TimeFactors(devices={1: 2.0})
