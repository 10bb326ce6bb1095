"""What tests of real agents share: a folder for keys, and two agents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.agent.hosts import Host, start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for this test's own keys."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("config")
        patch.setenv("ONEBOX_CONFIG", str(path))
        patch.delenv("ONEBOX_POOL", raising=False)
        yield path


@pytest.fixture(scope="module")
def hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two agents, each on a host of its own for all that a client knows."""
    made = start(2)
    yield made[0], made[1]
    for host in made:
        host.kill()
