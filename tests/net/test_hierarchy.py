"""A network that is measured to be slow: replicas of a host sum up first, and less crosses, with the same result."""

from __future__ import annotations

from typing import Any

import pytest

import onebox
from onebox.engine.compile import compiler
from onebox.engine.partition.hierarchical_reduction import find_reductions, known_links
from onebox.engine.session import TrainingSession
from onebox.engine.workload.batch import as_batch
from tests.kit.reference import assert_same
from tests.net.fleet import Fleet
from tests.net.hosts import Network
from tests.net.training import GRADIENT_BYTES, alone, batch, outcome, parts, plans

RATE_BPS = 100_000_000
"""Of the network, bits a second; memory carries hundreds of times as much."""

BEFORE, STEPS = 2, 6
TRIO = (0, 1, 2)


@pytest.mark.feature("Data parallel: Sum within each host first")
def test_a_host_sums_up_first_where_the_network_was_measured_to_be_slow(
    fleet: Fleet, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet.client():
        pool = onebox.open(f"cpu*2,{fleet.spec('green')}", threads=1)
    green = network["green"]
    plan = plans()["data-parallel"]
    with pool:
        try:
            green.limit(RATE_BPS)
        except RuntimeError as error:
            pytest.skip(f"no links of a limited rate here: {error}")
        try:
            measured = pool.profile(fresh=True)
        finally:
            green.unlimit()
        crossing_bps = [8 * measured.bandwidth_bps[a][b] for near in (0, 1) for a, b in ((near, 2), (2, near))]
        assert max(crossing_bps) < 1.5 * RATE_BPS, "not by the burst that the network lets through at once"
        assert sorted(measured.groups[0]) == [(0, 1), (2,)], measured
        assert known_links(pool.devices, pool.links) is not None, "else each host would sum first in any case"
        assert find_reductions(pool.devices, pool.links, [TRIO])[TRIO][-1].parts == ((0, 1), (2,))
        crossed = {}
        ways: dict[str, Any] = {"each host first": find_reductions, "one ring": lambda *given, **named: {}}
        for name, chosen in ways.items():
            monkeypatch.setattr(compiler, "find_reductions", chosen)
            with onebox.Trainer(*parts(), pool=pool, plan=plan, engine=onebox.Engine(check_every=0)) as trainer:
                losses = [trainer.step(*batch(step)) for step in range(BEFORE)]
                trainer.wait()
                before = green.traffic_bytes()
                losses += [trainer.step(*batch(step)) for step in range(BEFORE, STEPS)]
                trainer.wait()
                crossed[name] = (green.traffic_bytes() - before) / (STEPS - BEFORE)
                assert_same(outcome(trainer, losses), alone(plan, STEPS))
    assert crossed["each host first"] < 0.9 * crossed["one ring"], crossed
    assert crossed["each host first"] >= 2 * GRADIENT_BYTES, "each host sends its sum, and has the other's"


def test_a_run_uses_what_was_measured_of_plain_links(fleet: Fleet) -> None:
    with fleet.client():
        pool = onebox.open(f"cpu*2,{fleet.spec('green')}", threads=1, plain_links=True)
    with pool:
        pool.profile(fresh=True)
        known = find_reductions(pool.devices, pool.links, [TRIO], plain_links=True)
        assert known != find_reductions(pool.devices, pool.links, [TRIO]), "of encrypted ones, or none, times differ"
        with onebox.Trainer(*parts(), pool=pool, plan=plans()["data-parallel"]) as trainer:
            losses = [trainer.step(*batch(step)) for step in range(BEFORE)]
            run = trainer._run
            assert isinstance(run, TrainingSession)
            assert run.set_up(as_batch(*batch(0))).holdings.ways == known
            assert_same(outcome(trainer, losses), alone(plans()["data-parallel"], BEFORE))
