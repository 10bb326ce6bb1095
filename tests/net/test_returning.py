"""Hosts that are cut off, and come back: the run goes on without them within seconds, and with them afterwards."""

from __future__ import annotations

import logging
import random
import signal

import pytest

import onebox
from onebox.errors import PoolError
from tests.kit.reference import assert_same
from tests.kit.waiting import until
from tests.net.cuts import sufferer
from tests.net.fleet import MACHINES, Fleet
from tests.net.hosts import Network
from tests.net.training import NARROW, alone, plans

TRIES = 3


@pytest.mark.feature("Recovery: Take back a host that returns")
def test_a_run_goes_on_within_seconds_without_a_host_that_is_cut_off_and_takes_it_back(
    fleet: Fleet, network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    seeded = random.Random(3)
    with caplog.at_level(logging.WARNING, "onebox"), sufferer(fleet, network) as run:
        for number in range(TRIES):
            run.steps_for(0.5 + seeded.random())
            run.cut_off()
            (line,) = [record.getMessage() for record in caplog.records if "back before step" in record.getMessage()]
            assert f"device 2 (cpu on {network['blue'].address})" in line and "plan: " in line, number
            caplog.clear()
        run.steps_for(0.5)
        assert run.trainer.plan == plans()["data-parallel"] and not run.trainer.pool.gone
        assert_same(run.outcome, alone(plans()["data-parallel"], len(run.losses), NARROW))


def test_an_agent_that_is_started_again_is_taken_back_in_a_running_run(fleet: Fleet, network: Network) -> None:
    with sufferer(fleet, network) as run:
        fleet.kill("blue")
        while not run.trainer.pool.gone:
            run.step()
        fleet.start(["blue"])
        run.until_used()
        run.steps_for(0.5)
        assert_same(run.outcome, alone(plans()["data-parallel"], len(run.losses), NARROW))
    until(lambda: not any(fleet.workers(name) for name in MACHINES))


def test_a_host_that_only_the_client_reaches_is_taken_back_and_its_tensors_go_through_the_client(
    fleet: Fleet, network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    others = [network[name].address for name in MACHINES[:-1]]
    with caplog.at_level(logging.WARNING, "onebox"), sufferer(fleet, network) as run:
        network["blue"].plug(False)
        while not run.trainer.recoveries:
            run.step()
        for address in others:
            network["blue"].block(address, True)
        network["blue"].plug(True)
        try:
            run.until_used(120.0)
            run.steps_for(0.5)
        finally:
            for address in others:
                network["blue"].block(address, False)
        assert any("go through this client" in record.getMessage() for record in caplog.records)
        assert_same(run.outcome, alone(plans()["data-parallel"], len(run.losses), NARROW))


def test_a_client_that_lost_its_leases_is_told_why_and_who_has_the_device(fleet: Fleet, network: Network) -> None:
    for name in MACHINES:
        fleet.pair(name, "bob")
        fleet.pair(name, "sleeper")
    client = fleet.python("client", "sleeper", "-m", "tests.net.client", fleet.spec())
    until(lambda: "step 3" in fleet.printed("sleeper") or client.poll() is not None, 60)
    client.send_signal(signal.SIGSTOP)
    # bob has all of them: the client would go on with any lease that had not ended yet, or that it got anew
    with fleet.client("bob"), onebox.open(fleet.spec(), threads=1):
        client.send_signal(signal.SIGCONT)
        until(lambda: client.poll() is not None, 90)
    said = fleet.printed("sleeper")
    assert "your lease ended: this client was silent for" in said
    assert "bob@client" in said


def test_a_worker_that_cannot_be_reached_is_named_within_seconds(fleet: Fleet, network: Network) -> None:
    fleet.pair("green", port=7272)
    agent = fleet.python(
        "green", "green", "-m", "onebox", "serve", "--allow-root", "--port", "7272", "--bind", "0.0.0.0",
        "--advertise", "10.77.0.99",
    )  # fmt: skip
    try:
        until(lambda: ":7272" in fleet.printed("green") or agent.poll() is not None, 60)
        with fleet.client(), pytest.raises(PoolError, match=r"10\.77\.0\.99, port \d+") as caught:
            onebox.open(f"{network['green'].address}:7272/cpu", threads=1)
        assert "--advertise" in str(caught.value) and "firewall" in str(caught.value)
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.wait(30)


def test_all_that_keeps_an_agent_from_starting_is_said_at_once(fleet: Fleet, network: Network) -> None:
    agent = fleet.python("client", "nobody", "-m", "onebox", "serve", "--user", "root")
    assert agent.wait(60) == 2
    said = fleet.printed("nobody")
    assert all(word in said for word in ("--user root: that is root", "--advertise", "nobody is paired")), said
