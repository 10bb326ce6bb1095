"""What clients do to each other, and what becomes of their workers when they stop or die."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import onebox
from onebox.errors import PoolError
from onebox.pool.backends.agents.agent_connection import AgentConnection
from onebox.wire import new_keys
from onebox.wire.protocol.agents import Queued, Want
from tests.kit.waiting import until
from tests.net.fleet import GRACE_S, MACHINES, Fleet
from tests.net.hosts import Network
from tests.net.training import digest, plans, run

ROUNDS = 3
"""How often each of two clients leases the device that both want."""

AWAY_S = 2.0
WORDS = re.compile(r"digest (\w+) recoveries (\d+)")


@pytest.fixture
def rivals(fleet: Fleet) -> Iterator[list[AgentConnection]]:
    """Lines of two clients to the agent of the last host."""
    fleet.pair("blue", "bob")
    lines = [fleet.line("blue"), fleet.line("blue", "bob")]
    yield lines
    for line in lines:
        line.close()


def test_of_two_clients_that_race_for_a_device_one_has_it_and_the_other_waits(rivals: list[AgentConnection]) -> None:
    (offer,) = rivals[0].inspect().offers
    everything = Want(device="cpu", threads=offer.threads)
    begun = threading.Barrier(2)
    holding = threading.Lock()
    queued: list[list[Queued]] = [[], []]
    leased: list[int] = []

    def use(number: int) -> None:
        mine = rivals[number]
        for _ in range(ROUNDS):
            begun.wait(30)
            (member,) = mine.lease([everything], new_keys().public, on_queued=queued[number].append)
            assert holding.acquire(blocking=False), "two clients have the same device"
            leased.append(number)
            (holder,) = mine.inspect().offers[0].holders
            assert holder.client == ("client@client", "bob@client")[number]
            if len(leased) % 2:  # the first of this turn
                until(lambda: mine.inspect().queue == (("bob@client", "client@client")[number],))
                with pytest.raises(PoolError, match=r"is leased: .*@client"):
                    mine.lease([everything], new_keys().public, wait=False)
            holding.release()
            mine.release(member.lease)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(use, range(2)))
    assert sorted(leased) == [0] * ROUNDS + [1] * ROUNDS
    for turn in range(ROUNDS):
        assert {*leased[2 * turn : 2 * turn + 2]} == {0, 1}
    told = [place for each in queued for place in each]
    assert len(told) == ROUNDS and {place.place for place in told} == {1}
    for number, places in enumerate(queued):
        assert all(("bob@client", "client@client")[number] in place.behind for place in places)


def test_a_client_may_stop_for_a_while_and_what_it_had_is_free_when_it_was_killed(
    fleet: Fleet, network: Network
) -> None:
    client = fleet.python("client", "client", "-m", "tests.net.client", fleet.spec())
    until(lambda: "step 3" in fleet.printed("client") or client.poll() is not None, 60)
    known = {name: len(fleet.told(name)) for name in MACHINES}
    client.send_signal(signal.SIGSTOP)
    time.sleep(AWAY_S)
    client.send_signal(signal.SIGCONT)
    until(lambda: WORDS.search(fleet.printed("client")) is not None or client.poll() is not None, 60)
    found = WORDS.search(fleet.printed("client"))
    assert found is not None, fleet.printed("client")
    assert found[2] == "0" and AWAY_S < GRACE_S
    assert not any(fleet.told(name, known[name]) for name in MACHINES)
    client.kill()
    client.wait(30)
    with fleet.client():
        pool = onebox.open(fleet.spec(), threads=1, grace_s=GRACE_S)  # which waits for what the other one had
    for name in MACHINES:
        assert fleet.told(name, known[name])[-4:] == ["expired", "freed", "leased", "worker-started"], name
    with pool:
        assert {name: fleet.workers(name) for name in MACHINES} == {
            name: [process] for name, process in zip(MACHINES, pool.process_ids, strict=True)
        }
        undisturbed = run(pool, plans()["data-parallel"]).outcome
    assert digest(undisturbed) == found[1]
    until(lambda: not any(fleet.workers(name) for name in MACHINES))
