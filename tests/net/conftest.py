"""A network of three machines and a client, made once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import onebox
from tests.net.hosts import Network, unavailable
from tests.net.workers import pool_of

MACHINES = ("red", "green", "blue")


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    """Hosts red, green and blue, and one named client."""
    why = unavailable()
    if why:
        pytest.skip(why)
    with Network([*MACHINES, "client"]) as made:
        yield made


@pytest.fixture(scope="session")
def pool(network: Network) -> Iterator[onebox.Pool]:
    """A worker on each machine, and the client on its own host; for tests that leave it whole."""
    with network["client"].inside():  # what its threads connect to is decided here
        opened = pool_of([network[name] for name in MACHINES])
    with opened:
        yield opened


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models here are small, and the workers need the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
