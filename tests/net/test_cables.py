"""A cable is pulled for a moment while a model is trained over three hosts."""

from __future__ import annotations

import pytest

import onebox
from tests.net.hosts import Network, cut
from tests.net.workers import alone, batch, outcome, parts, plans
from tests.reference import assert_same

CUT_S = 2.0


@pytest.mark.parametrize(("kind", "name"), [("data-parallel", "green"), ("pipelined", "client")])
def test_a_short_cut_is_ridden_out(kind: str, name: str, pool: onebox.Pool, network: Network) -> None:
    plan = plans()[kind]
    with onebox.Trainer(*parts(), pool=pool, plan=plan, check_every=0) as trainer:
        losses = [trainer.step(*batch(step)) for step in range(2)]
        float(losses[-1])
        with cut(network[name], CUT_S) as mending:
            while mending.is_alive() or len(losses) < 6:
                losses.append(trainer.step(*batch(len(losses))))
                float(losses[-1])
        found = outcome(trainer, losses)
    assert_same(found, alone(plan, len(losses)))
