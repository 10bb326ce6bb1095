"""A worker of the client's own machine beside one of another host."""

from __future__ import annotations

import pytest

import onebox
from onebox.plan import Plan
from tests.kit.reference import assert_same
from tests.net.fleet import Fleet
from tests.net.hosts import Network, cut
from tests.net.training import NARROW, alone, batch, outcome, parts

STEPS = 6
AWAY_S = 4.5
"""Longer than a silent host is waited for unless a longer grace is asked for."""


@pytest.mark.feature("Recovery: Ride out a cut of the network")
def test_they_meet_at_the_clients_own_address_and_a_longer_cut_is_ridden_out_if_asked_for(
    fleet: Fleet, network: Network
) -> None:
    green, known = network["green"], len(fleet.told("green"))
    plan = Plan.data_parallel(range(2), (1.0, 1.0))
    with fleet.client():
        pool = onebox.open(f"cpu,{fleet.spec('green')}", threads=1, grace_s=20.0)
    with pool:
        assert [device.host for device in pool.devices] == ["localhost", green.address]
        assert [device.address for device in pool.devices] == [network["client"].address, green.address]
        with onebox.Trainer(*parts(NARROW), pool=pool, plan=plan, engine=onebox.Engine(check_every=1)) as trainer:
            losses = [trainer.step(*batch(step)) for step in range(2)]
            trainer.wait()
            with cut(green, AWAY_S):
                losses += [trainer.step(*batch(step)) for step in range(2, STEPS)]
                trainer.wait()
            found = outcome(trainer, losses)
        assert not {"expired", "worker-ended"} & set(fleet.told("green", known))
    assert_same(found, alone(plan, STEPS, NARROW))
