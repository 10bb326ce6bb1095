"""What all tests share, and how those that start processes are dealt out over several processes of pytest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

TOGETHER = {
    "tests/net/": "network",
    "tests/process/cluster/": "cluster",
    "tests/process/cli/test_train.py": "undisturbed run",
    "tests/process/cli/test_broken_runs.py": "undisturbed run",
}
"""Beginnings of the names of tests that share what a machine has once, or what takes long to make."""

LONGEST = (
    "tests/net/",
    "tests/process/vgpu/test_examples.py",
    "tests/process/test_pipelines.py",
    "tests/process/cli/test_plan_command.py",
    "tests/process/faults/test_recovery.py",
    "tests/process/cli/test_run_command.py",
    "tests/process/test_readme.py",
    "tests/process/faults/",
    "tests/process/cluster/",
    "tests/process/agent/",
    "tests/process/cli/",
    "tests/process/vgpu/test_coverage.py",
    "tests/process/vgpu/test_faults.py",
    "tests/process/test_rivals_refuse.py",
    "tests/process/test_numerics.py",
    "tests/process/test_",
)
"""What takes longest comes first, so that nobody waits at the end for one file; all else is short."""


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first."""

    def place(item: pytest.Item) -> int:
        return next((n for n, start in enumerate(LONGEST) if item.nodeid.startswith(start)), len(LONGEST))

    items.sort(key=place)


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
