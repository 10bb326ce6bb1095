"""Three agents and a client on a fourth host: what a lab with a handful of machines does."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

import onebox
from onebox.errors import OneboxError, PoolError, WorkerDied
from onebox.wire import new_keys
from onebox.wire.agents import Queued, Want
from tests.net.conftest import MACHINES
from tests.net.fleet import Fleet
from tests.net.hosts import Network, cut
from tests.net.workers import GRADIENT_BYTES, alone, batch, outcome, parts, plans
from tests.reference import assert_same

STEPS = 5
AWAY_S = 2.0
WITHIN_S = 5.0
"""What happens is noticed within this time."""


@pytest.fixture(scope="module")
def fleet(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """An agent on each machine."""
    with Fleet(network, tmp_path_factory.mktemp("fleet")) as made:
        for name in MACHINES:
            made.pair(name)
        made.start(MACHINES)
        yield made


def spec(network: Network) -> str:
    """Return what names a worker on each machine."""
    return ",".join(f"{network[name].address}/cpu" for name in MACHINES)


def test_three_agents_train_as_one_process_does(fleet: Fleet, network: Network) -> None:
    with fleet.client():
        pool = onebox.open(spec(network), threads=1)
    with pool:
        addresses = [network[name].address for name in MACHINES]
        assert [device.host for device in pool.devices] == addresses
        assert [device.address for device in pool.devices] == addresses
        for plan in plans().values():
            with onebox.Trainer(*parts(), pool=pool, plan=plan, check_every=0) as trainer:
                losses = [trainer.step(*batch(step)) for step in range(2)]
                float(losses[-1])
                before = {name: host.traffic_bytes() for name, host in network.hosts.items()}
                losses += [trainer.step(*batch(step)) for step in range(2, STEPS)]
                float(losses[-1])
                moved = {name: host.traffic_bytes() - before[name] for name, host in network.hosts.items()}
                found = outcome(trainer, losses)
            assert_same(found, alone(plan, STEPS))
            assert moved["client"] < (STEPS - 2) * GRADIENT_BYTES / 10, moved
            if len(plan.stages) == 1:
                assert all(moved[name] > (STEPS - 2) * GRADIENT_BYTES for name in MACHINES), moved


def running(process: int) -> bool:
    """Tell whether a process is there and no zombie."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(true: Callable[[], bool], within_s: float = 20.0) -> None:
    """Wait for something to become true."""
    end_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def steps(trainer: onebox.Trainer, count: int) -> None:
    """Train on, waiting for each step."""
    for step in range(count):
        float(trainer.step(*batch(step)))


def steps_for(trainer: onebox.Trainer, time_s: float) -> None:
    """Train on for a while."""
    end_s = time.monotonic() + time_s
    while time.monotonic() < end_s:
        steps(trainer, 1)


def test_an_agent_may_stop_and_be_cut_off_for_a_while(fleet: Fleet, network: Network) -> None:
    red, agent = network["red"], fleet.agents["red"]
    with fleet.client():
        pool = onebox.open(f"{red.address}/cpu", threads=1, grace_s=10.0)
    with pool, onebox.Trainer(*parts(), pool=pool, check_every=0, recover=False) as trainer:
        agent.send_signal(signal.SIGSTOP)
        try:
            steps_for(trainer, AWAY_S)
        finally:
            agent.send_signal(signal.SIGCONT)
        until(lambda: "held-up" in fleet.told("red"))
        steps(trainer, 3)
        with cut(red, AWAY_S):
            steps_for(trainer, AWAY_S + 1)
        start_s = time.monotonic()
        (worker,) = pool.process_ids
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=red.address) as caught:
            steps(trainer, 100_000)
        assert time.monotonic() - start_s < WITHIN_S
        assert caught.value.exit_status == -signal.SIGKILL
    assert {"leased", "worker-started", "worker-ended"} < set(fleet.told("red"))
    assert not {"expired", "handshake-refused"} & set(fleet.told("red"))
    until(lambda: fleet.told("red")[-1] == "freed")


