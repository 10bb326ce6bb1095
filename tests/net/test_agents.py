"""What is said of agents that fail where nobody asked for recovery, and of those whose address is another one."""

from __future__ import annotations

import signal
import time

import pytest

import onebox
from onebox.errors import OneboxError, WorkerDied
from tests.kit.waiting import until
from tests.net.fleet import GRACE_S, Fleet
from tests.net.hosts import Network, cut
from tests.net.training import NARROW, batch, parts

AWAY_S = 4.0


def steps(trainer: onebox.Trainer, count: int) -> None:
    """Train on, waiting for each step."""
    for step in range(count):
        trainer.step(*batch(step))
        trainer.wait()


def steps_for(trainer: onebox.Trainer, time_s: float) -> None:
    """Train on for a while."""
    end_s = time.monotonic() + time_s
    while time.monotonic() < end_s:
        steps(trainer, 1)


def test_a_run_goes_on_without_its_agent_for_a_while_and_a_worker_that_is_killed_is_named(
    fleet: Fleet, network: Network
) -> None:
    agent, known = fleet.agents["red"], len(fleet.told("red"))
    with fleet.client():
        pool = onebox.open(fleet.spec("red"), threads=1, grace_s=10.0)
    with pool, onebox.Trainer(*parts(NARROW), pool=pool, recovery=None) as trainer:
        agent.send_signal(signal.SIGSTOP)
        try:
            steps_for(trainer, AWAY_S)
        finally:
            agent.send_signal(signal.SIGCONT)
        until(lambda: "held-up" in fleet.told("red", known))
        (worker,) = fleet.workers("red")
        network["red"].run("kill", "-KILL", str(worker))
        with pytest.raises(WorkerDied, match=network["red"].address) as caught:
            steps(trainer, 100_000)
        assert caught.value.exit_status == -signal.SIGKILL
    told = fleet.told("red", known)
    assert {"leased", "worker-started", "worker-ended"} < set(told)
    assert not {"expired", "handshake-refused"} & set(told)
    until(lambda: fleet.told("red")[-1] == "freed")


def test_a_host_that_is_cut_off_for_good_is_named(fleet: Fleet, network: Network) -> None:
    known = len(fleet.told("blue"))
    with fleet.client():
        pool = onebox.open(fleet.spec("red", "blue"), threads=1, grace_s=GRACE_S)
    with (
        pool,
        onebox.Trainer(*parts(NARROW), pool=pool, recovery=None, plan=onebox.DataParallel(micro_batch=4)) as trainer,
    ):
        steps(trainer, 1)
        with cut(network["blue"], 600.0):
            with pytest.raises(OneboxError, match=network["blue"].address) as caught:
                steps(trainer, 100_000)
            with pytest.raises(OneboxError) as again:
                trainer.pull()
            assert again.value is caught.value
            until(lambda: not fleet.workers("blue"))
    assert "expired" in fleet.told("blue", known)
    line = fleet.line("blue")
    try:
        assert not line.inspect().offers[0].holders
    finally:
        line.close()


def test_on_a_host_with_two_networks_all_meet_on_the_side_of_the_pool(fleet: Fleet, network: Network) -> None:
    red, green = network["red"], network["green"]
    red.add_address("10.78.0.1", "inner")
    with fleet.client():
        pool = onebox.open(fleet.spec("red", "green"), threads=1, grace_s=GRACE_S)
    with (
        pool,
        onebox.Trainer(
            *parts(NARROW), pool=pool, plan=onebox.DataParallel(), engine=onebox.Engine(check_every=1)
        ) as trainer,
    ):
        assert [device.address for device in pool.devices] == [red.address, green.address]
        steps(trainer, 2)
        found = red.listening(pool.process_ids[0])
        assert len(found) == 2, "instructions, and signs of life; the group has formed"
        assert set(found) == {red.address}
