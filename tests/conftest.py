"""Settings of all tests: hypothesis profiles, the order in which several processes take the tests, and their tiers.

``make test``, of every commit, runs the short tier, ``make test-all`` the long one; ``tests/tiers.py`` says which test
is of which. Every kind of behaviour has a case in the short tier; pairs of settings of training runs meet in
``tests/process/test_covering_array.py``. Tests by hypothesis run in both tiers, with other examples: in the short one
a tenth of those of the long one, the same each time; in the long one at random, and what failed once is kept in
``.hypothesis`` and comes first.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import unittest
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings

from onebox.cost.cache import cache_folder
from onebox.errors import PoolError
from onebox.vgpu.native import build
from tests import tiers
from tests.transfer_order import check_every_lowering

settings.register_profile("short", deadline=None, derandomize=True, max_examples=10)
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


def scope_of(name: str) -> str:
    """Return what one process takes at once: the file of a test, or what it shares with others."""
    file = name.partition("::")[0]
    return next((shared for start, shared in TOGETHER.items() if file.startswith(start)), file)


MODELLED = Path(__file__).parent / "modelled"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests on modelled accelerators to the test that runs them in a process of their own."""
    if collection_path != MODELLED:
        return None
    return not any(Path(each.partition("::")[0]).resolve().is_relative_to(MODELLED) for each in config.args)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say in one line for each reason how many tests were skipped."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"skipped {count}: {reason}")


@pytest.fixture(autouse=True, scope="session")
def own_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests measure out of the user's cache, also that of processes that they start.

    They use copies of one virtual device, as compiling it takes long: it is compiled first, where a test may need it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(Path(sys.prefix) / "cache"))
        shared = cache_folder("device")
        shared.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(map(may_need_device, request.session.items)):
            with contextlib.suppress(PoolError):  # those that do need it are skipped
                build.compiled()
        cache = tmp_path_factory.mktemp("cache")
        own = cache / "onebox" / "device"
        own.mkdir(mode=0o700, parents=True)
        for built in shared.glob("*.so"):
            shutil.copy2(built, own)
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


def may_need_device(item: pytest.Item) -> bool:
    """Return whether a test may use virtual devices."""
    return item.nodeid.startswith("tests/unit/vgpu/") or not item.nodeid.startswith("tests/unit/")


NO_COMPILER = "virtual devices need a C++ compiler once"
"""What the error says where there is neither an object of the device nor a compiler."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip what needs virtual devices, where there is no compiler for them."""
    report = yield
    if report.failed and NO_COMPILER in report.longreprtext and shutil.which(os.environ.get("CXX") or "g++") is None:
        report.outcome = "skipped"
        report.longrepr = (report.nodeid, 0, f"Skipped: {NO_COMPILER}")
    return report


@pytest.fixture(autouse=True, scope="session")
def any_width() -> Iterator[None]:
    """Let tables be as wide as they are, whatever the terminal is from which the tests are run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let durations be recorded."""
    parser.addoption("--record", action="store_true", help="write the seconds of each test to tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Record durations if asked to; heed Ctrl-C also where a shell has started this in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--record"):
        profile = config.getoption("--hypothesis-profile")
        config.pluginmanager.register(tiers.Recorder(as_short=profile in (None, "short")))


@pytest.hookimpl(tryfirst=True, wrapper=True)  # ``-m`` chooses within
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Mark the tiers, give properties as many examples as their tier has, and put the longest files first."""
    durations = tiers.recorded()
    tiers.mark_tiers(items, durations)
    for test in {id(test): test for item in items for test in properties(item)}.values():
        scale_examples(test)
    yield
    seconds = Counter[str]()
    for item in items:
        seconds[scope_of(item.nodeid)] += durations.get(item.nodeid, 0.0)  # type: ignore[assignment]
    items.sort(key=lambda item: -seconds[scope_of(item.nodeid)])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check the order of transfers of every plan that a test builds; skip scripts that lack their device."""
    if item.nodeid.startswith("tests/process/vgpu/") and not device_is_there():
        pytest.skip(NO_COMPILER)
    check_every_lowering()


def device_is_there() -> bool:
    """Return whether there is an object of the virtual device, or can be."""
    made = (Path(sys.prefix) / "cache" / "onebox" / "device").glob("*.so")
    return bool(shutil.which(os.environ.get("CXX") or "g++")) or build.packaged().exists() or any(made)


def pytest_collection_finish() -> None:
    """Let collections of garbage leave out what has been imported and collected: each would take half a second."""
    gc.collect()
    gc.freeze()


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
            return scope_of(nodeid)

    return Scheduling(config, log)
