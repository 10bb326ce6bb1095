"""Settings of all tests: the two tiers, hypothesis profiles, and the order in which several processes take the tests.

``make test``, of every commit, runs the short tier: every test that is not marked ``long``. ``make test-all`` runs the
others. A test belongs to the long tier by one of two marks:

- ``long``: a benchmark, a network of several machines, a whole cluster, or one more case of what another test covers.
- ``sample(n)``: of the cases of a parametrized test ``n``, evenly spread, are in the short tier and the others in the
  long one. On a module it holds for each of its tests. Tests in ``tests/process`` have a sample without saying so: one
  case and a tenth of all; ``short`` keeps all. With ``sample(n, m)`` about ``m`` are in the two tiers together, and the
  others are tried by ``make soak`` alone.

Every kind of behaviour has a case in the short tier; pairs of settings of training runs meet in
``tests/process/test_covering_array.py``. Tests by hypothesis run in both tiers, with other examples: in the short one
a quarter as many, the same each time; in the long one at random, and what failed once is kept in ``.hypothesis`` and
comes first.
"""

from __future__ import annotations

import gc
import os
import unittest
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings

from tests.transfer_order import check_every_lowering

settings.register_profile("short", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("long", deadline=None, derandomize=False, max_examples=100)
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("short")  # --hypothesis-profile, where it is given, is loaded later

TOGETHER = {
    "tests/net/": "network",
    "tests/browser/": "browser",
    "tests/process/cluster/": "cluster",
    "tests/process/cli/test_train.py": "undisturbed run",
    "tests/process/cli/test_broken_runs.py": "undisturbed run",
}
"""Beginnings of the names of tests that share what a machine has once, or what takes long to make."""

MODELLED = Path(__file__).parent / "modelled"

LONGEST = (
    "tests/net/",
    "tests/process/test_launchers.py",
    "tests/process/vgpu/test_examples.py",
    "tests/process/test_covering_array.py",
    "tests/process/cli/test_plan_command.py",
    "tests/process/faults/test_recovery.py",
    "tests/process/cli/test_run_command.py",
    "tests/process/test_readme.py",
    "tests/process/faults/",
    "tests/process/cluster/",
    "tests/process/agent/",
    "tests/process/cli/",
    "tests/browser/",
    "tests/process/vgpu/test_coverage.py",
    "tests/process/vgpu/test_faults.py",
    "tests/process/test_rivals_refuse.py",
    "tests/process/test_numerics.py",
    "tests/process/test_",
)
"""What takes longest comes first, so that nobody waits at the end for one file; all else is short."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests on modelled accelerators to the test that runs them in a process of their own."""
    if collection_path != MODELLED:
        return None
    return not any(Path(each.partition("::")[0]).resolve().is_relative_to(MODELLED) for each in config.args)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests measure out of the user's cache, also that of processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def any_width() -> Iterator[None]:
    """Let tables be as wide as they are, whatever the terminal is from which the tests are run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        yield


LONG = ("tests/net/", "tests/process/cluster/", "tests/recorded/")
"""Folders of the long tier, but for tests that say ``short``."""

SAMPLED = ("tests/process/",)
"""Folders of whose parametrized tests a sample is in the short tier; starting processes takes time."""


@pytest.hookimpl(tryfirst=True)  # before ``-m`` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the long tier, give properties as many examples as their tier has, and put the longest files first."""
    mark_long(items)
    for test in {id(test): test for item in items for test in properties(item)}.values():
        scale_examples(test)

    def place(item: pytest.Item) -> int:
        return next((n for n, start in enumerate(LONGEST) if item.nodeid.startswith(start)), len(LONGEST))

    items.sort(key=place)


def pytest_runtest_setup() -> None:
    """Check the order of transfers of every plan that a test builds."""
    check_every_lowering()


def pytest_collection_finish() -> None:
    """Let collections of garbage leave out what has been imported and collected: each would take half a second."""
    gc.collect()
    gc.freeze()


def mark_long(items: Sequence[pytest.Item]) -> None:
    """Mark what is of a long folder, and all but a sample of the cases of a test."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("short"):
            continue
        if item.nodeid.startswith(LONG):
            item.add_marker("long")
        if item.get_closest_marker("sample") or item.nodeid.startswith(SAMPLED):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one_test in cases.values():
        count, mark = len(of_one_test), of_one_test[0].get_closest_marker("sample")
        kept, tried = (*mark.args, count)[:2] if mark else (1 + count // 10, count)
        for place, item in enumerate(of_one_test):
            if place * kept % count >= kept:
                item.add_marker("long")
                if place * tried % count >= tried:
                    item.add_marker("soak")


def properties(item: pytest.Item) -> Iterator[Any]:
    """Yield what has the settings of a test by hypothesis: a function, or the class of a state machine's."""
    if isinstance(item, pytest.Function) and is_hypothesis_test(item.function):
        machine = item.cls is not None and issubclass(item.cls, unittest.TestCase)
        yield item.cls if machine else item.function


def scale_examples(test: Any) -> None:
    """Scale the number of examples that a property asks for itself, as the profile's is to hypothesis' own of 100.

    Hypothesis has no public way to do this for functions that have settings of their own.
    """
    name = "settings" if isinstance(test, type) else "_hypothesis_internal_use_settings"
    own, usual = getattr(test, name), settings.default.max_examples
    if own.max_examples != usual:
        setattr(test, name, settings(own, max_examples=max(1, own.max_examples * usual // 100)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes that take tests: one more than cores, as tests with processes wait a good deal."""
    return min(4, len(os.sched_getaffinity(0)) + 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal out whole files, in their order, and together what shares something."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((shared for start, shared in TOGETHER.items() if file.startswith(start)), file)

    return Scheduling(config, log)
