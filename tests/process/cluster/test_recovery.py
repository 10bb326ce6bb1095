"""A run on a Ray cluster goes on when an actor is killed, which Ray starts again."""

from __future__ import annotations

import psutil
import pytest
import torch
from torch import Tensor

import onebox
from onebox.engine.recovery.policy import RecoveryRecord
from onebox.plan import Plan
from onebox.pool import Pool, open_pool
from tests.kit.models import CASES, OPTIMIZERS
from tests.process.cli.commands import assert_gone
from tests.process.cluster.conftest import Nodes

STEPS = 10
BEFORE = 4


def run(pool: Pool, *, killed: int | None = None) -> tuple[dict[str, Tensor], tuple[RecoveryRecord, ...]]:
    """Train as a pool has it, and kill the actor of a worker; return the weights and what was lost."""
    case = CASES["dropping"]
    model = case.model()
    plan = Plan.data_parallel(range(2), (1.0, 1.0), micro_batch=2)
    with onebox.Trainer(
        model, case.loss, OPTIMIZERS["adamw"](model), pool=pool, plan=plan, engine=onebox.Engine(check_every=3)
    ) as trainer:
        for number, batch in enumerate(case.batches([8] * STEPS)):
            if number == BEFORE and killed is not None:
                worker = psutil.Process(pool.process_ids[killed])
                psutil.Process(worker.ppid()).kill()
                assert_gone([worker])  # the few steps that are left could be done before it notices
            trainer.step(*batch)
        return trainer.tensors(), trainer.recoveries


@pytest.mark.feature("Clusters: Recover on a Ray cluster")
def test_a_killed_actor_costs_a_recovery_and_no_bit(nodes: Nodes) -> None:
    with open_pool("ray/cpu*2/spread", threads=1) as pool:
        expected, nothing = run(pool)
        found, (story,) = run(pool, killed=1)
    assert not nothing
    assert (story.lost, story.replaced, story.plan) == ((1,), (1,), None)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
