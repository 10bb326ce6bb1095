"""Pools of threads, opened once for all tests of a file: other files change what these threads use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from onebox.pool import Pool
from tests.unit.house import OpenPool, threads_for_processes

Pools = Callable[[int], Pool]


@pytest.fixture(scope="module")
def open_pool() -> Iterator[OpenPool]:
    """Opens a pool of so many workers, which may be broken; it is closed in the end."""
    with threads_for_processes() as opening:
        yield opening


@pytest.fixture(scope="module")
def pools(open_pool: OpenPool) -> Pools:
    """From a number of workers to a pool of so many, for tests that leave it whole."""
    opened: dict[int, Pool] = {}

    def pool(workers: int) -> Pool:
        if workers not in opened:
            opened[workers] = open_pool(workers)
        return opened[workers]

    return pool
