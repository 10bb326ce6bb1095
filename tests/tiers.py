"""Which tests are of every commit, by the seconds that each took when they were last recorded.

- The short tier, of ``make test``: all tests of at most ``QUICK_S`` and, of each test whose cases all take longer, the
  quickest case, if that takes at most ``CASE_S``.
- The long tier, of ``make test-all``: all others; of the cases of one test as many, evenly spread, as take ``TEST_S``
  together.
- ``make soak``: what is left.

A mark says otherwise: ``short``, ``long`` or ``soak``; what is in ``LONG`` is of the long tier. A test that has not
been recorded is of the short tier, until ``pytest --record`` writes its seconds to ``durations.json``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

QUICK_S, CASE_S, TEST_S = 0.8, 2.5, 6.0

LONG = ("tests/net/", "tests/process/cluster/", "tests/recorded/")
"""Folders whose tests need several machines, whole clusters or many runs."""

TIERS = ("short", "long", "soak")
FILE = Path(__file__).with_name("durations.json")


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


def tiers(tests: Sequence[tuple[str, str | None]], durations: Mapping[str, float]) -> list[str]:
    """Return the tier of each test.

    Args:
        tests: Names, and the tiers that their marks name.
        durations: Recorded seconds by name; a test that is absent is quick.
    """
    found = [marked or ("long" if name.startswith(LONG) else "") for name, marked in tests]
    cases: dict[str, list[int]] = defaultdict(list)
    for place, (name, _) in enumerate(tests):
        if not found[place]:
            cases[name.partition("[")[0]].append(place)
    for places in cases.values():
        seconds = {place: durations.get(tests[place][0], 0.0) for place in places}
        quickest = min(places, key=seconds.__getitem__)
        short = {place for place in places if seconds[place] <= QUICK_S}
        short |= {quickest} if seconds[quickest] <= CASE_S else set()
        slow = [place for place in places if place not in short]
        kept = max(1, int(len(slow) * TEST_S / max(TEST_S, sum(map(seconds.__getitem__, slow)))))
        for turn, place in enumerate(slow):
            found[place] = "long" if turn * kept % len(slow) < kept else "soak"
        for place in short:
            found[place] = "short"
    return found


def mark_tiers(items: Sequence[pytest.Item], durations: Mapping[str, float]) -> None:
    """Mark each test with its tier."""
    tests = [(item.nodeid, next((tier for tier in TIERS if item.get_closest_marker(tier)), None)) for item in items]
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
