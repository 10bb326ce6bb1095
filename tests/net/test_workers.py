"""Workers on three hosts and a client on a fourth train a model: tensors go from worker to worker, cables fail."""

from __future__ import annotations

import pytest

import onebox
from tests.net.conftest import MACHINES
from tests.net.hosts import Network
from tests.net.workers import GRADIENT_BYTES, alone, batch, outcome, parts, plans
from tests.reference import assert_same

STEPS = 6


@pytest.mark.parametrize("kind", ["data-parallel", "pipelined"])
def test_the_result_is_that_of_one_process_and_tensors_do_not_pass_the_client(
    kind: str, pool: onebox.Pool, network: Network
) -> None:
    plan = plans()[kind]
    with onebox.Trainer(*parts(), pool=pool, plan=plan, check_every=0) as trainer:
        losses = [trainer.step(*batch(step)) for step in range(2)]
        float(losses[-1])
        before = {name: host.traffic_bytes() for name, host in network.hosts.items()}
        losses += [trainer.step(*batch(step)) for step in range(2, STEPS)]
        float(losses[-1])
        moved = {name: host.traffic_bytes() - before[name] for name, host in network.hosts.items()}
        found = outcome(trainer, losses)
    assert_same(found, alone(plan, STEPS))
    steps = STEPS - 2
    assert moved["client"] < steps * GRADIENT_BYTES / 10, moved
    if kind == "data-parallel":
        assert all(moved[name] > steps * GRADIENT_BYTES for name in MACHINES), moved
    else:
        activations = steps * 12 * 256 * 8
        assert moved["green"] > 2 * activations and moved["blue"] > activations, moved


def test_a_narrow_link_changes_nothing_but_the_time(pool: onebox.Pool, network: Network) -> None:
    plan = plans()["data-parallel"]
    try:
        network["blue"].limit(50_000_000)
    except RuntimeError as error:
        pytest.skip(f"no links of a limited rate here: {error}")
    try:
        with onebox.Trainer(*parts(), pool=pool, plan=plan, check_every=0) as trainer:
            found = outcome(trainer, [trainer.step(*batch(step)) for step in range(STEPS)])
    finally:
        held = network["blue"].unlimit()
    assert held > 0
    assert_same(found, alone(plan, STEPS))
