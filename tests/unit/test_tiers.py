"""Which tests are of which tier, and how many examples they have there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import CASE_S, FILE, QUICK_S, TEST_S, CollectedTest, record, recorded, tiers

SEEN: list[int] = []
ASKED = 40


def named(*names: str) -> list[CollectedTest]:
    return [CollectedTest(name) for name in names]


def test_quick_tests_and_the_quickest_case_of_a_slow_one_are_short() -> None:
    tests = named("a.py::quick", "a.py::slow[1]", "a.py::slow[2]", "a.py::slower", "a.py::new")
    durations = {"a.py::slow[1]": CASE_S, "a.py::slow[2]": QUICK_S + 0.1, "a.py::slower": CASE_S + 0.1}
    assert tiers(tests, durations) == ["short", "long", "short", "long", "short"]


def test_of_many_slow_cases_some_evenly_spread_are_long_and_the_others_for_the_night() -> None:
    tests = named(*(f"tests/net/a.py::slow[{case}]" for case in range(13)))
    found = tiers(tests, {test.name: TEST_S / 2 for test in tests})
    assert [place for place, tier in enumerate(found) if tier == "long"] == [0, 7]
    assert set(found) == {"long", "soak"}


def test_a_slower_one_is_for_the_night_unless_it_stands_for_a_feature_or_a_file() -> None:
    slow, slower = 2 * TEST_S, 3 * TEST_S
    tests = [
        *named("a.py::quick", "a.py::slow"),
        *(CollectedTest(f"a.py::shown[{case}]", features=["one"]) for case in range(2)),
        CollectedTest("a.py::shown", features=["one", "two"]),
        *(CollectedTest(f"a.py::both[{case}]", features=["three"]) for case in range(2)),
        *named("b.py::x", "b.py::y"),
    ]
    durations = {test.name: slow for test in tests} | {"a.py::quick": 0.1, "a.py::both[1]": 0.1}
    durations |= {"a.py::shown[1]": slow - 1, "b.py::x": slower}
    found = dict(zip((test.name for test in tests), tiers(tests, durations), strict=True))
    assert {name for name, tier in found.items() if tier == "short"} == {"a.py::quick", "a.py::both[1]"}
    assert {name for name, tier in found.items() if tier == "long"} == {"a.py::shown[1]", "a.py::shown", "b.py::y"}
    marked = [CollectedTest("b.py::x", marked="soak"), CollectedTest("b.py::y", marked="soak")]
    assert tiers(marked, durations) == ["soak", "soak"]


def test_marks_come_first_and_nothing_of_some_folders_is_short() -> None:
    tests = [
        CollectedTest("a.py::x", marked="long"),
        CollectedTest("a.py::y", marked="short"),
        CollectedTest("tests/net/a.py::z"),
    ]
    tests.append(CollectedTest("tests/net/a.py::short", marked="short"))
    assert tiers(tests, {"a.py::y": 90.0}) == ["long", "short", "long", "short"]


def test_what_is_recorded_replaces_what_is_known_and_files_that_have_gone_are_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "durations.json"
    (tmp_path / "a.py").write_text("")
    record({"a.py::x": 2.04, "a.py::y": 3.0, "gone.py::z": 9.0}, file, tmp_path)
    assert recorded(file) == {"a.py::x": 2.0, "a.py::y": 3.0}
    record({"a.py::y": 0.1}, file, tmp_path)
    assert json.loads(file.read_text()) == {"a.py": {"x": 2.0}}


def test_recorded_tests_exist() -> None:
    """Files that are renamed take their durations along."""
    root = Path(__file__).parents[2]
    assert all(os.path.exists(root / name.partition("::")[0]) for name in recorded())
    assert len(FILE.read_text()) < 300_000


@settings(max_examples=ASKED)
@given(st.integers())
def test_a_property(number: int) -> None:
    SEEN.append(number)


def test_a_property_has_a_tenth_of_its_examples_in_the_short_tier(request: pytest.FixtureRequest) -> None:
    usual = settings.default
    assert usual is not None
    assert (usual.max_examples, usual.derandomize) in ((10, True), (50, True), (100, False))
    assert len(SEEN) in (0, ASKED * usual.max_examples // 100)
