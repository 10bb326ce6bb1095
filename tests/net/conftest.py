"""A network of three machines and a client, made once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.net.hosts import Network, unavailable

MACHINES = ("red", "green", "blue")


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    """Hosts red, green and blue, and one named client."""
    why = unavailable()
    if why:
        pytest.skip(why)
    with Network([*MACHINES, "client"]) as made:
        yield made


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models here are small, and the workers need the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
