"""Which tests are of every commit, by the seconds that each took when they were last recorded.

- The short tier, of ``make test``: all tests of at most ``QUICK_S`` and, of each test whose cases all take longer, the
  quickest case, if that takes at most ``CASE_S``.
- The long tier, of ``make test-all``: of the other cases of one test as many, evenly spread, as take ``TEST_S``
  together; and the quickest case of a feature (``tests/features.md``) or file that would have none in these tiers.
- ``make soak``: what is left.

A mark says otherwise: ``short``, ``long`` or ``soak``; nothing in ``LONG`` is of the short tier. A test that has not
been recorded is of the short tier, until ``pytest --record`` writes its seconds to ``durations.json``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

QUICK_S, CASE_S, TEST_S = 0.8, 2.5, 4.0

LONG = ("tests/net/", "tests/process/cluster/", "tests/recorded/")
"""Folders whose tests need several machines, whole clusters or many runs."""

TIERS = ("short", "long", "soak")
FILE = Path(__file__).with_name("durations.json")


@dataclass(frozen=True)
class CollectedTest:
    """A case of a test, the tier that a mark names, and the features that it shows."""

    name: str
    marked: str | None = None
    features: Sequence[str] = ()


def recorded(file: Path = FILE) -> dict[str, float]:
    """Return the seconds of each test that takes more than ``QUICK_S``."""
    known = json.loads(file.read_text()) if file.exists() else {}
    return {f"{module}::{test}": seconds for module, tests in known.items() for test, seconds in tests.items()}


def record(taken: Mapping[str, float], file: Path = FILE, root: Path = FILE.parent.parent) -> None:
    """Write the seconds of tests that have run, beside those of others in files that there are still."""
    merged = {name: seconds for name, seconds in recorded(file).items() if name not in taken}
    merged |= {name: round(seconds, 1) for name, seconds in taken.items() if seconds > QUICK_S}
    modules: dict[str, dict[str, float]] = defaultdict(dict)
    for name, seconds in sorted(merged.items()):
        module, _, test = name.partition("::")
        if (root / module).exists():
            modules[module][test] = seconds
    file.write_text(json.dumps(modules, indent=0) + "\n")


def tiers(tests: Sequence[CollectedTest], durations: Mapping[str, float]) -> list[str]:
    """Return the tier of each test.

    Args:
        tests: The tests, a file's one after the other.
        durations: Recorded seconds by name; a test that is absent is quick.
    """
    cases, groups = defaultdict[str, list[CollectedTest]](list), defaultdict[str, list[CollectedTest]](list)
    for test in tests:
        cases[test.name.partition("[")[0]].append(test)
        for group in (test.name.partition("::")[0], *test.features):
            groups[group].append(test)
    found = {test.name: test.marked for test in tests if test.marked}
    for each in cases.values():
        found |= _tiers_of_cases([test for test in each if not test.marked], durations)
    for each in groups.values():
        unmarked = [test.name for test in each if not test.marked]
        if unmarked and all(found[test.name] == "soak" for test in each):
            found[min(unmarked, key=lambda name: durations.get(name, 0.0))] = "long"
    return [found[test.name] for test in tests]


def _tiers_of_cases(cases: Sequence[CollectedTest], durations: Mapping[str, float]) -> dict[str, str]:
    """Return the tier of each case of one test."""
    if not cases:
        return {}
    seconds = {test.name: durations.get(test.name, 0.0) for test in cases}
    quickest = min(seconds, key=seconds.__getitem__)
    short = {name for name, taken in seconds.items() if taken <= QUICK_S or (name == quickest and taken <= CASE_S)}
    if quickest.startswith(LONG):
        short = set()
    slow = [name for name in seconds if name not in short]
    kept = int(len(slow) * TEST_S / max(TEST_S, sum(map(seconds.__getitem__, slow))))
    return {
        **dict.fromkeys(short, "short"),
        **{name: "long" if turn * kept % len(slow) < kept else "soak" for turn, name in enumerate(slow)},
    }


def mark_tiers(items: Sequence[pytest.Item], durations: Mapping[str, float]) -> None:
    """Mark each test with its tier."""
    tests = [
        CollectedTest(
            item.nodeid,
            marked=next((tier for tier in TIERS if item.get_closest_marker(tier)), None),
            features=[mark.args[0] for mark in item.iter_markers("feature")],
        )
        for item in items
    ]
    for item, tier in zip(items, tiers(tests, durations), strict=True):
        if not item.get_closest_marker(tier):
            item.add_marker(tier)


class Recorder:
    """Plugin that writes the seconds of each test that passes.

    Args:
        as_short: Whether properties have as many examples as in the short tier; else theirs are left out.
    """

    def __init__(self, *, as_short: bool) -> None:
        self._as_short, self._taken = as_short, dict[str, float]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the seconds of a test itself; what is set up serves others, too."""
        if report.when == "call" and report.passed and (self._as_short or "short" not in report.keywords):
            self._taken[report.nodeid] = report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write what was noted, in the process that deals out the tests."""
        if not hasattr(session.config, "workerinput"):
            record(self._taken)
