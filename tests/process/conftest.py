"""Pools of workers on this machine, opened once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import onebox

Pools = Callable[[int], onebox.Pool]


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """From a number of workers to a pool of so many CPU workers; for tests that leave it whole."""
    opened: dict[int, onebox.Pool] = {}

    def pool(workers: int) -> onebox.Pool:
        if workers not in opened:
            opened[workers] = onebox.open(f"cpu*{workers}", threads=1)
        return opened[workers]

    yield pool
    for each in opened.values():
        each.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models here are small, and the workers need the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
