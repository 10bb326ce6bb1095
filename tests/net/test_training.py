"""Agents on three hosts and a client on a fourth train a model: tensors go from worker to worker by the hosts' own
addresses."""

from __future__ import annotations

from itertools import pairwise

import pytest

import onebox
from tests.kit.reference import assert_same
from tests.net.fleet import MACHINES, Fleet
from tests.net.hosts import Network
from tests.net.training import GRADIENT_BYTES, WIDTH, alone, batch, outcome, parts, plans

STEPS = 6
BEFORE = 2


@pytest.mark.feature("Networks: Send tensors from host to host directly")
@pytest.mark.parametrize("kind", ["data-parallel", "pipelined"])
def test_the_result_is_that_of_one_process_and_tensors_do_not_pass_the_client(
    kind: str, pool: onebox.Pool, fleet: Fleet, network: Network
) -> None:
    addresses = [network[name].address for name in MACHINES]
    assert [device.host for device in pool.devices] == addresses
    assert [device.address for device in pool.devices] == addresses
    assert [fleet.workers(name) for name in MACHINES] == [[process] for process in pool.process_ids]
    plan = plans()[kind]
    with onebox.Trainer(*parts(), pool=pool, plan=plan, engine=onebox.Engine(check_every=0)) as trainer:
        losses = [trainer.step(*batch(step)) for step in range(BEFORE)]
        trainer.wait()
        before = {name: host.traffic_bytes() for name, host in network.hosts.items()}
        losses += [trainer.step(*batch(step)) for step in range(BEFORE, STEPS)]
        trainer.wait()
        moved = {name: host.traffic_bytes() - before[name] for name, host in network.hosts.items()}
        events, links = trainer.link_events(), trainer.links
        found = outcome(trainer, losses)
    assert_same(found, alone(plan, STEPS))
    for each in links:
        own = [event for event in events if (event.use.source, event.use.target) == (each.source, each.target)]
        assert sum(event.use.size_bytes for event in own) == each.size_bytes
        assert all(first.end_ns <= second.start_ns < second.end_ns for first, second in pairwise(own)), each
    most = max(links, key=lambda each: each.size_bytes)
    assert {event.step for event in events if event.use.source == most.source} >= set(range(1, STEPS))
    steps = STEPS - BEFORE
    assert moved["client"] < steps * GRADIENT_BYTES / 10, moved
    if kind == "data-parallel":
        assert all(moved[name] > steps * GRADIENT_BYTES for name in MACHINES), moved
    else:
        activations = steps * 12 * WIDTH * 8
        assert moved["green"] > 2 * activations and moved["blue"] > activations, moved


def test_a_narrow_link_changes_nothing_but_the_time(pool: onebox.Pool, network: Network) -> None:
    plan = plans()["data-parallel"]
    try:
        network["blue"].limit(50_000_000)
    except RuntimeError as error:
        pytest.skip(f"no links of a limited rate here: {error}")
    try:
        with onebox.Trainer(*parts(), pool=pool, plan=plan, engine=onebox.Engine(check_every=0)) as trainer:
            found = outcome(trainer, [trainer.step(*batch(step)) for step in range(STEPS)])
    finally:
        held = network["blue"].unlimit()
    assert held > 0
    assert_same(found, alone(plan, STEPS))
