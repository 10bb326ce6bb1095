"""Pools of workers on this machine, opened once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import onebox
from onebox.engine.compile import offload
from onebox.engine.workload.captures import Captures
from tests.kit.pools import Pools
from tests.process import captured


@pytest.fixture(scope="session")
def open_pools() -> Iterator[Pools]:
    """The pools that are open; modules take them by :func:`pools`."""
    made = Pools()
    yield made
    made.close()


@pytest.fixture(scope="module")
def pools(open_pools: Pools) -> Iterator[Pools]:
    """From a number of workers to a pool of so many CPU workers; for tests that leave it whole."""
    yield open_pools
    open_pools.look()


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest, pools: Pools) -> onebox.Pool:
    """The shared pool of as many CPU workers as ``DEVICES`` of the module says, or of two."""
    return pools(getattr(request.module, "DEVICES", 2))


@pytest.fixture(scope="module", autouse=True)  # not longer: other folders are tested by the same process
def nothing_too_small() -> Iterator[None]:
    """The models here are small: let all of their values go to the host that could."""
    with pytest.MonkeyPatch.context() as patch:  # a test's own is undone when the test ends, before other fixtures
        patch.setattr(offload, "LEAST_BYTES", 1)
        yield


@pytest.fixture(scope="module", autouse=True)
def each_capture_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let trainers share captures, and capture without guards, unless a module says otherwise."""
    own = request.module.__name__.startswith("tests.process.plain.")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Captures, "_capture", captured.capture)
        patch.setattr(captured, "guarded", own or getattr(request.module, "GUARDED", False))
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models here are small, and the workers need the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
