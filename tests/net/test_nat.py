"""An agent behind a router that translates addresses, of which the ports of the agent and of its workers lead to it."""

from __future__ import annotations

import pytest

import onebox
from onebox.plan import Plan
from tests.kit.reference import assert_same
from tests.net.fleet import GRACE_S, PORT, Fleet
from tests.net.hosts import Network
from tests.net.training import NARROW, alone, batch, outcome, parts

STEPS = 4
INNER = "192.168.77.2"
WORKER_PORTS = "7200-7299"


@pytest.mark.feature("Networks: Reach an agent behind NAT")
def test_clients_and_peers_reach_an_agent_behind_a_router_by_the_address_that_it_advertises(
    fleet: Fleet, network: Network
) -> None:
    try:
        hidden = network.hide("hidden", INNER, [str(PORT), WORKER_PORTS])
    except RuntimeError as error:
        pytest.skip(f"no translation of addresses here: {error}")
    fleet.pair("hidden")
    fleet.start(["hidden"], "--bind", INNER, "--advertise", hidden.address, "--worker-ports", WORKER_PORTS)
    with fleet.client():
        pool = onebox.open(fleet.spec("red", "hidden"), threads=1, grace_s=GRACE_S)
    with pool:
        assert pool.devices[1].address == hidden.address
        assert set(hidden.listening(pool.process_ids[1])) == {INNER}
        for devices in ([1], [0, 1]):
            plan = Plan.data_parallel(devices, [1.0] * len(devices), micro_batch=4, sync="client")
            with onebox.Trainer(*parts(NARROW), pool=pool, plan=plan) as trainer:
                found = outcome(trainer, [trainer.step(*batch(step)) for step in range(STEPS)])
            assert_same(found, alone(plan, STEPS, NARROW))
        plan = Plan.data_parallel(range(2), (1.0, 1.0), micro_batch=4)
        with onebox.Trainer(*parts(NARROW), pool=pool, plan=plan) as trainer:
            found = outcome(trainer, [trainer.step(*batch(step)) for step in range(STEPS)])
        assert_same(found, alone(plan, STEPS, NARROW))
        assert set(hidden.listening(pool.process_ids[1])) == {INNER}
