"""A network of three machines with an agent on each, and a client, made once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import onebox
from onebox.pool import Pool
from tests.net.fleet import GRACE_S, MACHINES, Fleet
from tests.net.hosts import Network, unavailable


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    """Hosts red, green and blue, and one named client."""
    why = unavailable()
    if why:
        pytest.skip(why)
    with Network([*MACHINES, "client"]) as made:
        yield made


@pytest.fixture(scope="session")
def fleet(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """An agent on each machine, each with one core to lease; every test leaves them running and nothing leased."""
    with Fleet(network, tmp_path_factory.mktemp("fleet")) as made:
        for name in MACHINES:
            made.pair(name)
        made.start(MACHINES)
        yield made


@pytest.fixture(scope="module")
def opened() -> Iterator[list[Pool]]:
    """The pool of a module, if it has one; to be used as ``pool``."""
    pools: list[Pool] = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(fleet: Fleet, opened: list[Pool]) -> Pool:
    """A pool of all that the three agents have; another one where the test before has left it without somebody."""
    if opened and opened[0].gone:
        opened.pop().close()
    if not opened:
        with fleet.client():  # what its threads connect to is decided here
            opened.append(onebox.open(fleet.spec(), threads=1, grace_s=GRACE_S))
    return opened[0]


@pytest.fixture(autouse=True)
def nothing_leased(request: pytest.FixtureRequest, opened: list[Pool]) -> Iterator[None]:
    """End what a test that fails has left, as all later ones would wait for what it has leased."""
    made: list[Pool] = []
    begin = Pool.__init__

    def init(self: Pool, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "__init__", init)
        yield
    for each in made:
        if each not in opened:
            each.close()
    if "fleet" in request.fixturenames:
        request.getfixturevalue("fleet").end_clients()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models here are small, and the workers need the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