def test_an_agent_that_is_killed_is_named_and_comes_back_at_an_advertised_address(
    fleet: Fleet, network: Network
) -> None:
    green = network["green"]
    with fleet.client():
        pool = onebox.open(f"{green.address}/cpu", threads=1)
    (worker,) = pool.process_ids
    with pool, onebox.Trainer(*parts(), pool=pool, check_every=0, recover=False) as trainer:
        steps(trainer, 1)
        start_s = time.monotonic()
        fleet.kill("green")
        with pytest.raises(OneboxError, match=green.address):
            steps(trainer, 100_000)
        assert time.monotonic() - start_s < WITHIN_S
    until(lambda: not running(worker))
    green.add_address("10.78.0.1", "inner")
    fleet.start(["green"], "--bind", "0.0.0.0", "--advertise", green.address, "--metrics-port", "9200")
    with fleet.client() as _, onebox.open(f"{green.address}/cpu", threads=1) as pool:
        assert pool.devices[0].address == green.address
        with green.inside(), urllib.request.urlopen("http://127.0.0.1:9200/metrics", timeout=5) as answer:
            assert "onebox_agent_leases_granted_total 1.0" in answer.read().decode()


def test_of_two_clients_one_waits_for_the_other(fleet: Fleet) -> None:
    fleet.pair("blue", "bob")
    lines = [fleet.line("blue"), fleet.line("blue", "bob")]
    try:
        (offer,) = lines[0].inspect().offers
        everything = Want(device="cpu", threads=offer.threads)
        begun = threading.Barrier(2)
        queued: list[Queued] = []
        leased: list[int] = []

        def use(number: int) -> None:
            begun.wait(10)
            (member,) = lines[number].lease([everything], new_keys().public, on_queued=queued.append)
            leased.append(number)
            (holder,) = lines[number].inspect().offers[0].holders
            assert holder.client == ("client@client", "bob@client")[number]
            if len(leased) == 1:
                until(lambda: bool(queued))
                with pytest.raises(PoolError, match="@client"):
                    lines[1 - number].lease([everything], new_keys().public, wait=False)
            lines[number].release(member.lease)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(use, range(2)))
        assert sorted(leased) == [0, 1] and [each.place for each in queued] == [1]
        assert ("client@client", "bob@client")[leased[0]] in queued[0].behind
    finally:
        for line in lines:
            line.close()


def test_a_client_that_is_killed_holds_up_others_for_its_grace_alone(fleet: Fleet, network: Network) -> None:
    address = fleet.pair("blue", "bob")
    line = fleet.line("blue")
    try:
        (offer,) = line.inspect().offers
        script = f"import onebox, time; onebox.open('{address}/cpu', threads={offer.threads}); time.sleep(600)"
        bob = fleet.python("client", "bob", "-c", script)
        until(lambda: fleet.told("blue")[-1] == "worker-started")
        bob.kill()
        bob.wait(10)
        queued: list[Queued] = []
        start_s = time.monotonic()
        line.lease([Want(device="cpu", threads=offer.threads)], new_keys().public, on_queued=queued.append)
        assert time.monotonic() - start_s < 20 and queued
        assert "expired" in fleet.told("blue")
    finally:
        line.close()


def test_a_host_that_is_cut_off_for_good_is_named(fleet: Fleet, network: Network) -> None:
    red, blue = network["red"].address, network["blue"].address
    with fleet.client():
        pool = onebox.open(f"{red}/cpu,{blue}/cpu", threads=1)
    (_, worker) = pool.process_ids
    with pool, onebox.Trainer(*parts(), pool=pool, check_every=0, micro_batch=4, recover=False) as trainer:
        steps(trainer, 1)
        start_s = time.monotonic()
        with cut(network["blue"], 60.0):
            with pytest.raises(OneboxError, match=blue) as caught:
                steps(trainer, 100_000)
            assert time.monotonic() - start_s < WITHIN_S
            with pytest.raises(OneboxError) as again:
                trainer.pull()
            assert again.value is caught.value
            until(lambda: not running(worker))
    assert "expired" in fleet.told("blue")
    line = fleet.line("blue")
    try:
        assert not line.inspect().offers[0].holders
    finally:
        line.close()
